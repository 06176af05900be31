# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What a model reads from its preprocessor is that of the split that runs."""

import pytest
import torch
import toys
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.registry import DATASETS, HOOKS, MODELS

MODEL = dict(mean=[100.0] * 3, std=[10.0] * 3)
DATASET = dict(mean=[123.0] * 3, std=[58.0] * 3)


@MODELS.register_module(force=True)
class Undoing(ImgDataPreprocessor):
    """Undoes its normalisation, as those of image-editing packages do."""

    def destruct(self, inputs):
        return inputs * self.std + self.mean


@MODELS.register_module(force=True)
class UndoingModel(toys.ToyModel):
    """Needs the pixels as they were."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.extremes = []

    def forward(self, inputs, data_samples=None, mode='tensor'):
        dp = self.data_preprocessor
        pixels = inputs * dp.std + dp.mean
        if hasattr(dp, 'destruct'):
            assert torch.equal(pixels, dp.destruct(inputs))
        self.extremes.append((self.training, pixels.min().item(), pixels.max().item()))
        return super().forward(inputs, data_samples, mode)


def config(work_dir, type_, workers=0, bound=('train', 'val'), **more):
    cfg = toys.config(work_dir, preprocessor=dict(type=type_, **MODEL), workers=workers,
                      dataset=dict(ragged=False))  # fmt: skip
    cfg['model']['type'] = 'UndoingModel'
    for split in bound:
        cfg[f'{split}_dataloader']['dataset']['data_preprocessor'] = dict(DATASET)
    if 'val' in bound:
        cfg['val_dataloader']['dataset']['data_preprocessor']['mean'] = [99.0] * 3
    cfg.update(more)
    return cfg


@pytest.mark.parametrize('depth', [0, 2])
@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('opted_in', [False, True])
@pytest.mark.parametrize('type_', ['ImgDataPreprocessor', 'Undoing'])
def test_the_model_undoes_what_was_done(tmp_path, type_, opted_in, workers, depth):
    cfg = config(tmp_path, type_, workers)
    if opted_in:
        preprocessor = cfg['model']['data_preprocessor']
        preprocessor.update(wraps=preprocessor['type'], type='PrefetchDataPreprocessor')
    runner, _ = toys.run(toys.prefetching(cfg, depth))
    dp = runner.model.data_preprocessor
    assert len(runner.model.extremes) == 2 * (4 + 4)
    for _, low, high in runner.model.extremes:
        assert -0.01 < low < 10 and 245 < high < 255.01
    assert dp.split is None and dp.mean.flatten().tolist() == MODEL['mean']
    assert dp.of_split('val').mean.flatten().tolist() == [99.0] * 3


def test_evaluation_by_a_loop_of_mmengine(tmp_path):
    cfg = toys.prefetching(config(tmp_path, 'Undoing'))
    cfg.val_cfg = dict(type='ValLoop')
    runner, _ = toys.run(cfg)
    assert all(low > -0.01 and high < 255.01 for _, low, high in runner.model.extremes)


@MODELS.register_module(force=True)
class Keeps(BaseDataPreprocessor):
    """Keeps state for the model."""

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale = scale

    def forward(self, data, training=False):
        data = self.cast_data(data)
        self.last = [sample.index for sample in data['data_samples']]
        return dict(data, inputs=torch.stack(data['inputs']) * self.scale)


@MODELS.register_module(force=True)
class ReadsState(toys.ToyModel):
    def forward(self, inputs, data_samples=None, mode='tensor'):
        assert self.data_preprocessor.last == [sample.index for sample in data_samples]
        return super().forward(inputs, data_samples, mode)


@pytest.mark.parametrize('safe', [False, True])
@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('bound', [False, True])
def test_state_that_forward_keeps_for_the_model(tmp_path, bound, workers, safe):
    cfg = toys.config(tmp_path, preprocessor=dict(type='Keeps'), workers=workers,
                      dataset=dict(ragged=False))  # fmt: skip
    cfg['model']['type'] = 'ReadsState'
    if safe:
        cfg['model']['data_preprocessor'] = dict(
            type='PrefetchDataPreprocessor', wraps='Keeps', prefetch_safe=True
        )
    if bound:
        cfg['train_dataloader']['dataset']['data_preprocessor'] = dict(scale=0.01)
    toys.run(toys.prefetching(cfg))


@HOOKS.register_module(force=True)
class Rescales(Hook):
    def before_train_epoch(self, runner):
        runner.model.data_preprocessor.mean = torch.full((3, 1, 1), 7.0)


def test_writing_a_field_reaches_all_splits(tmp_path):
    cfg = toys.prefetching(config(tmp_path, 'Undoing', workers=2))
    cfg.custom_hooks.append(dict(type='Rescales'))
    runner, _ = toys.run(cfg)
    dp = runner.model.data_preprocessor
    for split in (None, 'train', 'val'):
        assert dp.of_split(split).mean.flatten().tolist() == [7.0] * 3
    assert all(low > -0.01 and high < 255.01 for _, low, high in runner.model.extremes)


@DATASETS.register_module(force=True)
class Part(toys.ToyImages):
    def full_init(self):
        pass


@pytest.mark.parametrize('type_', ['ImgDataPreprocessor', 'Undoing'])
def test_a_mixed_split_has_no_one_value(tmp_path, type_):
    cfg = config(tmp_path, type_, bound=())
    part = dict(cfg['train_dataloader']['dataset'], type='Part')
    cfg['train_dataloader']['dataset'] = dict(
        type='ConcatDataset',
        datasets=[dict(part, data_preprocessor=DATASET), dict(part, data_preprocessor=MODEL)],
    )
    cfg['model']['type'] = 'ToyModel'
    runner, _ = toys.run(toys.prefetching(cfg))
    dp = runner.model.data_preprocessor
    dp.split = 'train'
    with pytest.raises(ValueError, match=r'data_preprocessor\.mean is read while train runs'):
        _ = dp.mean
    if type_ == 'Undoing':
        with pytest.raises(ValueError, match=r'data_preprocessor\.std is read while train runs'):
            dp.destruct(torch.zeros(1))
    assert dp.pad_value == 0 and dp.split == 'train'
    dp.split = 'val'
    assert dp.mean.flatten().tolist() == MODEL['mean']


def test_modules_and_state_dict_stay_as_they_are(tmp_path):
    stock, _ = toys.run(toys.config(tmp_path / 'a', preprocessor=dict(type='Undoing', **MODEL)))
    runner, _ = toys.run(toys.prefetching(config(tmp_path / 'b', 'Undoing')))
    assert list(stock.model.state_dict()) == list(runner.model.state_dict())
    names = [[name for name, _ in model.named_modules()] for model in (stock.model, runner.model)]
    assert names[0] == names[1]
    assert [n for n, _ in stock.model.named_buffers()] == [
        n for n, _ in runner.model.named_buffers()
    ]


@HOOKS.register_module(force=True)
class PutsHandsOn(Hook):
    """Replaces a method or registers a hook of the preprocessor when it is told to."""

    def __init__(self, how, when):
        self.how, self.when, self.calls = how, when, 0

    def _noted(self, function):
        def wrapped(*args, **kwargs):
            self.calls += 1
            return function(*args, **kwargs)

        return wrapped

    def apply(self, dp):
        if self.how == 'hook':
            dp.register_forward_hook(lambda module, args, out: self._noted(lambda: None)())
        elif self.how == 'pre-hook':
            dp.register_forward_pre_hook(lambda module, args: self._noted(lambda: None)())
        elif self.how == 'cast_data':
            dp.cast_data = self._noted(dp.cast_data)
        elif self.how == 'forward':
            dp.forward = self._noted(dp.forward)

    def before_run(self, runner):
        if self.when == 'before_run':
            self.apply(runner.model.data_preprocessor)

    def before_train_epoch(self, runner):
        if self.when == 'epoch 2' and runner.epoch == 1:
            self.apply(runner.model.data_preprocessor)


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('when', ['built', 'before_run', 'epoch 2'])
@pytest.mark.parametrize('how', ['hook', 'pre-hook', 'cast_data', 'forward'])
def test_hands_put_on_the_preprocessor_count_as_under_mmengine(tmp_path, how, when, workers):
    records, calls = [], []
    for prefetch in (False, True):
        hook = dict(type='PutsHandsOn', how=how, when=when)
        cfg = toys.config(tmp_path / f'{prefetch}', workers=workers, hooks=[hook])
        runner = toys.Runner.from_cfg(toys.prefetching(cfg) if prefetch else toys.Config(cfg))
        found = next(each for each in runner.hooks if isinstance(each, PutsHandsOn))
        if when == 'built':
            found.apply(runner.model.data_preprocessor)
        runner.train()
        records.append((runner, toys.recorder(runner)))
        calls.append(found.calls)
    toys.assert_same_run(*records)
    assert calls[0] == calls[1] > 0
