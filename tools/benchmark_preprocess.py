# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Time the fused pass against the preprocessors and the arithmetic that it replaces.

All contenders of a line take turns, a few runs at each turn, of which the first does not count: it
pays for what the other contenders left in the caches. What is printed are medians and their
ratios. Each line is measured in processes of its own, since what is left behind in the C library's
memory allocator decides how many page faults a call pays for, and in several, since chance does,
too. The page faults of the stock work are printed, for its time hangs on them. On a GPU all of it
is measured in this process, by events on its stream.

Ratios are reported and decide nothing; a result that is not equal is an error.
"""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from multiprocessing import get_context
from typing import Any, NamedTuple

import torch
from benchmark_preprocess_lines import MEAN, STD, Contender, Row, lines, noise

from mmprefetch.ops import normalize_batch, prepare, reversal

RUNS = 4
COLUMNS = '{:<54} {:>8} {:>7} {:>8} {:>7} {:>8} {:>7} {:>7} {:>8}   {}'
HEADER = ('work', 'stock', 'faults', 'op', 'faster', 'whole', 'faster', 'floor', 'op/floor', '')


class Times(NamedTuple):
    """What was measured in one process or in several.

    Attributes:
        name: Of the line.
        wanted: Of the line.
        taken: Seconds of each call of each contender.
        faults: Page faults of each call of the first contender.
    """

    name: str
    wanted: float
    taken: list[list[float]]
    faults: list[int]

    def medians(self) -> list[float]:
        """Of each contender, in milliseconds."""
        return [statistics.median(times) * 1e3 for times in self.taken]


def take_turns(
    contenders: Sequence[Contender], rounds: int, device: str = 'cpu'
) -> tuple[list[list[float]], list[int]]:
    """Time contenders in turn.

    Args:
        contenders: Functions without arguments.
        rounds: Turns of each.
        device: Where they work.

    Returns:
        Seconds of each call of each; and the page faults of each call of the first one.
    """
    clock = host_seconds if device == 'cpu' else device_seconds
    taken: list[list[float]] = [[] for _ in contenders]
    faults: list[list[int]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, times, faulted in zip(contenders, taken, faults, strict=True):
            contender()
            for _ in range(RUNS):
                before = page_faults()
                times.append(clock(contender))
                faulted.append(page_faults() - before)
    return taken, faults[0]


def host_seconds(contender: Contender) -> float:
    """Seconds that the host takes for a call."""
    start = time.perf_counter()
    contender()
    return time.perf_counter() - start


def device_seconds(contender: Contender) -> float:
    """Seconds between an event before and an event behind a call on the GPU's stream."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    contender()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop) / 1e3


def page_faults() -> int:
    """Page faults of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def measure(line: Callable[..., Row], threads: int, rounds: int, device: str = 'cpu') -> Times:
    """Measure one line.

    Args:
        line: Makes it.
        threads: Threads of torch.
        rounds: Turns of each contender.
        device: Where the images are.

    Returns:
        The times of stock, floor, op and, where the line has it, whole.
    """
    torch.set_num_threads(threads)
    row = line(device=device)
    raw = row.result.to(torch.uint8)
    out = torch.empty_like(row.result)
    contenders = [row.stock, lambda: out.copy_(raw), row.op]
    if row.whole is not None:
        contenders.append(row.whole)
    return Times(row.name, row.wanted, *take_turns(contenders, rounds, device))


def text_of(times: Times) -> str:
    """Put a line into words.

    Args:
        times: What was measured.

    Returns:
        What to print.
    """
    stock, floor, op, *whole = times.medians()
    cells = [f'{stock:.2f}', f'{statistics.median(times.faults):.0f}']
    cells += [f'{op:.2f}', f'{stock / op:.1f} x']
    cells += [f'{whole[0]:.2f}', f'{stock / whole[0]:.1f} x'] if whole else ['-', '-']
    cells += [f'{floor:.2f}', f'{op / floor:.1f} x']
    met = stock / (whole or [op])[0] >= times.wanted
    return COLUMNS.format(times.name, *cells, '' if met else f'wanted {times.wanted} x').rstrip()


def channel_index(threads: int, rounds: int) -> Times:
    """What reordering channels costs: an index by a list, and the order of the fused pass.

    Args:
        threads: Threads of torch.
        rounds: Turns of each contender.

    Returns:
        The times of the index, of the fused pass with the order, and of it without.
    """
    torch.set_num_threads(threads)
    images = noise(*[(3, 224, 224)] * 64)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    contenders = [
        lambda: [image[[2, 1, 0]] for image in images],
        lambda: normalize_batch(images, mean, std, channel_order=reversal(3)),
        lambda: normalize_batch(images, mean, std),
    ]
    return Times('channel order of 64 x (3, 224, 224)', 0, *take_turns(contenders, rounds))


def print_host_wait() -> None:
    """On a GPU: how long the host waits for a busy stream, at each way to order channels."""
    device = torch.device('cuda')
    images = [image.to(device) for image in noise(*[(3, 224, 224)] * 64)]
    mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
    ways = {
        'image[[2, 1, 0]]': lambda: images[0][[2, 1, 0]],
        'fused pass of the batch': lambda: normalize_batch(
            images, mean, std, channel_order=reversal(3)
        ),
    }
    for name, way in ways.items():
        way()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        start = time.perf_counter()
        way()
        returned = time.perf_counter() - start
        torch.cuda.synchronize()
        total = time.perf_counter() - start
        print(
            f'behind {total * 1e3:.1f} ms of queued work, {name} returned to the host after '
            f'{returned * 1e3:.2f} ms'
        )


def apart(processes: int, function: Callable[..., Times], *args: Any) -> Times:
    """Measure in processes of their own.

    Args:
        processes: How many, one after the other.
        function: Measures.
        *args: Its arguments.

    Returns:
        What they measured, together.
    """
    measured = []
    for _ in range(processes):
        # A fork has this process's modules, and its memory as before anything was measured.
        with ProcessPoolExecutor(1, mp_context=get_context('fork')) as pool:
            measured.append(pool.submit(function, *args).result())
    first = measured[0]
    return first._replace(
        taken=[
            list(chain(*times)) for times in zip(*(each.taken for each in measured), strict=True)
        ],
        faults=list(chain(*(each.faults for each in measured))),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table.

    Args:
        arguments: Command line; None for the process's own.

    Returns:
        Exit status, 1 when a result is not equal to what it is compared with.
    """
    parser = argparse.ArgumentParser(prog='benchmark.py preprocess', description=__doc__)
    parser.add_argument('--processes', type=int, default=3, help='processes for each line')
    parser.add_argument('--rounds', type=int, default=3, help='turns of a contender in each')
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2], help='torch threads')
    options = parser.parse_args(arguments)
    for name, values in vars(options).items():
        least = min(values if isinstance(values, list) else [values])
        if least < 1:
            parser.error(f'--{name} must be at least 1, got {least}')
    start = time.perf_counter()
    prepare()  # once, before it forks
    table = lines()
    try:
        for threads in options.threads:
            print(f'\n{threads} thread{"s" if threads > 1 else ""}, milliseconds')
            rest = threads, options.rounds
            measured = (apart(options.processes, measure, line, *rest) for line in table)
            print_table(measured, len(table))
            times = apart(options.processes, channel_index, *rest)
            listed, ordered, plain = times.medians()
            print(
                f'{times.name}: image[[2, 1, 0]] {listed:.2f} ms; within the fused pass '
                f'{ordered - plain:+.2f} ms ({ordered:.2f} ms with, {plain:.2f} ms without)',
                flush=True,
            )
        if torch.cuda.is_available():
            print(f'\n{torch.cuda.get_device_name()}, milliseconds')
            print_table((measure(line, 1, options.rounds, 'cuda') for line in table), len(table))
            print_host_wait()
    except AssertionError as error:
        print(f'a result differs: {error}')
        return 1
    print(f'\ntook {time.perf_counter() - start:.0f} s')
    return 0


def print_table(measured: Iterable[Times], count: int) -> None:
    """Print lines as they come, and on the error stream which one is being measured."""
    print(COLUMNS.format(*HEADER).rstrip(), flush=True)
    for index, times in enumerate(measured, 1):
        print(text_of(times), flush=True)
        print(f'{index} of {count} lines', file=sys.stderr, flush=True)


if __name__ == '__main__':
    sys.exit(main())
