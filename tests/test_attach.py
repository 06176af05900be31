# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Fields bound to datasets reach the model's preprocessor, split by split."""

import itertools

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.model import ImgDataPreprocessor
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.attach import attach
from mmprefetch.hooks import find_preprocessor

OWN = dict(mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], bgr_to_rgb=False)


def opted_in(**fields):
    return dict(type='PrefetchDataPreprocessor', **fields)


def build(cfg):
    runner = Runner.from_cfg(cfg)
    runner._train_loop = runner.build_train_loop(runner._train_loop)
    return runner


def images_of(runner, split):
    module = find_preprocessor(runner).of_split(split)
    image = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    return module(dict(inputs=[image.clone()]))['inputs']


def expected(**fields):
    image = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    return ImgDataPreprocessor(**fields)(dict(inputs=[image]))['inputs']


@pytest.mark.parametrize('model', [toys.IMG, opted_in(**{k: v for k, v in toys.IMG.items()
                                                         if k != 'type'})])  # fmt: skip
def test_dataset_wins_field_by_field(tmp_path, model):
    cfg = toys.prefetching(toys.config(tmp_path, preprocessor=model))
    cfg.train_dataloader.dataset.data_preprocessor = OWN
    cfg.val_dataloader.dataset.data_preprocessor = dict(mean=[9.0] * 3, std=[3.0] * 3)
    runner, _ = toys.run(cfg)
    kept = dict(pad_size_divisor=4)
    assert torch.equal(images_of(runner, 'train'), expected(**OWN, **kept))
    assert torch.equal(
        images_of(runner, 'val'),
        expected(mean=[9.0] * 3, std=[3.0] * 3, bgr_to_rgb=True, **kept),
    )
    preprocessor = find_preprocessor(runner)
    assert preprocessor.bindings['train'].fields['pad_size_divisor'] == 4
    assert preprocessor.bindings['train'].origin['mean'] == (
        'train_dataloader.dataset.data_preprocessor'
    )


def test_bound_training_equals_a_model_that_has_the_fields(tmp_path):
    own = dict(toys.IMG, mean=[9.0, 8.0, 7.0], std=[2.0, 3.0, 4.0], bgr_to_rgb=False)
    stock = toys.run(toys.config(tmp_path / 'a', preprocessor=own))
    for model in (toys.IMG, opted_in(pad_size_divisor=4)):
        cfg = toys.prefetching(toys.config(tmp_path / 'b', preprocessor=model))
        for split in ('train', 'val'):
            cfg[f'{split}_dataloader'].dataset.data_preprocessor = {
                key: own[key] for key in ('mean', 'std', 'bgr_to_rgb')
            }
        toys.assert_same_run(stock, toys.run(cfg))


def test_stock_val_loop_uses_the_fields_of_its_dataset(tmp_path):
    own = dict(toys.IMG, mean=[9.0, 8.0, 7.0])
    runs = []
    for val_cfg in (dict(), dict(type='PrefetchValLoop')):
        cfg = toys.prefetching(toys.config(tmp_path, preprocessor=opted_in(pad_size_divisor=4)))
        for split in ('train', 'val'):
            cfg[f'{split}_dataloader'].dataset.data_preprocessor = dict(
                mean=own['mean'], std=own['std']
            )
        cfg.val_dataloader.dataset.data_preprocessor.std = [7.0, 7.0, 7.0]
        cfg.val_cfg = val_cfg
        runs.append(toys.run(cfg))
    toys.assert_same_run(*runs)


def test_top_level_counts_between_model_and_dataset(tmp_path):
    cfg = toys.config(tmp_path, preprocessor=opted_in(mean=[1.0] * 3, std=[2.0] * 3, pad_value=7))
    cfg['data_preprocessor'] = dict(mean=[5.0] * 3, std=[6.0] * 3)
    cfg = toys.prefetching(cfg)
    cfg.train_dataloader.dataset.data_preprocessor = dict(mean=[8.0] * 3)
    runner = build(cfg)
    fields = find_preprocessor(runner).bindings['train'].fields
    assert fields == dict(mean=[8.0] * 3, std=[6.0] * 3, pad_value=7)
    assert find_preprocessor(runner).bindings['val'].fields['mean'] == [5.0] * 3


def test_plain_preprocessor_keeps_mmengines_meaning_of_the_top_level(tmp_path, caplog):
    cfg = toys.config(tmp_path)
    cfg['data_preprocessor'] = dict(type='ImgDataPreprocessor', mean=[0.0] * 3, std=[1.0] * 3)
    stock = toys.run(cfg)
    warned = toys.prefetching(cfg)
    warned.log_level = 'WARNING'
    runner = Runner.from_cfg(warned)
    runner.logger.addHandler(caplog.handler)
    runner.train()
    toys.assert_same_run(stock, (runner, toys.recorder(runner)))
    said = [r.getMessage() for r in caplog.records if 'at the top level' in r.getMessage()]
    assert len(said) == 1 and 'PrefetchDataPreprocessor' in said[0] and 'mean' in said[0]


@MODELS.register_module(force=True)
class GenerousModel(toys.ToyModel):
    """Gives its preprocessor more than the config says, as classifiers give augmentations."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.data_preprocessor.pad_value = 5
        self.data_preprocessor.extra = object()


def test_what_model_code_gave_its_preprocessor_is_kept(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path))
    cfg.model.type = 'GenerousModel'
    cfg.train_dataloader.dataset.data_preprocessor = OWN
    runner = build(cfg)
    assert torch.equal(images_of(runner, 'train'), expected(**OWN, pad_value=5, pad_size_divisor=4))
    assert hasattr(find_preprocessor(runner).of_split('train'), 'extra')


@DATASETS.register_module(force=True)
class ToyRepeat(torch.utils.data.Dataset):
    """A wrapper dataset."""

    def __init__(self, dataset):
        self.dataset = DATASETS.build(dataset)
        self.metainfo = self.dataset.metainfo

    def __len__(self):
        return 2 * len(self.dataset)

    def __getitem__(self, index):
        return self.dataset[index // 2]


def test_wrapper_datasets_are_searched(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path, preprocessor=opted_in(pad_size_divisor=4)))
    part = dict(cfg.train_dataloader.dataset, data_preprocessor=OWN)
    cfg.train_dataloader.dataset = dict(type='ToyRepeat', dataset=part)
    runner, record = toys.run(cfg)
    assert torch.equal(images_of(runner, 'train'), expected(**OWN, pad_size_divisor=4))
    assert len(list(itertools.chain(*record.indices))) == 2 * 28


@pytest.mark.parametrize(
    ('bound', 'error', 'words'),
    [
        (dict(meen=[1.0]), ValueError, ('dataset.data_preprocessor', 'meen', 'mean', 'std')),
        (dict(mean=[1.0] * 3), ValueError, ('mean', 'std')),
        ([1.0], TypeError, ('train_dataloader.dataset.data_preprocessor', 'list', 'dict')),
    ],
)
def test_bad_fields(tmp_path, bound, error, words):
    cfg = toys.prefetching(toys.config(tmp_path, preprocessor=opted_in()))
    cfg.train_dataloader.dataset.data_preprocessor = bound
    with pytest.raises(error) as caught:
        build(cfg)
    assert all(word in str(caught.value) for word in words)


def test_bound_fields_need_a_preprocessor(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path))
    cfg.train_dataloader.dataset.data_preprocessor = OWN
    runner = Runner.from_cfg(cfg)
    del runner.model.data_preprocessor
    with pytest.raises(ValueError, match='no data preprocessor'):
        runner.build_train_loop(cfg.train_cfg)


def test_unregistered_wraps():
    with pytest.raises(ValueError, match=r"'ImgDataPreprocesor'.*ImgDataPreprocessor"):
        MODELS.build(opted_in(wraps='ImgDataPreprocesor'))


@pytest.mark.parametrize('wraps', ['ToyModel', 'PrefetchDataPreprocessor', 5, len])
def test_wraps_of_a_wrong_kind(wraps):
    with pytest.raises(ValueError, match=r'model\.data_preprocessor\.wraps=.*no preprocessor'):
        MODELS.build(opted_in(wraps=wraps))


@pytest.mark.parametrize('key', ['type', 'wraps'])
def test_a_dataset_cannot_name_another_preprocessor(tmp_path, key):
    cfg = toys.prefetching(toys.config(tmp_path, preprocessor=opted_in()))
    for name in ('ImgDataPreprocessor', 'mmengine.ImgDataPreprocessor'):
        cfg.train_dataloader.dataset.data_preprocessor = {key: name, **OWN}
        build(cfg)
    cfg.train_dataloader.dataset.data_preprocessor = {key: 'Nonsense', **OWN}
    with pytest.raises(ValueError, match=rf'{key}.*Nonsense.*ImgDataPreprocessor'):
        build(cfg)


def test_the_dumped_config_reproduces_the_run(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path / 'a', preprocessor=opted_in()))
    cfg.train_dataloader.dataset.data_preprocessor = OWN
    first = toys.run(cfg)
    dumped = next(path for path in (tmp_path / 'a').glob('*.py') if 'deploy' not in path.name)
    again = Config.fromfile(dumped)
    again.work_dir = str(tmp_path / 'b')
    again.experiment_name = 'again'
    assert again.train_dataloader.dataset.data_preprocessor == OWN
    toys.assert_same_run(first, toys.run(again))


def test_checkpoints_hold_the_effective_fields(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path, preprocessor=opted_in(pad_size_divisor=4)))
    cfg.train_dataloader.dataset.data_preprocessor = OWN
    toys.run(cfg)
    meta = torch.load(tmp_path / 'epoch_2.pth')['meta']['data_preprocessor']
    assert meta['train'] == dict(type='ImgDataPreprocessor', **OWN, pad_size_divisor=4)
    assert meta['val'] == dict(type='ImgDataPreprocessor', pad_size_divisor=4)


def test_the_table_is_logged_once(tmp_path, caplog):
    cfg = toys.prefetching(toys.config(tmp_path, preprocessor=opted_in()))
    cfg.train_dataloader.dataset.data_preprocessor = OWN
    cfg.log_level = 'INFO'
    runner = Runner.from_cfg(cfg)
    runner.logger.addHandler(caplog.handler)
    runner.train()
    said = [r.getMessage() for r in caplog.records]
    (text,) = [message for message in said if message.startswith('Preprocessing of each split')]
    assert 'train_dataloader.dataset.data_preprocessor' in text and '[1.0, 2.0, 3.0]' in text


def test_wraps_the_outermost_preprocessor():
    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.student = toys.ToyModel()
            self.data_preprocessor = ImgDataPreprocessor()

    class FakeRunner:
        model = Outer()
        cfg = Config()

    wrapper, _ = attach(FakeRunner, 'train', None)
    assert wrapper is FakeRunner.model.data_preprocessor
    assert isinstance(wrapper, PrefetchDataPreprocessor)
    assert not isinstance(FakeRunner.model.student.data_preprocessor, PrefetchDataPreprocessor)


def test_splits_may_share_one_config(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path, preprocessor=opted_in()))
    cfg.val_dataloader.dataset.data_preprocessor = OWN
    cfg.merge_from_dict(dict(test_cfg=dict(), test_evaluator=dict(type='ToyMetric')))
    cfg._cfg_dict['test_dataloader'] = cfg._cfg_dict['val_dataloader']
    runner = build(cfg)
    for split in ('val', 'test'):
        assert torch.equal(images_of(runner, split), expected(**OWN))
    runner.test()
