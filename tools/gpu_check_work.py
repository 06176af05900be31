# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What the GPU checks train on, the ways in which batches reach the model, and the training."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from gpu_check_models import BoxModel, ManyKernels, resnet50
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.structures import BaseDataElement, InstanceData
from torch import Tensor, nn

from mmprefetch import PrefetchDataPreprocessor, look_ahead

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


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


def labelled(count: int, classes: int) -> list[BaseDataElement]:
    return [BaseDataElement(label=torch.tensor(index % classes)) for index in range(count)]


def classification(device: torch.device, small: bool, stacked: bool) -> Work:
    """ResNet-50 on uint8 images, as a list of pageable images or as one pinned tensor."""
    count, side, classes = (4, 32, 10) if small else (128, 224, 1000)
    batches = []
    for _ in range(2):
        images: Any = noise(count, 3, side, side)
        if stacked:
            images = images.pin_memory() if device.type == 'cuda' else images
        else:
            images = list(images)
        batches.append(dict(inputs=images, data_samples=labelled(count, classes)))
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


def launch_bound(device: torch.device, small: bool) -> Work:
    """A model of many tiny kernels: the host launches them for longer than they run."""
    count, layers = (4, 5) if small else (64, 300)
    batches = [
        dict(inputs=list(noise(count, 3, 64, 64)), data_samples=labelled(count, 10))
        for _ in range(2)
    ]
    return Work(f'{layers} layers of tiny kernels, {count} images', batches, ManyKernels(layers), 1)


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


def timm_itself(source: Iterable, device: torch.device) -> Iterator[dict]:
    """timm's own loader, which takes pairs of one tensor of images and one of labels."""
    from timm.data.loader import PrefetchLoader

    pairs = [
        (batch['inputs'], torch.stack([sample.label for sample in batch['data_samples']]))
        for batch in source
    ]
    mean, std = (tuple(value / 255 for value in values) for values in (MEAN, STD))
    for images, labels in PrefetchLoader(pairs, mean, std, device=device):
        yield dict(inputs=images, data_samples=labels)


def has_timm() -> bool:
    """Whether timm's own loader can be imported."""
    try:
        from timm.data.loader import PrefetchLoader  # noqa: F401
    except Exception as error:  # it imports far more than its loader
        print(f"timm's own loader is left out: {error!r}")
        return False
    return True


def fields_of(work: Work) -> dict:
    return dict(mean=MEAN, std=STD, pad_size_divisor=work.divisor)


def contenders(work: Work, device: torch.device) -> dict[str, Callable]:
    """Name -> function that begins an epoch over a source: an iterator of prepared batches, and
    what ends it."""
    fields = fields_of(work) | dict(bgr_to_rgb=True)
    stock = ImgDataPreprocessor(**fields).to(device)

    def begin_stock(source: Iterable) -> tuple[Iterator, Callable]:
        return (stock(batch, True) for batch in source), nothing

    def begin_style(source: Iterable) -> tuple[Iterator, Callable]:
        return timm_style(source, device, work.divisor), nothing

    def begin_timm(source: Iterable) -> tuple[Iterator, Callable]:
        return timm_itself(source, device), nothing

    found = {'stock': begin_stock, 'timm-style': begin_style}
    if isinstance(work.batches[0]['inputs'], Tensor) and device.type == 'cuda' and has_timm():
        found['timm itself'] = begin_timm
    for depth in (1, 2):
        found[f'mmprefetch {depth}'] = looking_ahead(work, device, depth)
    return found


def thread_on_and_off(work: Work, device: torch.device) -> dict[str, Callable]:
    """The contenders where the loader thread is what is looked at."""
    return {
        'stock': contenders(work, device)['stock'],
        'no thread': looking_ahead(work, device, 2, loader_thread=False),
        'mmprefetch 1': looking_ahead(work, device, 1),
        'mmprefetch 2': looking_ahead(work, device, 2),
    }


def looking_ahead(
    work: Work, device: torch.device, depth: int, loader_thread: bool | None = None
) -> Callable:
    """What begins an epoch with look-ahead."""
    fields = fields_of(work) | dict(bgr_to_rgb=True)
    ahead = PrefetchDataPreprocessor(**fields).to(device)

    def begin(source: Iterable) -> tuple[Iterator, Callable]:
        loader = look_ahead(source, ahead, depth=depth, loader_thread=loader_thread)
        return (ahead(batch, True) for batch in loader), loader.close

    return begin


def nothing() -> None:
    """Nothing is left to be ended."""


# -- the training ------------------------------------------------------------------------------

MODES = dict(
    plain='the loss is read after the step',
    clip_grad='and the norm of the gradients before it, as clip_grad does',
    fp16='float16, scaled gradients: whether they are finite is read before the step',
)


class Trainer:
    """Trains a model on prepared batches.

    Args:
        work (Work): Its model is moved to the device.
        device (torch.device): Where.
        amp (bool): Whether to compute in bfloat16 and channels_last.
        mode (str): Of :data:`MODES`, what the host waits for.
    """

    def __init__(self, work: Work, device: torch.device, amp: bool, mode: str = 'plain') -> None:
        halves = mode == 'fp16'
        self.layout = torch.channels_last if amp or halves else torch.contiguous_format
        self.model = work.model.to(device, memory_format=self.layout).train()
        self.device, self.mode = device, mode
        self.autocast = dict(
            device_type=device.type,
            dtype=torch.float16 if halves else torch.bfloat16,
            enabled=amp or halves,
        )
        self.scaler = torch.amp.GradScaler(device.type, enabled=halves)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)

    def step(self, batch: dict) -> Tensor:
        loss = self._loss(batch)
        self.scaler.scale(loss).backward()
        if self.mode == 'clip_grad':
            float(nn.utils.clip_grad_norm_(self.model.parameters(), 35.0))
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss

    def validate(self, batch: dict) -> Tensor:
        with torch.inference_mode():
            return self._loss(batch)

    def _loss(self, batch: dict) -> Tensor:
        images = batch['inputs'].contiguous(memory_format=self.layout)
        with torch.autocast(**self.autocast):
            return self.model(images, batch['data_samples'])

    def epoch(self, batches: Iterator[dict], end: Callable) -> list[float]:
        """Train on some batches, then call ``end``; returns the milliseconds from the end of each
        step to that of the next."""
        synchronize(self.device)
        marks = [now(self.device)]
        for batch in batches:
            loss = self.step(batch)
            del batch
            loss.item()
            marks.append(now(self.device))
        synchronize(self.device)
        end()
        return [between(*pair) for pair in pairwise(marks)]


def now(device: torch.device) -> Any:
    """A mark of the time: on an accelerator, an event behind what was launched so far."""
    if device.type != 'cuda':
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def between(start: Any, end: Any) -> float:
    """Milliseconds between two marks, when the device is done with both."""
    return (end - start) * 1e3 if isinstance(start, float) else start.elapsed_time(end)


def synchronize(device: torch.device) -> None:
    if device.type == 'cuda':
        torch.cuda.synchronize(device)
