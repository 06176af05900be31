# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Measure the look-ahead on CPU: overlap, cost on the thread that trains, memory.

Ratios are printed beside what is wanted of them; they depend on the machine and decide nothing.
"""

import argparse
import contextlib
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from benchmark_overlap import overlap
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement, InstanceData

from mmprefetch import PrefetchDataPreprocessor, look_ahead
from mmprefetch.engine import Ticket, ticket, transfer
from mmprefetch.engine.streams import SideStream

COST_WANTED = 0.1
MEMORY_WANTED = 1.05
PROGRESS_S = 5.0


class StandIn:
    """A stream or an event of a device that has always finished."""

    def record(self, stream: Any) -> None:
        pass

    def query(self) -> bool:
        return True

    def wait_event(self, event: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass


class StandInAPI:
    """Takes the place of a device's functions, so that what is measured is the engine's own."""

    new_stream = new_event = current_stream = StandIn

    def use(self, stream: StandIn) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def set_stream(self, stream: StandIn) -> None:
        pass

    def record_use(self, tensor: torch.Tensor, stream: StandIn) -> None:
        pass


@contextlib.contextmanager
def stand_in_device() -> Iterator[None]:
    """Let new preprocessors work as on an accelerator, whose functions do nothing."""

    def pageable(nbytes: int, pinned: bool) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    with (
        mock.patch.object(ticket, 'stream_for', lambda device: SideStream(StandInAPI())),
        mock.patch.object(transfer, '_staging_buffer', pageable),
    ):
        yield


KINDS = dict(host=contextlib.nullcontext, accelerator=stand_in_device)


# -- cost on the thread that trains ------------------------------------------------------------


def batch_of_samples(samples: int = 64) -> dict:
    """A batch of small samples with six tensors each: an image and five of annotations."""
    made = []
    for index in range(samples):
        sample = BaseDataElement(metainfo=dict(img_shape=(8, 8), path=f'{index}.png'))
        sample.instances = InstanceData(
            boxes=torch.rand(5, 4), labels=torch.arange(5), masks=torch.rand(5, 4, 4) > 0.5
        )
        sample.label = torch.tensor(index)
        sample.points = torch.rand(4, 3)
        made.append(sample)
    images = [torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8) for _ in made]
    return dict(inputs=images, data_samples=made)


def timed(function: Callable, *args: Any) -> tuple[float, Any]:
    """Call a function.

    Returns:
        tuple: Milliseconds that it took, and what it returned.
    """
    start = time.perf_counter()
    result = function(*args)
    return (time.perf_counter() - start) * 1e3, result


def collect_ms(preprocessor: PrefetchDataPreprocessor) -> float:
    """Time the call with a batch whose work was begun in another thread, and is done.

    Args:
        preprocessor (PrefetchDataPreprocessor): The preprocessor.

    Returns:
        float: Milliseconds.

    Raises:
        RuntimeError: The work was done again, so that this is no time of collect.
    """
    handed_out = Ticket(batch_of_samples(), 'train')
    preparation = preprocessor.preparation('train')
    thread = threading.Thread(target=preparation.begin, args=(handed_out,))
    thread.start()
    thread.join()
    begun = handed_out.work.begun
    preprocessor.expect(handed_out)
    took, result = timed(preprocessor, handed_out.batch, True)
    preprocessor.withdraw(handed_out)
    if result is not begun:
        raise RuntimeError('what was begun ahead is not what the model was given')
    return took


def cost(rounds: int) -> None:
    """Print what collect costs on the thread that trains.

    Args:
        rounds (int): Batches.
    """
    print(
        f'\ncost of collect on the main thread, 64 samples with 6 tensors each, medians of '
        f'{rounds} batches\naccelerator: device functions that do nothing; wanted: at most '
        f'{COST_WANTED} x cast_data'
    )
    stock = BaseDataPreprocessor()
    took: dict[str, list[float]] = {'BaseDataPreprocessor.cast_data': []}
    preprocessors = {}
    for name, device in KINDS.items():
        with device():
            preprocessors[name] = PrefetchDataPreprocessor(wraps='BaseDataPreprocessor')
            collect_ms(preprocessors[name])  # makes its stream
    for _ in range(rounds):
        took['BaseDataPreprocessor.cast_data'].append(timed(stock.cast_data, batch_of_samples())[0])
        for name, device in KINDS.items():
            with device():
                took.setdefault(f'collect, {name}', []).append(collect_ms(preprocessors[name]))
    base = None
    for name, each in took.items():
        median = statistics.median(each)
        base = base or median
        print(f'{name:<30} {median:>8.3f} ms   {median / base:.3f} x cast_data', flush=True)


# -- memory ------------------------------------------------------------------------------------


class RandomSizes:
    """A dataloader, to the engine, that is read in a loader thread: batches of random sizes.

    Args:
        iterations (int): How many.
    """

    num_workers = 1

    def __init__(self, iterations: int) -> None:
        self.iterations = iterations

    def __iter__(self) -> Iterator[dict]:
        sizes = random.Random(0)
        for _ in range(self.iterations):
            images = [
                torch.zeros(3, sizes.randint(8, 64), sizes.randint(8, 64), dtype=torch.uint8)
                for _ in range(sizes.randint(1, 16))
            ]
            yield dict(inputs=images, data_samples=[BaseDataElement() for _ in images])


def resident_mib() -> float:
    """Memory of this process that is in RAM, in MiB."""
    with open('/proc/self/status') as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith('VmRSS')) / 1024


def memory(iterations: int) -> None:
    """Print how the memory of the process grows over many batches of changing size.

    Args:
        iterations (int): Batches; the first tenth is left for memory to settle.
    """
    early = max(iterations // 10, 1)
    print(
        f'\nmemory: MiB in RAM after {early:,} and after {iterations:,} batches of random sizes; '
        f'wanted: at most {MEMORY_WANTED} x'
    )
    for name, device in KINDS.items():
        with device():
            preprocessor = PrefetchDataPreprocessor(mean=[1, 2, 3], std=[4, 5, 6])
            loader = look_ahead(RandomSizes(iterations), preprocessor)
            held, said = [], time.monotonic()
            for count, batch in enumerate(loader, 1):
                preprocessor(batch, True)
                if count in (early, iterations):
                    held.append(resident_mib())
                if time.monotonic() - said > PROGRESS_S:
                    said = time.monotonic()
                    print(f'  {name}: {count:,} of {iterations:,} batches', flush=True)
        print(
            f'{name:<12} {held[0]:>8.1f} {held[-1]:>8.1f}   {held[-1] / held[0]:.3f} x', flush=True
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the three tables.

    Args:
        arguments (Sequence[str], optional): Command line. Defaults to the process's own.

    Returns:
        int: Exit status.
    """
    parser = argparse.ArgumentParser(prog='benchmark.py engine', description=__doc__)
    parser.add_argument('--steps', type=int, default=30, help='timed iterations of each run')
    parser.add_argument('--depths', type=int, nargs='+', default=[1, 2, 4], help='prefetch depths')
    parser.add_argument('--rounds', type=int, default=100, help='batches to time the cost of')
    parser.add_argument(
        '--iterations', type=int, default=10_000, help='batches to watch the memory over'
    )
    args = parser.parse_args(arguments)
    for name in ('steps', 'rounds', 'iterations'):
        if getattr(args, name) < 1:
            parser.error(f'--{name} must be at least 1, got {getattr(args, name)}')
    overlap(args.steps, args.depths)
    cost(args.rounds)
    memory(args.iterations)
    return 0
