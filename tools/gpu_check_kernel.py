# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What the fused pass takes: its kernel on the device beside a copy, and the host for its launch.

Prints; decides nothing. That the kernel's result is right is for the tests to say.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from gpu_check_trace import of_kind, trace
from gpu_check_work import MEAN, STD, between, noise, now, synchronize

from mmprefetch.ops import normalize_batch

BANDWIDTH_WANTED = 0.8


def device_ms(function: Callable, device: torch.device, calls: int) -> float:
    """Median milliseconds of a call, of five turns of several calls each, on the device."""
    turns = []
    for _ in range(6):
        synchronize(device)
        start = now(device)
        for _ in range(calls):
            function()
        end = now(device)
        synchronize(device)
        turns.append(between(start, end) / calls)
    return statistics.median(turns[1:])


def host_ms(function: Callable, device: torch.device, calls: int) -> float:
    """Median milliseconds that the host is busy with a call, whose work is launched only."""
    took = []
    for _ in range(calls):
        synchronize(device)
        start = time.perf_counter()
        function()
        took.append((time.perf_counter() - start) * 1e3)
    return statistics.median(took)


def kernel_ms(function: Callable, calls: int) -> tuple[float, set[str]] | None:
    """Milliseconds of the kernels of a call by the profiler, and their names; None where it does
    not see the device."""

    def work() -> None:
        for _ in range(calls):
            function()

    events = trace(work)
    if events is None:
        return None
    kernels = of_kind(events, 'kernel')
    whole = sum(kernel.end - kernel.start for kernel in kernels)
    return whole / calls / 1e3, {kernel.name for kernel in kernels}


def measure(device: torch.device, small: bool) -> None:
    """Print the times of the fused pass.

    Args:
        device (torch.device): Where.
        small (bool): Whether to take small images.
    """
    shape = (4, 3, 32, 32) if small else (256, 3, 224, 224)
    calls = 3 if small else 50
    images = noise(*shape).to(device)
    mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
    out, other = torch.empty(2, *shape, device=device)
    copied = device_ms(lambda: out.copy_(other), device, calls)
    copy_rate = 2 * out.nbytes / copied / 1e6
    print(f'fused pass, {shape[0]} x {shape[1:]} uint8 to float32')
    row = '  {:<26} {:>10} {:>10} {:>10} {:>10} {:>8}'
    print(row.format('', 'device ms', 'kernel ms', 'host ms', 'GB/s', 'x copy'))
    print(row.format('copy of float32', f'{copied:.3f}', '', '', f'{copy_rate:.0f}', ''))
    apart = [image.clone() for image in images]  # in memory of its own each
    smaller = [image[:, : image.shape[1] - index % 2] for index, image in enumerate(images)]
    for name, batch in (
        ('one tensor', images),
        ('list, one distance apart', list(images)),
        ('list, anywhere', apart),
        ('list of two sizes', smaller),
    ):

        def work(batch: object = batch) -> None:
            normalize_batch(batch, mean, std, channel_order=(2, 1, 0), out=out)

        took, host = device_ms(work, device, calls), host_ms(work, device, calls)
        found = kernel_ms(work, min(calls, 10)) if device.type == 'cuda' else None
        kernel, names = found or (took, set())
        rate = (images.nbytes + out.nbytes) / kernel / 1e6
        ratio = f'{rate / copy_rate:.2f}'
        print(row.format(name, f'{took:.3f}', f'{kernel:.3f}', f'{host:.3f}', f'{rate:.0f}', ratio))
        if len(names) > 1:
            print(f'    more than one kernel: {", ".join(sorted(names))}')
    print(f'  wanted of the kernel: at least {BANDWIDTH_WANTED} x copy', flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table.

    Args:
        arguments (Sequence[str], optional): Command line. Defaults to the process's own.

    Returns:
        int: Exit status: 2 without the device.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cuda', help='cuda, or cpu to try the tool itself')
    parser.add_argument('--small', action='store_true', help='small images')
    args = parser.parse_args(arguments)
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        print(f'--device {args.device}: torch {torch.__version__} finds no CUDA device here')
        return 2
    torch.manual_seed(0)
    measure(torch.device(args.device), args.small)
    return 0


if __name__ == '__main__':
    sys.exit(main())
