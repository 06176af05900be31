# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A small dataset, model and runner that the tests share."""

import copy
import itertools

import mmengine.config.config
import numpy as np
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import nn

from mmprefetch import enable_prefetch

_names = itertools.count()

# Laying a config out prettily takes longer than a run of the toy does, and is done at every
# checkpoint; the text is as good without.
mmengine.config.config.FormatCode = lambda text, **style: (text, False)


@DATASETS.register_module(force=True)
class ToyImages(torch.utils.data.Dataset):
    """uint8 images of a few sizes, each the same whenever it is asked for."""

    METAINFO = dict(classes=('even', 'odd'))

    def __init__(self, length=14, size=(6, 7), channels=3, ragged=True, fail_at=None):
        self.length, self.size, self.channels = length, size, channels
        self.ragged, self.fail_at = ragged, fail_at
        self.metainfo = dict(self.METAINFO)
        self.epoch = 0

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index == self.fail_at:
            raise OSError(f'image {index} is broken')
        generator = torch.Generator().manual_seed(index)
        height, width = self.size
        if self.ragged:
            height, width = height + index % 3, width + index % 2
        image = torch.randint(
            0, 256, (self.channels, height, width), dtype=torch.uint8, generator=generator
        )
        sample = BaseDataElement(metainfo=dict(index=index, epoch=self.epoch))
        sample.label = torch.tensor(index % 2)
        return dict(inputs=image, data_samples=sample)


@MODELS.register_module(force=True)
class ToyModel(BaseModel):
    """Draws from the global generator in training, so that any shift of it shows."""

    def __init__(self, channels=3, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.conv = nn.Conv2d(channels, 4, 3, padding=1)
        self.bn = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(4, 2)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        if isinstance(inputs, list):
            inputs = torch.stack([image.float()[:, :6, :7] / 255 for image in inputs])
        features = torch.relu(self.bn(self.conv(inputs))).mean((2, 3))
        scores = self.head(self.drop(features))
        if mode == 'tensor':
            return scores
        if mode == 'loss':
            labels = torch.stack([sample.label for sample in data_samples])
            return dict(loss=nn.functional.cross_entropy(scores, labels.to(scores.device)))
        for sample, score in zip(data_samples, scores, strict=True):
            sample.score = score
        return data_samples


@MODELS.register_module(force=True)
class RandomPreprocessor(BaseDataPreprocessor):
    """Unknown to mmprefetch; draws from python's, numpy's and torch's generators."""

    def __init__(self, scale=2.0, **kwargs):
        super().__init__(**kwargs)
        self.register_buffer('scale', torch.tensor(scale))
        self.calls = []

    def forward(self, data, training=False):
        import random

        data = self.cast_data(data)
        images = torch.stack([image.float()[:, :6, :7] for image in data['inputs']]) / self.scale
        if training:
            images = images * random.random() + np.random.rand() + torch.rand(len(images), 1, 1, 1)
        self.calls.append(training)
        return dict(inputs=images / 255, data_samples=data['data_samples'])


@METRICS.register_module(force=True)
class ToyMetric(BaseMetric):
    """The sum of the scores, to the bit."""

    def process(self, data_batch, data_samples):
        self.results += [sample['score'].double().sum().item() for sample in data_samples]

    def compute_metrics(self, results):
        return dict(score=float(np.sum(results)))


@HOOKS.register_module(force=True)
class Recorder(Hook):
    """Keeps what a run did: indices, losses, metrics, batches."""

    priority = 'LOWEST'

    def __init__(self):
        self.indices, self.losses, self.metrics, self.raw = [], [], [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self.indices.append([sample.index for sample in data_batch['data_samples']])
        self.raw.append(
            (data_batch, copy.deepcopy(data_batch['inputs']), type(data_batch['data_samples']))
        )

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append({key: value.item() for key, value in outputs.items()})

    def after_val_epoch(self, runner, metrics=None):
        self.metrics.append(dict(metrics))


IMG = dict(type='ImgDataPreprocessor', mean=[123.0, 116.5, 103.25], std=[58.5, 57.0, 57.25],
           bgr_to_rgb=True, pad_size_divisor=4)  # fmt: skip


def config(work_dir, *, preprocessor=IMG, dataset=None, workers=0, batch_size=4, val=True,
           train=None, hooks=(), optim=None, **more):  # fmt: skip
    """The config of a stock run, as a dict."""
    dataset = dict(type='ToyImages', **(dataset or {}))
    loader = dict(batch_size=batch_size, num_workers=workers, persistent_workers=False)
    cfg = dict(
        model=dict(type='ToyModel', data_preprocessor=copy.deepcopy(preprocessor)),
        work_dir=str(work_dir),
        train_dataloader=dict(
            **loader, dataset=dataset, sampler=dict(type='DefaultSampler', shuffle=True)
        ),
        train_cfg=dict(by_epoch=True, max_epochs=2, val_interval=1) if train is None else train,
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9), **(optim or {})),
        param_scheduler=dict(type='LinearLR', start_factor=0.5, by_epoch=False, end=6),
        randomness=dict(seed=3, deterministic=True),
        custom_hooks=[dict(type='Recorder'), *hooks],
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', interval=1),
            logger=dict(type='LoggerHook', interval=1),
        ),
        experiment_name=f'toy-{next(_names)}',
        log_level='ERROR',
        visualizer=None,
    )
    if cfg['train_cfg'].get('by_epoch') is False:
        cfg['default_hooks']['checkpoint'].update(by_epoch=False)
        cfg['log_processor'] = dict(by_epoch=False)
        cfg['train_dataloader']['sampler'] = dict(type='InfiniteSampler', shuffle=True)
    if val:
        cfg.update(
            val_dataloader=dict(
                **loader,
                dataset=copy.deepcopy(dataset),
                sampler=dict(type='DefaultSampler', shuffle=False),
            ),
            val_cfg=dict(),
            val_evaluator=dict(type='ToyMetric'),
        )
    cfg.update(more)
    return cfg


def prefetching(cfg, depth=2, **loop):
    """The same config with prefetching switched on."""

    cfg = enable_prefetch(Config(copy.deepcopy(cfg)), prefetch_depth=depth)
    if loop:
        cfg.train_cfg.update(loop)
    cfg.experiment_name = f'toy-{next(_names)}'
    return cfg


def run(cfg):
    """Train; return the runner and the record of the run."""

    runner = Runner.from_cfg(Config(cfg) if isinstance(cfg, dict) else cfg)
    runner.train()
    return runner, recorder(runner)


def recorder(runner):
    return next(hook for hook in runner.hooks if isinstance(hook, Recorder))


def same(one, other):
    """Whether two nested structures are equal, tensors to the bit and of one type."""
    if isinstance(one, torch.Tensor):
        return (
            type(one) is type(other)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.layout == other.layout
            and torch.equal(one.to_dense(), other.to_dense())
        )
    if isinstance(one, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, BaseDataElement):
        return same(one.metainfo, other.metainfo) and same(dict(one.items()), dict(other.items()))
    if hasattr(one, '__dict__') and not isinstance(one, type):
        return same(vars(one), vars(other))
    return one == other


def assert_same_run(one, other, *, scalars=True):
    """Two runs were equal to the bit: batches, losses, weights, optimizer, scalars."""
    (runner, record), (other_runner, other_record) = one, other
    assert record.indices == other_record.indices
    assert record.losses == other_record.losses
    assert record.metrics == other_record.metrics
    assert same(dict(runner.model.state_dict()), dict(other_runner.model.state_dict()))
    assert same(runner.optim_wrapper.state_dict(), other_runner.optim_wrapper.state_dict())
    assert (runner.epoch, runner.iter) == (other_runner.epoch, other_runner.iter)
    if scalars:
        logged = [
            {
                name: [array.tolist() for array in buffer.data]
                for name, buffer in r.message_hub.log_scalars.items()
                if not name.endswith('time')
            }
            for r in (runner, other_runner)
        ]
        assert logged[0] == logged[1]
