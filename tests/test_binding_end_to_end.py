# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Fields from every place of a config, through whole runs, against what the model gets."""

import copy
import functools

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.dataset import BaseDataset, DefaultSampler, pseudo_collate
from mmengine.hooks import Hook
from mmengine.model import ImgDataPreprocessor
from mmengine.registry import DATASETS, HOOKS
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from mmprefetch.fields.explain import explain
from mmprefetch.hooks import find_preprocessor
from mmprefetch.statistics.measure import measure_split

# What detection models bring, and what the images need.
MODEL = dict(
    type='ImgDataPreprocessor',
    mean=[123.675, 116.28, 103.53],
    std=[58.395, 57.12, 57.375],
    bgr_to_rgb=True,
    pad_size_divisor=4,
)
ZERO = dict(mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0])
OPTED_IN = dict(MODEL, type='PrefetchDataPreprocessor')
KEPT = dict(bgr_to_rgb=True, pad_size_divisor=4)


@HOOKS.register_module(force=True)
class SeenImages(Hook):
    """Keeps each batch as the model gets it, by split, and the preprocessor of each."""

    def __init__(self):
        self.batches = dict(train=[], val=[], test=[])
        self.modules = dict(train=[], val=[], test=[])
        self.split = None

    def before_run(self, runner):
        runner.model.register_forward_pre_hook(self._keep, with_kwargs=True)

    def _keep(self, module, args, kwargs):
        self.batches[self.split].append((kwargs['inputs'].clone(), kwargs['data_samples']))

    def before_train_epoch(self, runner):
        self._enter(runner, 'train')

    def before_val_epoch(self, runner):
        self._enter(runner, 'val')

    def before_test_epoch(self, runner):
        self._enter(runner, 'test')

    def _enter(self, runner, split):
        self.split = split
        preprocessor = find_preprocessor(runner)
        if preprocessor is not None:
            self.modules[split].append(preprocessor.of_split(split))


@DATASETS.register_module(force=True)
class PlainScans(BaseDataset):
    """The toys' images, of one size, with metainfo the way mmengine's datasets have it."""

    METAINFO = dict(classes=('even', 'odd'))

    def __init__(self, length=6, **kwargs):
        self.images = toys.ToyImages(length, size=(6, 7), ragged=False)
        super().__init__(pipeline=[], **kwargs)

    def load_data_list(self):
        return [dict(index=index) for index in range(len(self.images))]

    def __getitem__(self, index):
        return self.images[index]


@DATASETS.register_module(force=True)
class DeclaredScans(PlainScans):
    METAINFO = dict(preprocess=dict(mean=[11.0] * 3, std=[12.0] * 3, pad_value=13))


@DATASETS.register_module(force=True)
class TakingScans(PlainScans):
    def __init__(self, data_preprocessor, **kwargs):
        self.given = data_preprocessor
        super().__init__(**kwargs)


def config(work_dir, *, train, val=None, preprocessor=MODEL, **options):
    cfg = toys.config(
        work_dir, preprocessor=preprocessor, hooks=[dict(type='SeenImages')], **options
    )
    cfg['train_dataloader']['dataset'] = copy.deepcopy(train)
    cfg['val_dataloader']['dataset'] = copy.deepcopy(val or dict(type='PlainScans'))
    return cfg


def run(cfg):
    runner, _ = toys.run(cfg)
    return runner, next(hook for hook in runner.hooks if isinstance(hook, SeenImages))


def check(seen, split, fields, part=lambda sample: 0):
    """Each image that the model got equals the stock preprocessor's, with these fields."""
    fields = fields if isinstance(fields, list) else [fields]
    stock = [ImgDataPreprocessor(**one) for one in fields]
    images = toys.ToyImages(100, size=(6, 7), ragged=False)
    assert seen.batches[split]
    for inputs, samples in seen.batches[split]:
        for image, sample in zip(inputs, samples, strict=True):
            raw = images[sample.index]['inputs']
            expected = stock[part(sample)](dict(inputs=[raw]))['inputs'][0]
            assert torch.equal(image, expected)


# The problem solved


def own_of(preprocessor):
    return {name: value for name, value in preprocessor.items() if name != 'type'}


def test_mmengine_alone_keeps_the_models_values_and_says_nothing(tmp_path, caplog):
    cfg = config(tmp_path, train=dict(type='PlainScans'), data_preprocessor=dict(ZERO))
    cfg['log_level'] = 'WARNING'
    runner = Runner.from_cfg(Config(cfg))
    runner.logger.addHandler(caplog.handler)
    runner.train()
    seen = next(hook for hook in runner.hooks if isinstance(hook, SeenImages))
    for split in ('train', 'val'):
        check(seen, split, own_of(MODEL))
    assert not [record for record in caplog.records if 'preprocessor' in record.getMessage()]


def test_mmengine_alone_hands_the_key_to_the_dataset_which_refuses_it(tmp_path):
    cfg = config(tmp_path, train=dict(type='PlainScans', data_preprocessor=ZERO))
    with pytest.raises(TypeError, match='data_preprocessor'):
        toys.run(cfg)


@pytest.mark.parametrize('model', [MODEL, OPTED_IN], ids=['plain', 'opted in'])
def test_the_datasets_values_win_and_the_models_other_fields_stay(tmp_path, model):
    dataset = dict(type='PlainScans', data_preprocessor=ZERO)
    runner, seen = run(
        toys.prefetching(config(tmp_path, train=dataset, val=dataset, preprocessor=model))
    )
    for split in ('train', 'val'):
        check(seen, split, dict(ZERO, **KEPT))
        assert find_preprocessor(runner).of_split(split).pad_size_divisor == 4


# Every place


@pytest.mark.parametrize('depth', [0, 2])
def test_places_of_a_dataset_in_their_order(tmp_path, depth):
    high, middle = dict(std=[22.0] * 3), dict(mean=[31.0] * 3, std=[32.0] * 3)
    train = dict(type='DeclaredScans', metainfo=dict(preprocess=dict(middle)))
    cfg = config(
        tmp_path,
        train=dict(train, data_preprocessor=high),
        val=dict(type='DeclaredScans'),
        preprocessor=OPTED_IN,
        data_preprocessor=dict(mean=[41.0] * 3, std=[42.0] * 3, pad_value=43, bgr_to_rgb=False),
    )
    # A value given in metainfo replaces that of the class in mmengine's metainfo; the fields merge.
    _, seen = run(toys.prefetching(cfg, depth))
    lower = dict(bgr_to_rgb=False, pad_size_divisor=4, pad_value=13)
    check(seen, 'train', dict(mean=[31.0] * 3, std=[22.0] * 3, **lower))
    check(seen, 'val', dict(mean=[11.0] * 3, std=[12.0] * 3, **lower))
    report = explain(toys.prefetching(cfg))['splits']
    key = 'train_dataloader.dataset'
    found = {name: one['key'] for name, one in report['train'][0]['fields'].items()}
    assert found == dict(
        mean=f'{key}.metainfo.preprocess',
        std=f'{key}.data_preprocessor',
        pad_value='DeclaredScans.METAINFO.preprocess',
        bgr_to_rgb='data_preprocessor',
        pad_size_divisor='model.data_preprocessor',
    )
    assert [over['key'] for over in report['train'][0]['fields']['std']['overrides']] == [
        f'{key}.metainfo.preprocess',
        'DeclaredScans.METAINFO.preprocess',
        'data_preprocessor',
        'model.data_preprocessor',
    ]


def test_places_of_a_dataset_that_is_built_already(tmp_path):
    cfg = config(tmp_path, train=dict(type='PlainScans'), preprocessor=OPTED_IN)
    dataset = DeclaredScans(metainfo=dict(preprocess=dict(mean=[31.0] * 3)))
    dataset.data_preprocessor = dict(std=[22.0] * 3)
    cfg = toys.prefetching(cfg)
    runner = Runner.from_cfg(cfg)
    runner._train_dataloader = DataLoader(
        dataset, 2, sampler=DefaultSampler(dataset, shuffle=True), collate_fn=pseudo_collate
    )
    runner.train()
    seen = next(hook for hook in runner.hooks if isinstance(hook, SeenImages))
    check(seen, 'train', dict(KEPT, mean=[31.0] * 3, std=[22.0] * 3, pad_value=13))


def test_a_dataset_that_takes_the_key_itself_gets_it(tmp_path):
    dataset = dict(type='TakingScans', data_preprocessor=ZERO)
    runner, seen = run(toys.prefetching(config(tmp_path, train=dataset, val=dataset)))
    assert runner.train_dataloader.dataset.given == ZERO
    assert runner.val_dataloader.dataset.given == ZERO
    for split in ('train', 'val'):
        check(seen, split, dict(ZERO, **KEPT))


LAZY = """
from mmengine.config import read_base

with read_base():
    from .base import *

model.data_preprocessor.pad_size_divisor = 8
train_dataloader.dataset.data_preprocessor.mean = [21.0] * 3
"""
BASE = """
from mmengine.dataset import DefaultSampler
from mmengine.optim import OptimWrapper
from torch.optim import SGD

from mmprefetch import PrefetchDataPreprocessor, PrefetchLoop, PrefetchValLoop
from test_binding_end_to_end import PlainScans, SeenImages
from toys import Recorder, ToyMetric, ToyModel

model = dict(type=ToyModel, data_preprocessor=dict(
    type=PrefetchDataPreprocessor, mean=[101.0] * 3, std=[2.0] * 3, bgr_to_rgb=True))
train_dataloader = dict(batch_size=4, num_workers=0,
    dataset=dict(type=PlainScans, data_preprocessor=dict(mean=[3.0] * 3)),
    sampler=dict(type=DefaultSampler, shuffle=True))
val_dataloader = dict(batch_size=4, num_workers=0,
    dataset=dict(type=PlainScans, data_preprocessor=dict(std=[4.0] * 3)),
    sampler=dict(type=DefaultSampler, shuffle=False))
train_cfg = dict(type=PrefetchLoop, max_epochs=2)
val_cfg = dict(type=PrefetchValLoop)
val_evaluator = dict(type=ToyMetric)
optim_wrapper = dict(type=OptimWrapper, optimizer=dict(type=SGD, lr=0.1))
custom_hooks = [dict(type=Recorder), dict(type=SeenImages)]
log_level = 'ERROR'
visualizer = None
"""


def test_a_config_that_imports_its_base(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'base.py').write_text(BASE)
    (tmp_path / 'child.py').write_text(LAZY)
    cfg = Config.fromfile('child.py')
    report = explain(cfg)['splits']
    cfg.merge_from_dict(dict(work_dir=str(tmp_path / 'work'), experiment_name='lazy'))
    _, seen = run(cfg)
    expected = dict(
        train=dict(mean=[21.0] * 3, std=[2.0] * 3), val=dict(mean=[101.0] * 3, std=[4.0] * 3)
    )
    for split, own in expected.items():
        ((group),) = report[split]
        fields = {name: one['value'] for name, one in group['fields'].items()}
        assert fields == dict(own, bgr_to_rgb=True, pad_size_divisor=8)
        check(seen, split, fields)
    mean = report['train'][0]['fields']['mean']
    assert (mean['file'], mean['overrides'][0]['file']) == ('child.py:8', 'base.py:11')


# Mixed datasets by metainfo


def by_metainfo(number):
    fields = dict(mean=[float(number)] * 3, std=[number + 1.0] * 3)
    return dict(type='PlainScans', length=4 + number, metainfo=dict(preprocess=fields))


def test_a_concatenation_refuses_other_metainfo_unless_told_to_ignore_it(tmp_path):
    mixed = dict(type='ConcatDataset', datasets=[by_metainfo(0), by_metainfo(1)])
    with pytest.raises(ValueError, match='meta information'):
        toys.run(toys.prefetching(config(tmp_path, train=mixed)))


def test_metainfo_of_each_part_counts(tmp_path):
    parts = [by_metainfo(number) for number in (0, 1, 2)]
    mixed = dict(type='ConcatDataset', datasets=parts, ignore_keys=['preprocess'])
    cfg = toys.prefetching(config(tmp_path, train=mixed, batch_size=15))
    # One batch in the order of the dataset tells from which part each image is.
    cfg.train_dataloader.sampler.shuffle = False
    _, seen = run(cfg)
    fields = [dict(KEPT, **part['metainfo']['preprocess']) for part in parts]
    bounds = [number for number, length in enumerate((4, 5, 6)) for _ in range(length)]
    for inputs, samples in seen.batches['train']:
        assert len(inputs) == len(bounds)
        for image, sample, number in zip(inputs, samples, bounds, strict=True):
            one = SeenImages()
            one.batches['train'] = [(image[None], [sample])]
            check(one, 'train', fields[number])
    groups = explain(cfg)['splits']['train']
    assert [group['datasets'][0]['key'] for group in groups] == [
        f'train_dataloader.dataset.datasets.{number}' for number in (0, 1, 2)
    ]
    assert [group['fields']['mean']['value'] for group in groups] == [
        part['metainfo']['preprocess']['mean'] for part in parts
    ]


@DATASETS.register_module(name='MosaicOfScans', force=True)
class MultiImageMixDataset(torch.utils.data.Dataset):
    """Named as mosaic's wrapper is: an item is made of several of its dataset's."""

    def __init__(self, dataset):
        self.dataset = DATASETS.build(dataset)
        self.metainfo = self.dataset.metainfo

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, index):
        items = [self.dataset[(index + step) % len(self)] for step in (0, 1)]
        halves = [item['inputs'][:, :, :3] for item in items]
        return dict(items[0], inputs=torch.cat(halves, dim=2))


@pytest.mark.parametrize('name', ['mean', 'std', 'bgr_to_rgb'])
def test_merged_images_cannot_differ_and_the_error_explains_why(tmp_path, name):
    values = [dict(ZERO, bgr_to_rgb=True), dict(ZERO, bgr_to_rgb=True)]
    values[1][name] = False if name == 'bgr_to_rgb' else [7.0] * 3
    parts = [dict(type='PlainScans', data_preprocessor=one) for one in values]
    mosaic = dict(type='MosaicOfScans', dataset=dict(type='ConcatDataset', datasets=parts))
    cfg = toys.prefetching(config(tmp_path, train=mosaic))
    words = r'train_dataloader\.dataset merges images of several samples .*' + (
        r'dataset\.datasets\.0 has .*dataset\.datasets\.1 has .*outside of the mixing wrapper'
    )
    with pytest.raises(ValueError, match=words):
        toys.run(cfg)
    with pytest.raises(ValueError, match=words):
        explain(cfg)
    # Outside of it they may, and inside of it where they agree.
    outside = [dict(type='MosaicOfScans', dataset=part) for part in parts]
    outside = dict(type='ToyConcat', datasets=outside)
    runner, _ = toys.run(toys.prefetching(config(tmp_path, train=outside)))
    assert find_preprocessor(runner).is_mixed('train')
    parts[1]['data_preprocessor'] = values[0]
    runner, _ = toys.run(toys.prefetching(config(tmp_path, train=mosaic)))
    assert not find_preprocessor(runner).is_mixed('train')


@DATASETS.register_module(force=True)
class ToyConcat(torch.utils.data.ConcatDataset):
    def __init__(self, datasets):
        super().__init__([DATASETS.build(dataset) for dataset in datasets])


# Splits that differ alternate


@pytest.mark.parametrize('val_loop', ['PrefetchValLoop', 'ValLoop'])
def test_splits_that_differ_alternate_without_being_built_again(tmp_path, monkeypatch, val_loop):
    of_train = dict(mean=[5.0] * 3, std=[6.0] * 3, pad_size_divisor=8)
    of_val = dict(mean=[7.0] * 3, std=[8.0] * 3, pad_size_divisor=16, bgr_to_rgb=False)
    train, val = (
        dict(type='PlainScans', data_preprocessor=fields) for fields in (of_train, of_val)
    )
    cfg = toys.prefetching(config(tmp_path, train=train, val=val))
    cfg.train_cfg.max_epochs = 3
    cfg.val_cfg.type = val_loop
    if val_loop == 'ValLoop':
        cfg.val_cfg.pop('prefetch_depth')
    built = []
    runner = Runner.from_cfg(cfg)
    seen = next(hook for hook in runner.hooks if isinstance(hook, SeenImages))
    construct = ImgDataPreprocessor.__init__

    @functools.wraps(construct)
    def counted(self, *args, **kwargs):
        built.append(seen.split)
        construct(self, *args, **kwargs)

    monkeypatch.setattr(ImgDataPreprocessor, '__init__', counted)
    runner.train()
    # Whatever was built was built before the first epoch began.
    assert set(built) <= {None}
    for split in ('train', 'val'):
        assert len(seen.modules[split]) == 3
        assert len({id(module) for module in seen.modules[split]}) == 1
    assert seen.modules['train'][0] is not seen.modules['val'][0]
    monkeypatch.undo()
    check(seen, 'train', dict(KEPT, **of_train))
    check(seen, 'val', dict(KEPT, **of_val))


# Statistics


def test_the_measured_line_keeps_channels_as_they_are_where_the_model_would_reverse_them():
    dataset = dict(type='ToyImages', data_preprocessor=dict(ZERO, bgr_to_rgb=False))
    cfg = Config(
        dict(
            model=dict(data_preprocessor=dict(OPTED_IN)),
            train_dataloader=dict(batch_size=1, dataset=dataset),
        )
    )
    (result,) = measure_split(cfg)
    assert result.snippet().endswith(', bgr_to_rgb=False)')
    pasted = Config.fromstring(result.snippet(), '.py').data_preprocessor
    cfg.train_dataloader.dataset.data_preprocessor = pasted
    (again,) = measure_split(cfg)
    assert again.reversed_by is None and again.measured() == result.measured() == dict(
        mean=pasted.mean, std=pasted.std
    )
