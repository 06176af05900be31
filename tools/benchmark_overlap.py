# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Time the iterations of a Runner whose loading, preprocessing and step take known times."""

import itertools
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from mmengine.evaluator import BaseMetric
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement
from torch import nn

import mmprefetch  # noqa: F401  (registers the loops)

SLOW, FAST = 80, 50
"""Milliseconds that the slowest of load, preprocess and step takes, and each of the others."""
WARM_UP = 6
WORKERS = 2
OVERLAP_WANTED = 1.05

_names = itertools.count()


class Span(NamedTuple):
    """When something was done, by ``time.perf_counter``, and whether on the main thread."""

    start: float
    stop: float
    on_main: bool


def take(seconds: float) -> Span:
    """Take a known time, and leave the processor to others meanwhile."""
    start = time.perf_counter()
    time.sleep(seconds)
    on_main = threading.current_thread() is threading.main_thread()
    return Span(start, time.perf_counter(), on_main)


@DATASETS.register_module()
class TimedDataset(torch.utils.data.Dataset):
    """Takes a known time for each item."""

    def __init__(self, milliseconds: float, length: int) -> None:
        self.seconds, self.length = milliseconds / 1e3, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict:
        sample = BaseDataElement(metainfo=dict(index=index, loaded=tuple(take(self.seconds))))
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
        self.indices: list[int] = []

    def forward(self, inputs: list, data_samples: list, mode: str = 'tensor') -> dict | list:
        self.loaded += [Span(*sample.loaded) for sample in data_samples]
        self.indices += [sample.index for sample in data_samples]
        self.spans.append(take(self.seconds))
        return data_samples if mode == 'predict' else dict(loss=self.weight * len(inputs))


@METRICS.register_module()
class TimedMetric(BaseMetric):
    """Counts the batches."""

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        self.results += [sample['index'] for sample in data_samples]

    def compute_metrics(self, results: list) -> dict:
        return dict(count=len(results))


def run(
    times: dict[str, float], length: int, depth: int | None, workers: int, split: str = 'train'
) -> dict[str, list[Span]]:
    """Train or validate for one epoch with a Runner, at batch size 1.

    Args:
        times (dict): Milliseconds of ``load``, ``preprocess`` and ``step``.
        length (int): Batches.
        depth (int | None): ``prefetch_depth``; None for mmengine's own loop.
        workers (int): Worker processes of the dataloader.
        split (str): 'train' or 'val'. Defaults to 'train'.

    Returns:
        dict: When each ``load``, ``preprocess`` and ``step`` was.

    Raises:
        RuntimeError: The model did not see every batch once and in order.
    """
    preprocessor = dict(type='TimedPreprocessor', milliseconds=times['preprocess'])
    loop = dict(by_epoch=True, max_epochs=1) if split == 'train' else {}
    if depth is not None:
        preprocessor.update(
            type='PrefetchDataPreprocessor', wraps='TimedPreprocessor', prefetch_safe=True
        )
        kind = dict(type='PrefetchLoop', max_epochs=1) if loop else dict(type='PrefetchValLoop')
        loop = dict(kind, prefetch_depth=depth)
    rest = (
        dict(optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)))
        if split == 'train'
        else dict(val_evaluator=dict(type='TimedMetric'))
    )
    dataloader = dict(
        dataset=dict(type='TimedDataset', milliseconds=times['load'], length=length),
        batch_size=1,
        num_workers=workers,
        sampler=dict(type='DefaultSampler', shuffle=False),
        collate_fn=dict(type='pseudo_collate'),
    )
    with tempfile.TemporaryDirectory() as work_dir:
        runner = Runner(
            model=dict(
                type='TimedModel', milliseconds=times['step'], data_preprocessor=preprocessor
            ),
            work_dir=work_dir,
            default_hooks=dict(checkpoint=None, logger=dict(type='LoggerHook', interval=length)),
            experiment_name=f'benchmark-{next(_names)}',
            log_level='ERROR',
            **{f'{split}_dataloader': dataloader, f'{split}_cfg': loop},
            **rest,
        )
        getattr(runner, split)()
    model = runner.model
    if model.indices != list(range(length)):
        raise RuntimeError(f'{split}, depth {depth}: the model saw batches {model.indices}')
    return dict(load=model.loaded, preprocess=model.data_preprocessor.spans, step=model.spans)


def iteration_ms(steps: Sequence[Span], stride: int = 1) -> float:
    """Median milliseconds from the end of a step to the end of the next.

    Args:
        steps (Sequence): When each step was.
        stride (int): Iterations that are taken together: worker processes that load in step with
            each other deliver as many batches at a time. Defaults to 1.

    Returns:
        float: Milliseconds an iteration.
    """
    stops = [step.stop for step in steps]
    pairs = zip(stops, stops[stride:])  # noqa: B905
    return statistics.median(after - before for before, after in pairs) * 1e3 / stride


def overlap(steps: int, depths: Sequence[int]) -> None:
    """Print the table of iteration times.

    Args:
        steps (int): Iterations of each run that count.
        depths (Sequence): Values of ``prefetch_depth``.
    """
    print(
        f'\noverlap: median milliseconds of an iteration, num_workers={WORKERS}; wanted: at most '
        f'{OVERLAP_WANTED} x the slowest\nload: for each batch, of all worker processes together; '
        "stock: mmengine's own loop"
    )
    row = '{:<6} {:>5} {:>11} {:>5}   {:<8} {:>7}   {}'
    print(row.format('split', 'load', 'preprocess', 'step', 'loop', 'ms', 'x the slowest'))
    stages = ('load', 'preprocess', 'step')
    for split, slowest in itertools.product(('train', 'val'), stages):
        times = dict.fromkeys(stages, FAST) | {slowest: SLOW}
        for depth in (None, *depths):
            known = times | dict(load=times['load'] * WORKERS)
            length = steps + WARM_UP + WORKERS
            spans = run(known, length, depth, WORKERS, split)
            took = iteration_ms(spans['step'][WARM_UP:], WORKERS)
            name = 'stock' if depth is None else f'depth {depth}'
            ratio = f'{took / SLOW:.3f}'
            print(row.format(split, *times.values(), name, f'{took:.1f}', ratio), flush=True)
