# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Equal to stock, to the bit, where it is easy to get wrong."""

import copy
import itertools
import random
import shutil

import numpy as np
import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.logging import MessageHub
from mmengine.model import BaseDataPreprocessor
from mmengine.optim import OptimWrapper
from mmengine.registry import DATASETS, HOOKS, MODELS, OPTIM_WRAPPERS
from mmengine.runner import Runner

from mmprefetch.engine import LookAheadLoader

ITERS = dict(by_epoch=False, max_iters=11, val_interval=4)


def check(tmp_path, depths=(0, 1, 2, 8), change=None, **options):
    """Run stock and prefetching, compare, and return stock's record."""
    cfg = toys.config(tmp_path / 'stock', **options)
    if change is not None:
        change(cfg)
    stock = toys.run(cfg)
    for depth in depths:
        cfg['work_dir'] = str(tmp_path / f'depth{depth}')
        toys.assert_same_run(stock, toys.run(toys.prefetching(cfg, depth)))
    return stock[1]


@pytest.mark.parametrize('workers', [0, 2])
def test_a_dataloader_that_ends_is_started_again_at_the_stock_moment(tmp_path, workers):
    def finite(cfg):
        cfg['train_dataloader']['sampler'] = dict(type='DefaultSampler', shuffle=True)
        cfg['train_dataloader']['batch_size'] = 2

    # Starting a dataloader draws from the generator that dropout draws from.
    record = check(tmp_path, (2,), finite, train=ITERS, workers=workers, val=False)
    assert len(record.indices) == 11 > 7


@HOOKS.register_module(force=True)
class Peek(Hook):
    """Reads some of the training batches between two iterations, as to measure their statistics."""

    def __init__(self):
        self.sums = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter in (2, 3):
            for batch in itertools.islice(runner.train_dataloader, 3):
                inputs = runner.model.data_preprocessor(batch, False)['inputs']
                self.sums.append(inputs.double().sum().item())


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('train', [ITERS, dict(by_epoch=True, max_epochs=2)])
def test_a_hook_that_reads_the_training_dataloader(tmp_path, workers, train):
    def peeking(cfg):
        cfg['train_dataloader']['sampler'] = dict(type='DefaultSampler', shuffle=True)
        cfg['train_dataloader']['batch_size'] = 2

    hook = dict(type='Peek')
    check(tmp_path, (1, 2), peeking, train=train, workers=workers, val=False, hooks=[hook])


@OPTIM_WRAPPERS.register_module(force=True)
class CpuAmp(OptimWrapper):
    """mmengine's own refuses the CPU."""

    def optim_context(self, model):
        from contextlib import ExitStack

        stack = ExitStack()
        stack.enter_context(super().optim_context(model))
        stack.enter_context(torch.autocast('cpu', torch.bfloat16))
        return stack


@MODELS.register_module(force=True)
class Mixing(BaseDataPreprocessor):
    """Resizes every few iterations, reads the iteration, syncs, and blends with a matmul."""

    def forward(self, data, training=False):
        data = self.cast_data(data)
        images = torch.stack([image.float()[:, :6, :7] for image in data['inputs']]) / 255
        if training:
            step = MessageHub.get_current_instance().get_info('iter')
            side = 4 + 2 * (step // 3 % 2)
            images = torch.nn.functional.interpolate(images, (side, side + 1))
            weight = random.random() * np.random.rand() + torch.rand(()).item()
            blend = torch.full((3, 3), weight / 3)
            images = (blend @ images.flatten(2)).float().view_as(images)
        return dict(inputs=images, data_samples=data['data_samples'])


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('train', [None, ITERS], ids=['epochs', 'iterations'])
@pytest.mark.parametrize('preprocessor', [toys.IMG, dict(type='Mixing')], ids=['Img', 'Mixing'])
def test_mixed_precision(tmp_path, preprocessor, train, workers):
    check(tmp_path, (2,), preprocessor=preprocessor, train=train, workers=workers,
          optim=dict(type='CpuAmp', accumulative_counts=2))  # fmt: skip


@pytest.mark.parametrize('workers', [0, 2, 4])
def test_a_preprocessor_that_reads_the_iteration_and_draws(tmp_path, workers):
    check(tmp_path, (1, 8), preprocessor=dict(type='Mixing'), train=ITERS, workers=workers)


@MODELS.register_module(force=True)
class PureScale(BaseDataPreprocessor):
    def forward(self, data, training=False):
        data = self.cast_data(data)
        images = torch.stack([image.float()[:, :6, :7] for image in data['inputs']])
        scale = torch.eye(3) / (200 if training else 100)
        images = (scale @ images.flatten(2)).float().view_as(images)
        return dict(inputs=images, data_samples=data['data_samples'])


@pytest.mark.parametrize('amp', [False, True])
@pytest.mark.parametrize('workers', [0, 2])
def test_a_forward_that_is_declared_safe(tmp_path, workers, amp):
    cfg = toys.config(
        tmp_path / 'a',
        preprocessor=dict(type='PureScale'),
        workers=workers,
        optim=dict(type='CpuAmp') if amp else None,
    )
    stock = toys.run(cfg)
    cfg['work_dir'] = str(tmp_path / 'b')
    cfg['model']['data_preprocessor'] = dict(
        type='PrefetchDataPreprocessor', wraps='PureScale', prefetch_safe=True
    )
    toys.assert_same_run(stock, toys.run(toys.prefetching(cfg, 2)))


@MODELS.register_module(force=True)
class Frozen(BaseDataPreprocessor):
    """A preprocessor with state that training changes and checkpoints hold."""

    def __init__(self):
        super().__init__()
        self.register_buffer('seen', torch.zeros(()))
        self.scale = torch.nn.Parameter(torch.tensor(0.01))

    def forward(self, data, training=False):
        data = self.cast_data(data)
        images = torch.stack([image.float()[:, :6, :7] for image in data['inputs']])
        if training:
            self.seen += len(images)
        return dict(inputs=images * self.scale, data_samples=data['data_samples'])


def test_a_preprocessor_with_state_and_parameters(tmp_path):
    check(tmp_path, (0, 2), preprocessor=dict(type='Frozen'),
          hooks=[dict(type='EMAHook', momentum=0.1, update_buffers=True)])  # fmt: skip


@MODELS.register_module(force=True)
class OwnStep(toys.ToyModel):
    """Steps itself, as GANs do, and asks for a batch twice."""

    def train_step(self, data, optim_wrapper):
        first = self.data_preprocessor(data)
        second = self.data_preprocessor(data, True)
        with optim_wrapper.optim_context(self):
            loss = (
                self._run_forward(first, 'loss')['loss'] + self._run_forward(second, 'loss')['loss']
            )
        optim_wrapper.update_params(loss)
        return dict(loss=loss)


@pytest.mark.parametrize('preprocessor', [toys.IMG, dict(type='RandomPreprocessor')])
def test_a_model_that_steps_itself(tmp_path, preprocessor):
    def own(cfg):
        cfg['model']['type'] = 'OwnStep'

    check(tmp_path, (2,), own, preprocessor=preprocessor)


def test_default_collate_and_pinned_flag(tmp_path):
    def collated(cfg):
        for split in ('train', 'val'):
            cfg[f'{split}_dataloader']['collate_fn'] = dict(type='default_collate')
            cfg[f'{split}_dataloader']['dataset'] = dict(type='ToyImages', ragged=False)

    check(tmp_path, (2,), collated, workers=2)


@pytest.mark.parametrize('backend', ['eager', 'inductor'])
def test_compiled_step(tmp_path, backend):
    if backend == 'inductor' and shutil.which('g++') is None:
        pytest.skip('there is no compiler')
    cfg = toys.config(
        tmp_path / 'a',
        compile=dict(backend=backend),
        val=False,
        train=dict(by_epoch=True, max_epochs=1),
        workers=1,
    )
    torch.compiler.reset()  # what other tests have compiled counts towards its limits
    stock = toys.run(copy.deepcopy(cfg))
    cfg['work_dir'] = str(tmp_path / 'b')
    torch.compiler.reset()
    runner, record = toys.run(toys.prefetching(cfg, 2))
    toys.assert_same_run(stock, (runner, record))
    assert isinstance(runner.train_loop.dataloader, LookAheadLoader)
    assert runner.train_loop.dataloader.looks_ahead  # batches were asked for as they came


def test_two_runs_of_one_runner(tmp_path):
    cfg = toys.config(tmp_path, val=False)
    runs = []
    for made in (Config(cfg), toys.prefetching(cfg)):
        runner = Runner.from_cfg(made)
        runner.train()
        runner.train_loop._epoch = runner.train_loop._iter = 0
        runner.train_loop.run()
        runs.append((runner, toys.recorder(runner)))
    assert len(runs[0][1].losses) == 2 * 8
    toys.assert_same_run(*runs)


@DATASETS.register_module(force=True)
class OneBuffer(toys.ToyImages):
    """Every item is a view of one buffer."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs, ragged=False)
        self.buffer = torch.zeros(3, 6, 7, dtype=torch.uint8)
        if kind == 'numpy':  # what is written through it does not show in the tensor's version
            self.writer = self.buffer.numpy()

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if hasattr(self, 'writer'):
            self.writer[:] = item['inputs'].numpy()
        else:
            self.buffer.copy_(item['inputs'])
        return dict(item, inputs=self.buffer)


@pytest.mark.parametrize('preprocessor', [toys.IMG, None, dict(type='RandomPreprocessor')])
@pytest.mark.parametrize('kind', ['numpy', 'torch'])
def test_a_dataset_that_reuses_its_buffer(tmp_path, kind, preprocessor):
    cfg = toys.config(tmp_path / 'a', batch_size=1, preprocessor=preprocessor)
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader']['dataset'] = dict(type='OneBuffer', kind=kind)
    stock = toys.run(Config(cfg))
    for depth in (1, 3):
        cfg['work_dir'] = str(tmp_path / f'{depth}')
        run = toys.run(toys.prefetching(cfg, depth))
        toys.assert_same_run(stock, run)
        seen = [[then for _, then, _ in record.raw] for _, record in (stock, run)]
        assert toys.same(*seen)


@DATASETS.register_module(force=True)
class Drawing(toys.ToyImages):
    """Mixes each image with another, drawing from the generators that dropout draws from."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        other = super().__getitem__(int(torch.randint(self.length, ())))['inputs']
        share = random.random() * np.random.rand() * torch.rand(()).item()
        _, height, width = map(min, item['inputs'].shape, other.shape)
        mixed = item['inputs'].float()
        mixed[:, :height, :width] += share * other[:, :height, :width]
        return dict(item, inputs=mixed.clamp(0, 255).byte())


@pytest.mark.parametrize('train', [None, ITERS], ids=['epochs', 'iterations'])
def test_without_workers_a_dataset_may_draw_from_the_models_generator(tmp_path, train):
    check(tmp_path, (1, 2), dataset=dict(), train=train, change=draw)


def draw(cfg):
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader']['dataset'] = dict(type='Drawing')


@DATASETS.register_module(force=True)
class Views(toys.ToyImages):
    """Hands out views: slices, expanded and reversed ones, two of one memory."""

    def __getitem__(self, index):
        item = super().__getitem__(index)
        big = torch.zeros(3, 20, 20).random_(256, generator=torch.Generator().manual_seed(index))
        return dict(item, inputs=big[:, 3:9, 5:12], again=big[:, 4:10])


@HOOKS.register_module(force=True)
class SeesStrides(Hook):
    def __init__(self):
        self.seen = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        for image, again in zip(data_batch['inputs'], data_batch['again'], strict=True):
            same = image.untyped_storage().data_ptr() == again.untyped_storage().data_ptr()
            self.seen.append((image.stride(), again.stride(), same))


def test_without_workers_views_stay_views(tmp_path):
    def viewing(cfg):
        for split in ('train', 'val'):
            cfg[f'{split}_dataloader']['dataset'] = dict(type='Views')
        cfg['model']['type'] = 'DropsExtra'

    cfg = toys.config(tmp_path / 'a', hooks=[dict(type='SeesStrides')])
    viewing(cfg)
    seen = []
    for made in (Config(cfg), toys.prefetching(cfg)):
        runner, _ = toys.run(made)
        seen.append(next(hook for hook in runner.hooks if isinstance(hook, SeesStrides)).seen)
    assert seen[0] == seen[1] and all(same for *_, same in seen[0])


@MODELS.register_module(force=True)
class DropsExtra(toys.ToyModel):
    def forward(self, inputs, data_samples=None, again=None, mode='tensor'):
        return super().forward(inputs, data_samples, mode)
