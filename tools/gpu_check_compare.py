# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Compare mmengine's loop, a loader after timm's manner, and mmprefetch on one device.

Batches lie ready in host memory, so what is compared is how they reach the model. A step ends
with reading the loss, as mmengine's hooks do at each iteration.
"""

import argparse
import contextlib
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from gpu_check_models import BoxModel, resnet50
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.structures import BaseDataElement, InstanceData
from torch import Tensor, nn

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.lookahead import LookAheadLoader
from mmprefetch.ops import normalize_batch

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
BANDWIDTH_BOUND = 0.8


class Work(NamedTuple):
    """What is trained on.

    Attributes:
        name: For the table.
        batches: Batches in host memory, as a collate function makes them.
        model: Takes normalised images and data samples on the device, returns a loss.
        divisor: ``pad_size_divisor``.
    """

    name: str
    batches: list[dict]
    model: nn.Module
    divisor: int


class Source:
    """A dataloader whose batches lie ready.

    Args:
        batches (list): They are handed out over and over.
        length (int): How many an epoch has.
    """

    num_workers = 1  # as for a dataloader with worker processes, a thread may read it

    def __init__(self, batches: list[dict], length: int) -> None:
        self.batches, self.length = batches, length

    def __iter__(self) -> Iterator[dict]:
        for index in range(self.length):
            yield dict(self.batches[index % len(self.batches)])


# -- the work ----------------------------------------------------------------------------------


def noise(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def classification(device: torch.device, small: bool, stacked: bool) -> Work:
    """ResNet-50 on uint8 images, as a list of pageable images or as one pinned tensor."""
    count, side, classes = (4, 32, 10) if small else (256, 224, 1000)
    batches = []
    for _ in range(2):
        images: Any = noise(count, 3, side, side)
        if stacked:
            images = images.pin_memory() if device.type == 'cuda' else images
        else:
            images = list(images)
        samples = [BaseDataElement(label=torch.tensor(index % classes)) for index in range(count)]
        batches.append(dict(inputs=images, data_samples=samples))
    kind = 'one pinned tensor' if stacked else 'list of images'
    name = f'ResNet-50, {count} x (3, {side}, {side}), {kind}'
    return Work(name, batches, resnet50(classes), 1)


def detection(device: torch.device, small: bool) -> Work:
    """A small model on two images, each with boxes, labels and masks of its size."""
    sizes, boxes = ([(48, 64), (40, 60)], 5) if small else ([(800, 1333), (768, 1280)], 100)
    batches = []
    for _ in range(2):
        samples = []
        for size in sizes:
            sample = BaseDataElement(metainfo=dict(img_shape=size))
            sample.gt_instances = InstanceData(
                bboxes=torch.rand(boxes, 4),
                labels=torch.arange(boxes) % 80,
                masks=noise(boxes, *size) > 200,
            )
            samples.append(sample)
        batches.append(dict(inputs=[noise(3, *size) for size in sizes], data_samples=samples))
    return Work(f'two images, {boxes} boxes and masks each', batches, BoxModel(), 32)


# -- the contenders ----------------------------------------------------------------------------


def timm_style(source: Iterable, device: torch.device, divisor: int) -> Iterator[dict]:
    """Copy and normalise the next batch on a side stream, then hand out the one before it."""
    cuda = device.type == 'cuda'
    mover = BaseDataPreprocessor(non_blocking=True)
    mover._device = device
    shape = (1, 3, 1, 1)
    mean = torch.tensor(MEAN, device=device).view(shape)
    std = torch.tensor(STD, device=device).view(shape)
    side = torch.cuda.Stream(device) if cuda else None

    def on_side() -> contextlib.AbstractContextManager:
        return torch.cuda.stream(side) if cuda else contextlib.nullcontext()

    ready = None
    for batch in source:
        with on_side():
            moved = mover.cast_data(batch)
            images = moved['inputs']
            if isinstance(images, list):
                images = stack(images, divisor)
            moved['inputs'] = images.float().sub_(mean).div_(std)
        if ready is not None:
            yield ready
        if cuda:
            torch.cuda.current_stream(device).wait_stream(side)
        ready = moved
    if ready is not None:
        yield ready


def stack(images: Sequence[Tensor], divisor: int) -> Tensor:
    """Pad images below and to the right to one size, and stack them."""
    height, width = (
        -(-max(image.shape[axis] for image in images) // divisor) * divisor for axis in (1, 2)
    )
    pads = [(0, width - image.shape[2], 0, height - image.shape[1]) for image in images]
    return torch.stack(
        [
            nn.functional.pad(image, pad) if any(pad) else image
            for image, pad in zip(images, pads, strict=True)
        ]
    )


def fields_of(work: Work) -> dict:
    return dict(mean=MEAN, std=STD, pad_size_divisor=work.divisor)


def contenders(work: Work, device: torch.device) -> dict[str, Callable]:
    """Name -> function that begins an epoch over a source: an iterator of prepared batches, and
    what to call when a step has been launched."""
    fields = fields_of(work) | dict(bgr_to_rgb=True)
    stock = ImgDataPreprocessor(**fields).to(device)
    ahead = PrefetchDataPreprocessor(**fields).to(device)

    def begin_stock(source: Iterable) -> tuple[Iterator, Callable]:
        return (stock(batch, True) for batch in source), no_more

    def begin_timm(source: Iterable) -> tuple[Iterator, Callable]:
        return timm_style(source, device, work.divisor), no_more

    def begin_ahead(source: Iterable) -> tuple[Iterator, Callable]:
        loader = LookAheadLoader(source, ahead, 'train', 2)
        return (ahead(batch, True) for batch in loader), loader.fill

    return {'stock': begin_stock, 'timm-style': begin_timm, 'mmprefetch': begin_ahead}


def no_more() -> None:
    """Nothing is begun after a step."""


class Trainer:
    """Trains a model on prepared batches.

    Args:
        work (Work): Its model is moved to the device.
        device (torch.device): Where.
        amp (bool): Whether to compute in bfloat16 and channels_last.
    """

    def __init__(self, work: Work, device: torch.device, amp: bool) -> None:
        layout = torch.channels_last if amp else torch.contiguous_format
        self.model = work.model.to(device, memory_format=layout).train()
        self.layout, self.device, self.amp = layout, device, amp
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, batch: dict) -> Tensor:
        images = batch['inputs'].contiguous(memory_format=self.layout)
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.amp):
            loss = self.model(images, batch['data_samples'])
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss

    def epoch(self, batches: Iterator[dict], after_step: Callable, count: int) -> float:
        """Train on a number of batches; returns milliseconds for each."""
        synchronize(self.device)
        start = time.perf_counter()
        for batch in batches:
            loss = self.step(batch)
            del batch
            after_step()
            loss.item()
        synchronize(self.device)
        return (time.perf_counter() - start) / count * 1e3


def synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)


def check_equal(work: Work, device: torch.device) -> None:
    """mmprefetch prepares what stock does, to the bit. The loader after timm's manner does not
    change the order of channels, and pads with another value: it is compared inside."""
    sources = contenders(work, device)
    plain = ImgDataPreprocessor(**fields_of(work)).to(device)
    sources['plain'] = lambda source: ((plain(batch, True) for batch in source), no_more)
    images = {
        name: [batch['inputs'].clone() for batch in begin(Source(work.batches, 2))[0]]
        for name, begin in sources.items()
    }
    for stock, ours in zip(images['stock'], images['mmprefetch'], strict=True):
        if not torch.equal(stock, ours):
            raise AssertionError(f'{work.name}: mmprefetch does not equal stock')
    for timm, expected in zip(images['timm-style'], images['plain'], strict=True):
        inside = (..., slice(0, 32), slice(0, 32))
        torch.testing.assert_close(timm[inside], expected[inside])


def compare(work: Work, device: torch.device, amp: bool, count: int, rounds: int) -> None:
    """Print the lines of one kind of work.

    Args:
        work (Work): What is trained on.
        device (torch.device): Where.
        amp (bool): Whether to compute in bfloat16 and channels_last.
        count (int): Batches of an epoch.
        rounds (int): Epochs of each contender, which take turns.
    """
    check_equal(work, device)
    trainer = Trainer(work, device, amp)
    ready = next(contenders(work, device)['stock'](Source(work.batches, 1))[0])
    sources = contenders(work, device)
    names = ['step alone', *sources]
    took: dict[str, list[float]] = {name: [] for name in names}
    peak = dict.fromkeys(names, 0.0)
    for turn in range(rounds + 1):
        for name in names:
            if device.type == 'cuda':
                torch.cuda.reset_peak_memory_stats(device)
            if name == 'step alone':
                batches, after_step = (dict(ready) for _ in range(count)), no_more
            else:
                batches, after_step = sources[name](Source(work.batches, count))
            milliseconds = trainer.epoch(batches, after_step, count)
            if turn:  # the first pays for compilation and allocation
                took[name].append(milliseconds)
            if device.type == 'cuda':
                peak[name] = torch.cuda.max_memory_allocated(device) / 2**30
    medians = {name: statistics.median(each) for name, each in took.items()}
    print(f'\n{work.name}')
    row = '  {:<12} {:>10} {:>10} {:>12} {:>10}'
    print(row.format('', 'ms', 'x stock', 'x step alone', 'peak GiB'))
    for name, median in medians.items():
        against = f'{median / medians["stock"]:.3f}', f'{median / medians["step alone"]:.3f}'
        print(row.format(name, f'{median:.2f}', *against, f'{peak[name]:.2f}'), flush=True)


# -- bandwidth ---------------------------------------------------------------------------------


def seconds_of(function: Callable, device: torch.device, calls: int) -> float:
    """Median seconds of a call, of five turns of several calls each."""
    turns = []
    for _ in range(6):
        synchronize(device)
        start = time.perf_counter()
        for _ in range(calls):
            function()
        synchronize(device)
        turns.append((time.perf_counter() - start) / calls)
    return statistics.median(turns[1:])


def bandwidth(device: torch.device, small: bool) -> bool:
    """Print the fused pass's bandwidth beside that of a copy.

    Args:
        device (torch.device): Where.
        small (bool): Whether to take a small batch.

    Returns:
        bool: Whether the bound is met.
    """
    shape = (4, 3, 32, 32) if small else (256, 3, 224, 224)
    images = noise(*shape).to(device)
    mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
    out, other = torch.empty(2, *shape, device=device)
    calls = 2 if small else 50
    copied = seconds_of(lambda: out.copy_(other), device, calls)
    copy_rate = 2 * out.nbytes / copied / 1e9
    print(
        f'\nfused pass, {shape[0]} x {shape[1:]} uint8 to float32; bound: {BANDWIDTH_BOUND} x copy'
    )
    print(f'  {"copy":<24} {copied * 1e3:>9.3f} ms {copy_rate:>9.1f} GB/s')
    met = True
    for name, batch in (('one tensor', images), ('list of images', list(images))):
        took = seconds_of(
            lambda each=batch: normalize_batch(each, mean, std, out=out), device, calls
        )
        rate = (images.nbytes + out.nbytes) / took / 1e9
        # The host describes a list image by image, which takes longer than the kernel runs.
        bound = name == 'one tensor'
        met = met and (rate >= BANDWIDTH_BOUND * copy_rate or not bound)
        mark = 'BELOW' if bound and rate < BANDWIDTH_BOUND * copy_rate else ''
        ratio = f'{rate / copy_rate:.2f} x copy {mark}'
        print(f'  {name:<24} {took * 1e3:>9.3f} ms {rate:>9.1f} GB/s   {ratio}', flush=True)
    return met


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the tables.

    Args:
        arguments (Sequence[str], optional): Command line. Defaults to the process's own.

    Returns:
        int: Exit status: 1 when the bandwidth is below its bound, 2 without the device.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--device', default='cuda', help='cuda, or cpu to try the tool itself')
    parser.add_argument('--small', action='store_true', help='small images and few batches')
    parser.add_argument('--no-amp', action='store_true', help='float32 and contiguous memory')
    parser.add_argument('--batches', type=int, default=12, help='batches of an epoch')
    parser.add_argument('--rounds', type=int, default=3, help='epochs of each contender')
    args = parser.parse_args(arguments)
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        print(f'--device {args.device}: torch {torch.__version__} finds no CUDA device here')
        return 2
    device = torch.device(args.device)
    count, rounds = (2, 1) if args.small else (args.batches, args.rounds)
    kind = torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'
    precision = 'float32' if args.no_amp else 'bfloat16 autocast, channels_last'
    print(f'device: {kind}; torch {torch.__version__}; {precision}')
    print(f'milliseconds of an iteration, medians of {rounds} epochs of {count} batches, in turn')
    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    for work in (
        classification(device, args.small, stacked=False),
        classification(device, args.small, stacked=True),
        detection(device, args.small),
    ):
        compare(work, device, not args.no_amp, count, rounds)
    met = bandwidth(device, args.small)
    return 0 if met or device.type != 'cuda' else 1


if __name__ == '__main__':
    sys.exit(main())
