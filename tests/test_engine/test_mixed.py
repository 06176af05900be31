# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Each sample of a mixed dataset is normalised with its own dataset's values."""

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.dataset import (
    BaseDataset,
    ClassBalancedDataset,
    ConcatDataset,
    RepeatDataset,
    pseudo_collate,
)
from mmengine.model import ImgDataPreprocessor
from mmengine.registry import DATASETS, MODELS
from torch.utils.data import DataLoader, Subset

from mmprefetch import load_preprocessor
from mmprefetch.checkpoints.restore import choose_preprocessing
from mmprefetch.engine import LookAheadLoader
from mmprefetch.engine.mixed import part_finder
from mmprefetch.hooks import find_preprocessor

VALUES = [
    dict(mean=[123.0, 116.5, 103.25], std=[58.5, 57.0, 57.25], bgr_to_rgb=False),  # RGB photos
    dict(mean=[100.0, 110.0, 120.0], std=[50.0, 51.0, 52.0], bgr_to_rgb=True),  # BGR photos
    dict(mean=[30.0], std=[80.0], bgr_to_rgb=False),  # grey scans, repeated to 3 channels
]


@DATASETS.register_module(force=True)
class Photos(BaseDataset):
    """One part: its images are random, or grey where ``number`` is 2."""

    METAINFO = dict(classes=('even', 'odd'))

    def __init__(self, number, length=5, **kwargs):
        self.number, self.length = number, length
        super().__init__(pipeline=[], **kwargs)

    def load_data_list(self):
        return [dict(index=index) for index in range(self.length)]

    def get_cat_ids(self, index):
        return [index % 2]

    def __getitem__(self, index):
        item = toys.ToyImages()[100 * self.number + index]
        if self.number == 2:
            item['inputs'] = item['inputs'][:1].repeat(3, 1, 1)
        item['data_samples'].set_metainfo(dict(number=self.number))
        return item


@MODELS.register_module(force=True)
class Reference(ImgDataPreprocessor):
    """Normalises each part on its own, then puts the batch together."""

    def __init__(self, pad_size_divisor=1):
        super().__init__(pad_size_divisor=pad_size_divisor)
        self.of_part = [ImgDataPreprocessor(**values) for values in VALUES]

    def forward(self, data, training=False):
        data = self.cast_data(data)
        data['inputs'] = [
            self.of_part[sample.number](dict(inputs=[image]))['inputs'][0]
            for image, sample in zip(data['inputs'], data['data_samples'], strict=True)
        ]
        return super().forward(data, training)


def part(number, bound=True, **kwargs):
    made = dict(type='Photos', number=number, **kwargs)
    if bound:
        made['data_preprocessor'] = dict(VALUES[number])
    return made


def concatenation(bound=True):
    """Three parts, two of them in wrappers, at different depths."""
    return dict(
        type='ConcatDataset',
        datasets=[
            dict(type='RepeatDataset', times=2, dataset=part(0, bound)),
            dict(
                type='ConcatDataset',
                datasets=[
                    part(1, bound, length=4),
                    dict(type='ClassBalancedDataset', oversample_thr=0.9, dataset=part(2, bound)),
                ],
            ),
        ],
    )


def config(work_dir, bound, preprocessor, **options):
    cfg = toys.config(work_dir, preprocessor=preprocessor, **options)
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader']['dataset'] = concatenation(bound)
    return cfg


OURS = dict(type='PrefetchDataPreprocessor', pad_size_divisor=4)
STOCK = dict(type='Reference', pad_size_divisor=4)


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize(
    'train', [None, dict(by_epoch=False, max_iters=9, val_interval=4)], ids=['epochs', 'iterations']
)
def test_training_equals_each_part_normalised_on_its_own(tmp_path, train, workers):
    options = dict(train=train, workers=workers)
    stock = toys.run(config(tmp_path / 'stock', False, STOCK, **options))
    for model in (OURS, dict(type='ImgDataPreprocessor', pad_size_divisor=4)):
        for depth in (0, 1, 3):
            cfg = config(tmp_path / f'{depth}', True, model, **options)
            run = toys.run(toys.prefetching(cfg, depth))
            toys.assert_same_run(stock, run)


def test_stacked_by_default_collate(tmp_path):
    runs = []
    for bound, model in ((False, STOCK), (True, OURS)):
        cfg = config(tmp_path / f'{bound}', bound, model, batch_size=3)
        for split in ('train', 'val'):
            cfg[f'{split}_dataloader']['collate_fn'] = stack_images
        runs.append(toys.run(toys.prefetching(cfg) if bound else cfg))
    toys.assert_same_run(*runs)


def stack_images(items):
    images = [item['inputs'][:, :6, :6] for item in items]
    return dict(inputs=torch.stack(images), data_samples=[item['data_samples'] for item in items])


class Failing(Photos):
    def __getitem__(self, index):
        if index == 2:
            raise OSError('image 2 is broken')
        return super().__getitem__(index)


class Noting:
    """A preprocessor that notes what each sample is said to be from."""

    def __init__(self):
        self.said = []
        self.due = []

    def preparation(self, split):
        return self

    def enter_thread(self):
        pass

    def begin(self, ticket):
        pass

    def expect(self, ticket):
        self.said.append(([sample.number for sample in ticket.batch['data_samples']], ticket.parts))
        self.due.append(ticket)
        ticket.claim()

    def withdraw(self, ticket):
        self.due.remove(ticket)


@pytest.mark.parametrize('depth', [0, 2])
@pytest.mark.parametrize('pin_memory', [False, True])
@pytest.mark.parametrize('workers', [0, 2])
def test_parts_are_right_after_an_error_that_was_caught(workers, pin_memory, depth):
    numbers = [0, 1, 0, 1, 0]
    dataset = ConcatDataset([(Failing if n else Photos)(n) for n in numbers], ignore_keys=[])
    dataloader = DataLoader(
        dataset, batch_size=2, num_workers=workers, collate_fn=pseudo_collate,
        timeout=60 * workers, pin_memory=pin_memory,
    )  # fmt: skip
    preprocessor = Noting()
    loader = LookAheadLoader(dataloader, preprocessor, 'train', depth, mixed=True)
    batches, errors, current = 0, 0, iter(loader)
    while True:
        try:
            next(current)
        except OSError:
            errors += 1
        except StopIteration:
            break
        else:
            batches += 1
    loader.close()
    assert (batches, errors) == (11, 2)
    assert len(preprocessor.said) == 11
    for found, said in preprocessor.said:
        assert [numbers[part] for part in said] == found
    assert preprocessor.due == []
    assert dataloader.dataset is dataset and dataloader.collate_fn is pseudo_collate


def test_resume_skips_parts_as_well(tmp_path):
    train = dict(by_epoch=False, max_iters=9, val_interval=100)
    runs = []
    for bound, model in ((False, STOCK), (True, OURS)):
        cfg = config(tmp_path / f'{bound}', bound, model, train=train)
        cfg['train_dataloader']['sampler'] = dict(type='DefaultSampler', shuffle=True)
        made = toys.prefetching(cfg) if bound else Config(cfg)
        made.default_hooks.checkpoint.interval = 7
        toys.run(made)
        made.update(load_from=str(tmp_path / f'{bound}' / 'iter_7.pth'), resume=True,
                    experiment_name=f'again-{bound}')  # fmt: skip
        runs.append(toys.run(made))
    assert len(runs[0][1].losses) == 2
    toys.assert_same_run(*runs)


def test_every_part_is_in_the_table(tmp_path, caplog):
    cfg = toys.prefetching(config(tmp_path, True, OURS, val=True))
    cfg.log_level = 'INFO'
    runner = toys.Runner.from_cfg(cfg)
    runner.logger.addHandler(caplog.handler)
    runner.train()
    (text,) = [r.getMessage() for r in caplog.records if 'Preprocessing of each' in r.getMessage()]
    for key in ('datasets.0.dataset', 'datasets.1.datasets.0', 'datasets.1.datasets.1.dataset'):
        assert f'train (train_dataloader.dataset.{key})' in text
    assert find_preprocessor(runner).is_mixed('train')


def test_checkpoints_know_every_part(tmp_path):
    toys.run(toys.prefetching(config(tmp_path, True, OURS)))
    path = str(tmp_path / 'epoch_2.pth')
    with pytest.raises(ValueError, match=r'part=None.*datasets\.1\.datasets\.0'):
        load_preprocessor(path, 'train')
    image = torch.arange(48, dtype=torch.uint8).view(3, 4, 4)
    for number, key in enumerate(('0.dataset', '1.datasets.0', '1.datasets.1.dataset')):
        made = load_preprocessor(path, 'train', part=f'train_dataloader.dataset.datasets.{key}')
        expected = ImgDataPreprocessor(**VALUES[number], pad_size_divisor=4)
        batch = dict(inputs=[image])
        assert torch.equal(made(dict(batch))['inputs'], expected(dict(batch))['inputs'])


def test_a_checkpoint_that_says_something_else_is_told(tmp_path, caplog):
    cfg = toys.prefetching(config(tmp_path, True, OURS))
    toys.run(cfg)
    path = str(tmp_path / 'epoch_2.pth')
    for changed in (False, True):
        again = toys.prefetching(config(tmp_path / 'again', True, OURS))
        again.experiment_name = f'told-{changed}'
        if changed:
            bound = again.val_dataloader.dataset.datasets[0].dataset.data_preprocessor
            bound.mean = [1.5, 2.5, 3.5]
        runner = toys.Runner.from_cfg(again)
        runner.logger.addHandler(caplog.handler)
        assert choose_preprocessing(runner, path, 'val') == {}
        with pytest.raises(ValueError, match='only the config'):
            choose_preprocessing(runner, path, 'val', 'checkpoint')
    told = [r for r in caplog.records if 'something else' in r.getMessage()]
    assert len(told) == 1 and told[0].levelname == 'WARNING'
    assert '[1.5, 2.5, 3.5]' in told[0].getMessage() and '[123.0, 116.5' in told[0].getMessage()


def test_the_stock_loop_cannot_run_a_mixed_split(tmp_path):
    cfg = toys.prefetching(config(tmp_path, True, OURS))
    cfg.val_cfg = dict()
    with pytest.raises(ValueError, match=r'val_dataloader .*PrefetchValLoop'):
        toys.run(cfg)


def test_a_preprocessor_that_cannot(tmp_path):
    cfg = config(tmp_path, True, dict(type='PrefetchDataPreprocessor', wraps='Unknown'))
    with pytest.raises(ValueError, match='Unknown cannot normalise each sample'):
        toys.run(toys.prefetching(cfg))


@MODELS.register_module(force=True)
class Unknown(ImgDataPreprocessor):
    def forward(self, data, training=False):
        return super().forward(data, training)


def test_a_field_that_cannot_vary_by_sample(tmp_path):
    cfg = config(tmp_path, True, OURS)
    parts = cfg['train_dataloader']['dataset']['datasets']
    parts[1]['datasets'][0]['data_preprocessor']['pad_value'] = 3
    with pytest.raises(ValueError, match='pad_value') as caught:
        toys.run(toys.prefetching(cfg))
    for key in ('datasets.0.dataset', 'datasets.1.datasets.0'):
        assert f'train_dataloader.dataset.{key}' in str(caught.value)


def test_without_a_batch_sampler(tmp_path):
    cfg = config(tmp_path, True, OURS, batch_size=None)
    with pytest.raises(ValueError, match=r'train_dataloader.*batch_size'):
        toys.run(toys.prefetching(cfg))


def test_parts_by_index():
    first, second, third = (Photos(number) for number in range(3))
    inner = torch.utils.data.ConcatDataset([first, RepeatDataset(second, 2)])
    pair = ConcatDataset([first, second])
    nested = torch.utils.data.ConcatDataset([inner, third])
    assert [part_finder(nested, 'd')(index) for index in range(20)] == [0] * 5 + [1] * 10 + [2] * 5
    assert part_finder(Subset(nested, [19, 0, 5]), 'd')(0) == 2
    assert part_finder(Twice(pair), 'd')(17) == 1
    assert part_finder(first, 'd')(3) == 0
    assert part_finder(ClassBalancedDataset(second, 0.9), 'd')(3) == 0


class Twice(torch.utils.data.Dataset):
    def __init__(self, dataset):
        self.dataset = dataset

    def _get_ori_dataset_idx(self, index):
        return index % len(self.dataset)


def test_a_wrapper_that_does_not_tell():
    class Shuffled(torch.utils.data.Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

    with pytest.raises(ValueError, match=r'Shuffled .*_get_ori_dataset_idx'):
        part_finder(Shuffled(ConcatDataset([Photos(0), Photos(1)])), 'train_dataloader.dataset')


@pytest.mark.parametrize('workers', [0, 1])
def test_a_preprocessor_with_hooks_is_no_reason_for_wrong_values(tmp_path, workers):
    cfg = toys.prefetching(config(tmp_path, True, OURS, workers=workers))
    runner = toys.Runner.from_cfg(cfg)
    runner._train_loop = runner.build_train_loop(cfg.train_cfg)
    module = find_preprocessor(runner).of_split('train')
    module.register_forward_hook(lambda module, args, result: None)
    with pytest.raises(ValueError, match=r'train_dataloader differ.*ImgDataPreprocessor.*hooks'):
        runner.train()
