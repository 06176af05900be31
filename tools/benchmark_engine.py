# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Measure the look-ahead on CPU: overlap, cost on the thread that trains, memory.

Exit status 1 when a bound is not met.
"""

import argparse
import contextlib
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from benchmark_overlap import overlap, verdict
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement, InstanceData

from mmprefetch import PrefetchDataPreprocessor, tickets
from mmprefetch.lookahead import LookAheadLoader
from mmprefetch.streams import AcceleratorStream

COST_BOUND_MS, COST_BOUND_RATIO = 1.0, 1 / 3
MEMORY_BOUND = 1.05

# -- cost on the thread that trains ------------------------------------------------------------


class StandInEvent:
    """An event of a device that has always finished."""

    def record(self, stream: object) -> None:
        pass

    def synchronize(self) -> None:
        pass


class StandInStream:
    """A stream of a device that has always finished."""

    def wait_event(self, event: object) -> None:
        pass

    def wait_stream(self, stream: object) -> None:
        pass


class StandInAPI:
    """Takes the place of the device functions, so that what is measured is the engine's own."""

    device = torch.device('cpu')

    def new_stream(self) -> StandInStream:
        return StandInStream()

    def new_event(self) -> StandInEvent:
        return StandInEvent()

    def current_stream(self) -> StandInStream:
        return StandInStream()

    def use(self, stream: object) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def record_use(self, tensor: torch.Tensor, stream: object) -> None:
        pass


@contextlib.contextmanager
def stand_in_device() -> Iterator[None]:
    """Let new preprocessors work as on an accelerator, whose device functions do nothing."""
    empty = torch.empty

    def pageable(*args, pin_memory: bool = False, **kwargs) -> torch.Tensor:
        return empty(*args, **kwargs)

    with (
        mock.patch.object(tickets, 'stream_for', lambda device: AcceleratorStream(StandInAPI())),
        mock.patch.object(torch, 'empty', pageable),
    ):
        yield


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


def timed(function: Callable, *args, **kwargs) -> tuple[float, float]:
    """Call a function.

    Returns:
        tuple: Milliseconds that passed, and those that the calling thread computed.
    """
    wall, thread = time.perf_counter(), time.thread_time()
    result = function(*args, **kwargs)
    times = (time.perf_counter() - wall) * 1e3, (time.thread_time() - thread) * 1e3
    del result  # a step would hold it: to free it is no part of the call
    return times


def cost(rounds: int) -> bool:
    """Print what begin and collect cost on the thread that trains.

    Args:
        rounds (int): Batches.

    Returns:
        bool: Whether the bounds are met.
    """
    stock = BaseDataPreprocessor()
    host = PrefetchDataPreprocessor(wraps='BaseDataPreprocessor')
    assert host.compute_on_host  # asking makes its stream, before the stand-in takes over
    accelerator = PrefetchDataPreprocessor(wraps='BaseDataPreprocessor')
    took: dict[str, list] = {name: [] for name in ('cast_data', 'host', 'accelerator')}
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with stand_in_device():
        for _ in range(rounds):
            took['cast_data'].append(timed(stock.cast_data, batch_of_samples()))
            for name, preprocessor in (('host', host), ('accelerator', accelerator)):
                batch = batch_of_samples()
                staged = preprocessor.stage(batch, 'train', 2)  # in the loader thread, in a run
                begin = timed(preprocessor.prefetch, batch, True, 'train', staged)
                # The step would be here, long enough for the host's work to finish.
                host._runtime.stream(host.device).submit(lambda: None).barrier()()
                collect = timed(preprocessor, batch, True)
                took[name].append(tuple(map(sum, zip(begin, collect, strict=True))))
    torch.set_num_threads(before)
    host.close()
    medians = {
        name: [statistics.median(kind) for kind in zip(*all_, strict=True)]
        for name, all_ in took.items()
    }
    print(
        f'\ncost on the main thread, 64 samples with 6 tensors each, medians of {rounds} batches\n'
        'host: the work itself runs beside it in another thread, so the time that the main thread\n'
        'computes is bound; accelerator: device functions that do nothing, so all time is bound\n'
        f'bounds: {COST_BOUND_MS:.0f} ms, and {COST_BOUND_RATIO:.3f} x cast_data'
    )
    row = '{:<30} {:>9} {:>12}   {}'
    print(row.format('', 'ms', 'thread ms', 'ratio to cast_data'))
    wall, thread = medians['cast_data']
    print(row.format('BaseDataPreprocessor.cast_data', f'{wall:.3f}', f'{thread:.3f}', '1'))
    met = True
    for name, bound in (('host', 1), ('accelerator', 0)):
        value, ratio = medians[name][bound], medians[name][bound] / medians['cast_data'][bound]
        met = met and value <= COST_BOUND_MS and ratio <= COST_BOUND_RATIO
        mark = '' if value <= COST_BOUND_MS else f'  ABOVE {COST_BOUND_MS:.0f} ms'
        cells = [f'{each:.3f}' for each in medians[name]]
        text = verdict(ratio, COST_BOUND_RATIO, 'x') + mark
        print(row.format(f'begin + collect, {name}', *cells, text), flush=True)
    return met


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


def memory(iterations: int) -> bool:
    """Print how the memory of the process grows over many batches of changing size.

    Args:
        iterations (int): Batches; the first tenth is left for memory to settle.

    Returns:
        bool: Whether the bound is met.
    """
    early = max(iterations // 10, 1)
    print(
        f'\nmemory: MiB in RAM after {early:,} and after {iterations:,} batches of random sizes; '
        f'bound: {MEMORY_BOUND} x'
    )
    row = '{:<12} {:>10} {:>10}   {}'
    met = True
    for name in ('host', 'accelerator'):
        context = stand_in_device() if name == 'accelerator' else contextlib.nullcontext()
        with context:
            preprocessor = PrefetchDataPreprocessor(mean=[1, 2, 3], std=[4, 5, 6])
            loader = LookAheadLoader(RandomSizes(iterations), preprocessor, 'train', 2)
            held = []
            for count, batch in enumerate(loader, 1):
                preprocessor(batch, True)
                loader.fill()
                if count in (early, iterations):
                    held.append(resident_mib())
            loader.close()
            preprocessor.close()
        ratio = held[-1] / held[0]
        met = met and ratio <= MEMORY_BOUND
        print(row.format(name, *(f'{each:.1f}' for each in (held[0], held[-1])),
                         verdict(ratio, MEMORY_BOUND, 'x')), flush=True)  # fmt: skip
    return met


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the three tables.

    Args:
        arguments (Sequence[str], optional): Command line. Defaults to the process's own.

    Returns:
        int: Exit status, 1 when a bound is not met.
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
    met = [overlap(args.steps, args.depths), cost(args.rounds), memory(args.iterations)]
    print('\nall bounds are met' if all(met) else '\nnot all bounds are met: see ABOVE')
    return 0 if all(met) else 1


if __name__ == '__main__':
    sys.exit(main())
