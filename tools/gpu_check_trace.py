# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What a device and its runtime did during some steps, by torch's profiler.

Prints, for 20 training and 20 validation steps of mmengine's way and of mmprefetch: how long the
compute stream was idle, how much of the copies to the device ran beside its kernels, and how often
each thread made the host wait or asked the driver for memory.
"""

import argparse
import bisect
import gzip
import json
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from gpu_check_work import Source, Trainer, classification, fields_of, synchronize
from mmengine.model import ImgDataPreprocessor
from torch.profiler import ProfilerActivity, profile, record_function

from mmprefetch import PrefetchDataPreprocessor, look_ahead
from mmprefetch.engine import Preparation

LABEL = 'mmprefetch: traced work'
KINDS = dict(kernel='kernel', gpu_memcpy='copy', gpu_memset='fill', cuda_runtime='call',
             cuda_driver='call')  # fmt: skip
WAITS = ('Synchronize', 'cudaMemcpy ', 'cudaMemcpy2D ', 'cudaMemset ')
ALLOCATES = ('cudaMalloc', 'cudaHostAlloc', 'cudaHostRegister', 'cudaFree', 'cuMemCreate')
GAP_US = 20.0
WARM_UP = 4


class Event(NamedTuple):
    """Something that a trace shows.

    Attributes:
        kind: 'kernel', 'copy' or 'fill' of the device; 'call' of its runtime by the host.
        name: As the trace has it.
        start: Microseconds.
        end: Microseconds.
        place: The stream of the device's work, the thread of a call.
    """

    kind: str
    name: str
    start: float
    end: float
    place: int


def trace(work: Callable[[], Any], keep: Path | None = None) -> list[Event] | None:
    """Trace a function, on all threads and streams.

    Args:
        work (Callable): The function.
        keep (Path, optional): Where to keep the trace, which Chrome and Perfetto can show.

    Returns:
        list[Event] | None: In order of their start; None where the profiler cannot see the device.
    """
    cuda = torch.cuda.is_available()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    with tempfile.TemporaryDirectory() as folder:
        path = keep or Path(folder) / 'trace.json.gz'
        with profile(activities=activities) as traced:
            if cuda:
                torch.ones(1).cuda()  # the first event of all: it shows that the device is seen
                torch.cuda.synchronize()
                time.sleep(0.002)  # the clocks of host and device differ by some microseconds
            with record_function(LABEL):
                work()
            if cuda:
                torch.cuda.synchronize()
        traced.export_chrome_trace(str(path))
        with gzip.open(path, 'rt', errors='replace') as file:
            return events_of(json.load(file)['traceEvents'])


def events_of(entries: Sequence[dict]) -> list[Event] | None:
    """Read the events of the work itself from the entries of a trace."""
    whole = next(
        (each for each in entries
         if each.get('name') == LABEL and each.get('cat') == 'user_annotation'), None
    )  # fmt: skip
    found = []
    for entry in entries:
        kind = KINDS.get(str(entry.get('cat')).lower())
        if kind is None or entry.get('ph') != 'X':
            continue
        start = float(entry['ts'])
        place = entry['tid'] if kind == 'call' else entry.get('args', {}).get('stream', -1)
        end = start + float(entry.get('dur', 0))
        found.append(Event(kind, entry['name'], start, end, _number(place)))
    if whole is None or not any(event.kind != 'call' for event in found):
        return None
    first = float(whole['ts'])
    last = first + float(whole['dur'])
    return sorted(
        (
            event
            for event in found
            if event.start >= first and (event.kind != 'call' or event.start <= last)
        ),
        key=lambda event: event.start,
    )


def _number(place: Any) -> int:
    try:
        return int(place)
    except (TypeError, ValueError):
        return -1


def of_kind(events: Sequence[Event], kind: str, name: str = '') -> list[Event]:
    """The events of a kind whose name holds ``name``."""
    return [event for event in events if event.kind == kind and name in event.name]


def merged(events: Sequence[Event]) -> list[tuple[float, float]]:
    """The times during which any of some events went on."""
    spans: list[tuple[float, float]] = []
    for event in sorted(events, key=lambda event: event.start):
        if spans and event.start <= spans[-1][1]:
            spans[-1] = (spans[-1][0], max(spans[-1][1], event.end))
        else:
            spans.append((event.start, event.end))
    return spans


class Busy:
    """When any of some events went on.

    Args:
        events (Sequence[Event]): The events.
    """

    def __init__(self, events: Sequence[Event]) -> None:
        self.spans = merged(events)
        self._ends = [end for _, end in self.spans]

    def during(self, event: Event) -> float:
        """Microseconds of another event during which that was so."""
        shared = 0.0
        for start, end in self.spans[bisect.bisect_right(self._ends, event.start) :]:
            if start >= event.end:
                break
            shared += min(event.end, end) - max(event.start, start)
        return shared


def beside(events: Sequence[Event]) -> list[tuple[float, float]]:
    """For each copy to the device its microseconds, and those beside kernels of other streams."""
    kernels = of_kind(events, 'kernel')
    copied = of_kind(events, 'copy', 'HtoD')
    others = {
        stream: Busy([kernel for kernel in kernels if kernel.place != stream])
        for stream in {copy.place for copy in copied}
    }
    return [(copy.end - copy.start, others[copy.place].during(copy)) for copy in copied]


def identities() -> set[int]:
    """The numbers by which a trace may call the calling thread."""
    short = threading.get_ident() & 0xFFFFFFFF
    signed = short - (1 << 32) if short >> 31 else short
    return {threading.get_native_id(), threading.get_ident(), short, signed, abs(signed)}


@contextmanager
def loader_identities() -> Iterator[set[int]]:
    """The numbers of the loader threads that are started meanwhile."""
    enter, known = Preparation.enter_thread, set()

    def noted(self: Preparation) -> None:
        known.update(identities())
        enter(self)

    with mock.patch.object(Preparation, 'enter_thread', noted):
        yield known


def summary(events: Sequence[Event], threads: dict[str, set[int]]) -> list[str]:
    """Say what a trace shows.

    Args:
        events (Sequence[Event]): The trace.
        threads (dict): Name of a thread -> the numbers by which a trace may call it.

    Returns:
        list[str]: Lines.
    """
    lines = []
    work: dict[int, float] = defaultdict(float)
    for event in of_kind(events, 'kernel'):
        work[event.place] += event.end - event.start
    if work:
        compute = max(work, key=work.__getitem__)
        on_it = [e for e in events if e.kind != 'call' and e.place == compute]
        spans = merged(on_it)
        gaps = [later[0] - earlier[1] for earlier, later in pairwise(spans)]
        whole = spans[-1][1] - spans[0][0]
        long = [gap for gap in gaps if gap > GAP_US]
        lines.append(
            f'compute stream: {whole / 1e3:.2f} ms, idle {sum(gaps) / 1e3:.2f} ms '
            f'({sum(gaps) / max(whole, 1e-9):.1%}); {len(long)} gaps over {GAP_US:.0f} us, the '
            f'longest {max(gaps, default=0.0) / 1e3:.3f} ms'
        )
    copied = of_kind(events, 'copy', 'HtoD')
    total, shared = (sum(each) for each in zip((0.0, 0.0), *beside(events), strict=True))
    streams = len({event.place for event in copied})
    lines.append(
        f'copies to the device: {len(copied)} on {streams} streams, {total / 1e3:.2f} ms, of which '
        f'{shared / max(total, 1e-9):.1%} beside kernels of another stream'
    )
    for what, names in (('make the host wait', WAITS), ('ask for memory', ALLOCATES)):
        by_thread: dict[str, Counter[str]] = defaultdict(Counter)
        for event in of_kind(events, 'call'):
            if any(name in f'{event.name} ' for name in names):
                known = (name for name, numbers in threads.items() if event.place in numbers)
                by_thread[next(known, 'other')][event.name] += 1
        shown = '; '.join(
            f'{thread}: {", ".join(f"{name} {count}" for name, count in sorted(calls.items()))}'
            for thread, calls in sorted(by_thread.items())
        )
        lines.append(f'calls that {what}: {shown or "none"}')
    return lines


def trace_steps(device: torch.device, small: bool, steps: int, keep: Path | None) -> None:
    """Print what the traces of training and of validation show.

    Args:
        device (torch.device): Where.
        small (bool): Whether to take small images.
        steps (int): How many of each are traced.
        keep (Path, optional): A folder for the traces.
    """
    work = classification(device, small, stacked=False)
    trainer = Trainer(work, device, amp=device.type == 'cuda')
    fields = fields_of(work) | dict(bgr_to_rgb=True)
    stock = ImgDataPreprocessor(**fields).to(device)
    ahead = PrefetchDataPreprocessor(**fields).to(device)
    for split in ('train', 'val'):
        for name, preprocessor in (('stock', stock), ('mmprefetch, depth 2', ahead)):
            # It goes on behind the last traced step, as a pass mostly does.
            source: Any = Source(work.batches, WARM_UP + steps + 4)
            if preprocessor is ahead:
                source = look_ahead(source, ahead, split)
            trainer.model.train(split == 'train')
            step = trainer.step if split == 'train' else trainer.validate

            def run(batches: Iterator, count: int, prepare: Any = preprocessor, step: Any = step,
                    training: bool = split == 'train') -> None:  # fmt: skip
                for batch in islice(batches, count):
                    step(prepare(batch, training)).item()

            with loader_identities() as loader:
                batches = iter(source)
                run(batches, WARM_UP)
                synchronize(device)
                kept = keep and keep / f'trace_{split}_{name.split(",")[0]}.json.gz'
                events = trace(lambda left=batches: run(left, steps), kept)
                del batches
            if preprocessor is ahead:
                source.close()
            print(f'\n{steps} {split} steps, {name}')
            if events is None:
                print('  the profiler does not see a device here')
                continue
            for line in summary(events, dict(main=identities(), loader=loader)):
                print(f'  {line}', flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what the traces show.

    Args:
        arguments (Sequence[str], optional): Command line. Defaults to the process's own.

    Returns:
        int: Exit status: 2 without the device.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cuda', help='cuda, or cpu to try the tool itself')
    parser.add_argument('--small', action='store_true', help='small images')
    parser.add_argument('--steps', type=int, default=20, help='steps of each trace')
    parser.add_argument('--keep', type=Path, help='a folder for the traces')
    args = parser.parse_args(arguments)
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        print(f'--device {args.device}: torch {torch.__version__} finds no CUDA device here')
        return 2
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    trace_steps(torch.device(args.device), args.small, args.steps, args.keep)
    return 0


if __name__ == '__main__':
    sys.exit(main())
