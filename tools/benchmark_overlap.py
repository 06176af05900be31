# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Time the iterations of a Runner whose loading, preprocessing and step take known times."""

import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence

import torch
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import nn

import mmprefetch  # noqa: F401  (registers the loops)

SLOW, FAST = 80, 50
"""Milliseconds that the slowest of load, preprocess and step takes, and each of the others."""
WARM_UP = 5
OVERLAP_BOUND = 1.05

_names = itertools.count()

Span = tuple[float, float]
"""When something began and ended, by ``time.perf_counter``."""


def take(seconds: float) -> Span:
    """Take a known time, and leave the processor to others meanwhile."""
    start = time.perf_counter()
    time.sleep(seconds)
    return start, time.perf_counter()


@DATASETS.register_module()
class TimedDataset(torch.utils.data.Dataset):
    """Takes a known time for each item."""

    def __init__(self, milliseconds: float, length: int) -> None:
        self.seconds, self.length = milliseconds / 1e3, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict:
        sample = BaseDataElement(metainfo=dict(loaded=take(self.seconds)))
        return dict(inputs=torch.zeros(3, 8, 8, dtype=torch.uint8), data_samples=sample)


@MODELS.register_module()
class TimedPreprocessor(BaseDataPreprocessor):
    """Takes a known time for each batch."""

    def __init__(self, milliseconds: float) -> None:
        super().__init__()
        self.seconds = milliseconds / 1e3
        self.spans: list[Span] = []

    def forward(self, data: dict, training: bool = False) -> dict:
        self.spans.append(take(self.seconds))
        return self.cast_data(data)


@MODELS.register_module()
class TimedModel(BaseModel):
    """Takes a known time for each step."""

    def __init__(self, milliseconds: float, data_preprocessor: dict) -> None:
        super().__init__(data_preprocessor)
        self.seconds = milliseconds / 1e3
        self.weight = nn.Parameter(torch.ones(()))
        self.spans: list[Span] = []
        self.loaded: list[Span] = []

    def forward(self, inputs: list, data_samples: list, mode: str = 'tensor') -> dict:
        self.loaded += [sample.loaded for sample in data_samples]
        self.spans.append(take(self.seconds))
        return dict(loss=self.weight * len(inputs))


def train(
    times: dict[str, float], length: int, depth: int | None, workers: int
) -> dict[str, list[Span]]:
    """Train one epoch with a Runner, at batch size 1.

    Args:
        times (dict): Milliseconds of ``load``, ``preprocess`` and ``step``.
        length (int): Batches.
        depth (int | None): ``prefetch_depth``; None for mmengine's own loop.
        workers (int): Worker processes of the dataloader.

    Returns:
        dict: When each ``load``, ``preprocess`` and ``step`` was.
    """
    preprocessor = dict(type='TimedPreprocessor', milliseconds=times['preprocess'])
    train_cfg = dict(by_epoch=True, max_epochs=1)
    if depth is not None:
        preprocessor.update(
            type='PrefetchDataPreprocessor', wraps='TimedPreprocessor', prefetch_safe=True
        )
        train_cfg = dict(type='PrefetchLoop', max_epochs=1, prefetch_depth=depth)
    with tempfile.TemporaryDirectory() as work_dir:
        runner = Runner(
            model=dict(
                type='TimedModel', milliseconds=times['step'], data_preprocessor=preprocessor
            ),
            work_dir=work_dir,
            train_dataloader=dict(
                dataset=dict(type='TimedDataset', milliseconds=times['load'], length=length),
                batch_size=1,
                num_workers=workers,
                sampler=dict(type='DefaultSampler', shuffle=False),
                collate_fn=dict(type='pseudo_collate'),
            ),
            train_cfg=train_cfg,
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
            default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=length)),
            experiment_name=f'benchmark-{next(_names)}',
            log_level='ERROR',
        )
        model = runner.train()
    return dict(load=model.loaded, preprocess=model.data_preprocessor.spans, step=model.spans)


def iteration_ms(steps: Sequence[Span]) -> float:
    """Median milliseconds from the end of a step to the end of the next."""
    pairs = itertools.pairwise(stop for _, stop in steps)
    return statistics.median(after - before for before, after in pairs) * 1e3


def overlap(steps: int, depths: Sequence[int]) -> bool:
    """Print the table of iteration times.

    Args:
        steps (int): Iterations of each run that count.
        depths (Sequence): Values of ``prefetch_depth``.

    Returns:
        bool: Whether the bound is met everywhere.
    """
    print(
        '\noverlap: median milliseconds of an iteration of a Runner\n'
        '  stock       mmengine loop, num_workers=0: it loads, preprocesses and steps in turn\n'
        '  stock, w=1  mmengine loop, one worker process, which overlaps its loading\n'
        f'  depth d     PrefetchLoop, one worker process; bound: {OVERLAP_BOUND} x the slowest'
    )
    row = '{:>5} {:>11} {:>5}   {:<11} {:>8}   {:<28}'
    print(row.format('load', 'preprocess', 'step', 'loop', 'ms', 'ratio'))
    met = True
    stages = ('load', 'preprocess', 'step')

    def run(depth: int | None, workers: int) -> float:
        spans = train(times, steps + WARM_UP + 1, depth, workers)
        return iteration_ms(spans['step'][WARM_UP:])

    for slowest in stages:
        times = dict.fromkeys(stages, FAST) | {slowest: SLOW}
        total, rest = sum(times.values()), times['preprocess'] + times['step']
        stock = run(None, 0)
        worker = run(None, 1)
        overlapped = max(times['load'], rest)
        lines = [
            ('stock', stock, f'{stock / total:.3f} x the sum'),
            ('stock, w=1', worker, f'{worker / overlapped:.3f} x max(load, the rest)'),
        ]
        for depth in depths:
            took = run(depth, 1)
            met = met and took <= OVERLAP_BOUND * SLOW
            lines.append(
                (f'depth {depth}', took, verdict(took / SLOW, OVERLAP_BOUND, 'x the slowest'))
            )
        for name, took, ratio in lines:
            print(row.format(*times.values(), name, f'{took:.1f}', ratio), flush=True)
    return met


def verdict(value: float, bound: float, unit: str) -> str:
    """A figure with its unit, and a mark where it is above its bound."""
    return f'{value:.3f} {unit}' + ('' if value <= bound else f'  ABOVE {bound:.3f}')
