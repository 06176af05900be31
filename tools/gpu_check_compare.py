# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Compare mmengine's loop, loaders after timm's manner, and mmprefetch on one device.

Batches lie ready in host memory, so what is compared is how they reach the model. A step ends
with reading the loss, as mmengine's hooks do at each iteration. Times are printed and decide
nothing; a batch that is not what mmengine makes of it is an error.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from gpu_check_models import resnet50
from gpu_check_work import (
    MODES,
    Source,
    Trainer,
    Work,
    classification,
    contenders,
    detection,
    fields_of,
    launch_bound,
    nothing,
    synchronize,
    thread_on_and_off,
)
from mmengine.model import ImgDataPreprocessor

__all__ = ['Source', 'Trainer', 'check_equal', 'classification', 'contenders', 'detection',
           'resnet50']  # fmt: skip

STEP_ALONE = 'step alone'
SETTLED = 2
"""Steps of an epoch after which look-ahead is in full swing."""


def check_equal(work: Work, device: torch.device, begun: dict[str, Callable] | None = None) -> None:
    """Check that mmprefetch prepares what stock does, to the bit.

    The loaders after timm's manner do not change the order of channels, and pad with another
    value: these are compared inside, and a difference is printed.

    Args:
        work (Work): Its batches are compared.
        device (torch.device): Where.
        begun (dict, optional): The contenders. Defaults to all of them.

    Raises:
        AssertionError: A batch differs.
    """
    fields = fields_of(work)
    stock = ImgDataPreprocessor(**fields, bgr_to_rgb=True).to(device)
    plain = ImgDataPreprocessor(**fields).to(device)
    for name, begin in (begun or contenders(work, device)).items():
        batches, end = begin(Source(work.batches, 6))
        for index, batch in enumerate(batches):
            raw, images = work.batches[index % len(work.batches)], batch['inputs']
            if name.startswith('timm'):
                expected = plain(raw, True)['inputs'][..., :32, :32]
                if not torch.allclose(images[..., :32, :32], expected, atol=1e-4):
                    print(f'{work.name}, batch {index}: {name} does not equal stock')
            elif not torch.equal(images, stock(raw, True)['inputs']):
                raise AssertionError(f'{work.name}, batch {index}: {name} does not equal stock')
        end()


def compare(
    work: Work,
    device: torch.device,
    trainer: Trainer,
    begun: dict[str, Callable],
    count: int,
    rounds: int,
    seconds: float,
) -> None:
    """Print the lines of one kind of work.

    Args:
        work (Work): What is trained on.
        device (torch.device): Where.
        trainer (Trainer): Trains on it.
        begun (dict): The contenders.
        count (int): Batches of an epoch.
        rounds (int): Epochs of each contender, which take turns.
        seconds (float): After so long no further round is begun.
    """
    names = [STEP_ALONE, *begun]
    took: dict[str, list[float]] = {name: [] for name in names}
    peak = dict.fromkeys(names, 0.0)
    start = time.perf_counter()
    # Algorithms are chosen by trying them, for which most memory is needed.
    trainer.epoch(*begin_epoch(STEP_ALONE, work, begun, 2))
    for turn in range(rounds + 1):
        if turn > 1 and time.perf_counter() - start > seconds:
            break
        for name in names:
            # The first turn pays for compilation and allocation. The garbage of others is not
            # counted in it; what is allocated anew for that would be counted in later ones.
            if not turn:
                collect_garbage(device)
            steps = trainer.epoch(*begin_epoch(name, work, begun, count))
            if turn:
                took[name] += steps[min(SETTLED, count - 1) :]
            elif device.type == 'cuda':
                peak[name] = torch.cuda.max_memory_allocated(device) / 2**30
    medians = {name: statistics.median(each) for name, each in took.items()}
    print(f'\n{work.name}; {trainer.mode}: {MODES[trainer.mode]}')
    row = '  {:<14} {:>10} {:>10} {:>12} {:>10}'
    print(row.format('', 'ms', 'x stock', 'x step alone', 'peak GiB'))
    for name, median in medians.items():
        against = f'{median / medians["stock"]:.3f}', f'{median / medians[STEP_ALONE]:.3f}'
        print(row.format(name, f'{median:.2f}', *against, f'{peak[name]:.2f}'), flush=True)


def begin_epoch(name: str, work: Work, begun: dict[str, Callable], count: int) -> Any:
    """The batches of an epoch, and what ends it."""
    if name != STEP_ALONE:
        return begun[name](Source(work.batches, count))
    ready = next(begun['stock'](Source(work.batches, 1))[0])
    return (dict(ready) for _ in range(count)), nothing


def collect_garbage(device: torch.device) -> None:
    """Let go of memory that nobody uses, and begin to measure the most that is used."""
    gc.collect()
    if device.type == 'cuda':
        synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables.

    Args:
        arguments (Sequence[str], optional): Command line. Defaults to the process's own.

    Returns:
        int: Exit status: 2 without the device.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument('--device', default='cuda', help='cuda, or cpu to try the tool itself')
    parser.add_argument('--small', action='store_true', help='small images and few batches')
    parser.add_argument('--no-amp', action='store_true', help='float32 and contiguous memory')
    parser.add_argument('--batches', type=int, default=10, help='batches of an epoch')
    parser.add_argument('--rounds', type=int, default=3, help='epochs of each contender')
    parser.add_argument('--seconds', type=float, default=8, help='time for each table, about')
    args = parser.parse_args(arguments)
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        print(f'--device {args.device}: torch {torch.__version__} finds no CUDA device here')
        return 2
    device = torch.device(args.device)
    cuda = device.type == 'cuda'
    count, rounds = (3, 1) if args.small else (args.batches, args.rounds)
    kind = torch.cuda.get_device_name(device) if cuda else 'CPU'
    precision = 'float32' if args.no_amp else 'bfloat16 autocast, channels_last'
    print(f'device: {kind}; torch {torch.__version__}; {precision} but for fp16')
    print(
        f'milliseconds of a step, medians of up to {rounds} epochs of {count} batches, in turn, '
        'without the first steps of each'
    )
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    lists = classification(device, args.small, stacked=False)
    boxes = detection(device, args.small)
    tiny = launch_bound(device, args.small)
    pinned = classification(device, args.small, stacked=True)
    modes = tuple(MODES) if cuda else ('plain', 'clip_grad')  # a CPU knows no float16 here
    for work, modes_of_it, contenders_of in (
        (lists, modes, contenders),
        (pinned, ('plain', 'clip_grad'), contenders),
        (boxes, modes, contenders),
        (tiny, ('plain',), thread_on_and_off),
    ):
        begun = contenders_of(work, device)
        check_equal(work, device, begun)
        for mode in modes_of_it:
            # The tiny kernels are those of float32: autocast would launch more.
            trainer = Trainer(work, device, not args.no_amp and work is not tiny, mode)
            compare(work, device, trainer, begun, count, rounds, args.seconds)
            del trainer
        work.model.cpu()
    return 0


if __name__ == '__main__':
    sys.exit(main())
