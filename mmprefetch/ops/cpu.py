# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass on CPU: blocks that stay in cache, few calls, recycled memory."""

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from .checks import Plan
from .recycle import RecycledMemory
from .reference import padding_mask

# Values of one channel that are worked on at once. The float32 scratch for them stays in a core's
# second-level cache; much smaller ones cost more in calls than they save.
_BLOCK = 1 << 18
# Images in a list of fewer pixels for each thread are stacked first: that copy then costs less than
# the calls that it saves.
_SMALL = 1 << 15

_memory = RecycledMemory()


def normalize(plan: Plan, return_mask: bool) -> tuple[Tensor, Tensor | None]:
    """Do a batch block by block, each block of pixels written once.

    Args:
        plan: The checked batch; the images are on CPU.
        return_mask: Whether the padding mask is wanted.

    Returns:
        The batch, and the (N, H, W) bool mask or None.

    Raises:
        ValueError: If a std is zero.
    """
    if plan.std is not None and not plan.std.all():
        sample, channel = (plan.std == 0).nonzero()[0].tolist()
        raise ValueError(
            f'std: 0 for channel {channel} of sample {sample}; write 1 for a channel that is not '
            'to be scaled'
        )
    out = plan.out
    if out is None:
        out = _memory.empty(plan.shape, plan.dtype, plan.memory_format)
    with torch.no_grad():
        if len(plan.shape) == 4:
            _fill(plan, plan.images, plan.shapes, out)
        else:
            for frame in range(plan.shape[2]):
                _fill_frame(plan, frame, out[:, :, frame])
        mask = padding_mask(plan, out.device) if return_mask else None
    return out, mask


def _fill_frame(plan: Plan, frame: int, out: Tensor) -> None:
    """Write one frame of a video batch; ``out``: (N, C, H, W)."""
    if isinstance(plan.images, Tensor):
        _fill(plan, plan.images[:, :, frame], [(s[0], *s[2:]) for s in plan.shapes], out)
        return
    for index, video in enumerate(plan.images):
        if frame < video.shape[1]:
            image = video[:, frame]
            one = plan._replace(
                mean=_rows(plan.mean, index, index + 1),
                std=_rows(plan.std, index, index + 1),
                orders=plan.orders and plan.orders[index : index + 1],
            )
            _fill(one, [image], [image.shape], out[index : index + 1])
        else:
            out[index].fill_(plan.pad_value)


def _fill(
    plan: Plan, images: Tensor | Sequence[Tensor], shapes: Sequence[tuple], out: Tensor
) -> None:
    """Write a batch of (C, H_i, W_i) images; ``out``: (N, C, H, W)."""
    order = plan.order or range(plan.shape[1])
    scratch = _Scratch(plan)
    full = tuple(out.shape[-2:])
    constants = None
    for start, stop in _groups(shapes, plan, isinstance(images, Tensor)):
        if plan.orders is not None:
            order = plan.orders[start]
        height, width = shapes[start][-2:]
        target = out[start:stop]
        if plan.padded and (height, width) != full:
            target[:, :, :, width:] = plan.pad_value
            target[:, :, height:, :width] = plan.pad_value
            target = target[:, :, :height, :width]
        pixels = scratch.stack(images, start, stop).unbind(1)
        planes = target.unbind(1)
        if plan.mean is None:
            for channel, plane in zip(order, planes, strict=True):
                plane.copy_(pixels[channel])
            continue
        if constants is None or plan.mean.shape[0] > 1:
            constants = (_constants(plan.mean, start, stop), _constants(plan.std, start, stop))
        rows = max(_BLOCK // ((stop - start) * width), 1)
        for channel, plane, mean, std in zip(order, planes, *constants, strict=True):
            if rows >= height:
                _normalize(pixels[channel], mean, std, scratch.like(plane), plane)
                continue
            for row in range(0, height, rows):
                block = plane[:, row : row + rows]
                part = pixels[channel][:, row : row + rows]
                _normalize(part, mean, std, scratch.like(block), block)


def _normalize(pixels: Tensor, mean: Tensor, std: Tensor, scratch: Tensor, out: Tensor) -> None:
    """Write ``(pixels.float() - mean) / std`` of one block to ``out``, by way of ``scratch``."""
    if pixels.dtype == torch.float32:
        torch.sub(pixels, mean, out=scratch)
    else:
        scratch.copy_(pixels).sub_(mean)
    # Division writes the result's memory: it waits for the divider anyway, and so hides the
    # stores that leave the cache.
    if out.dtype == torch.float32:
        torch.div(scratch, std, out=out)
    else:
        out.copy_(scratch.div_(std))


def _groups(shapes: Sequence[tuple], plan: Plan, stacked: bool) -> Iterator[tuple[int, int]]:
    """Runs of neighbours of one size and order that are done together, as (start, stop)."""
    small = _SMALL * torch.get_num_threads()
    start = 0
    while start < len(shapes):
        shape = shapes[start]
        size = shape[-2] * shape[-1]
        most = _BLOCK // size if stacked or size < small else 1
        limit = min(start + max(most, 1), len(shapes))
        stop = limit if plan.uniform and plan.orders is None else start + 1
        while (
            stop < limit
            and shapes[stop] == shape
            and (plan.orders is None or plan.orders[stop] == plan.orders[start])
        ):
            stop += 1
        yield start, stop
        start = stop


def _rows(values: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The rows of mean or std that belong to a run of samples."""
    return values if values is None or values.shape[0] == 1 else values[start:stop]


def _constants(values: Tensor, start: int, stop: int) -> tuple[Tensor, ...]:
    """For each channel what to broadcast against (G, H, W) pixels."""
    if values.shape[0] == 1:
        return values.unbind(1)
    return values[start:stop, :, None, None].unbind(1)


class _Scratch:
    """Memory for one group of images and for one block, viewed in the shapes that are needed."""

    def __init__(self, plan: Plan) -> None:
        values = min(max(_BLOCK, plan.shape[-1]), plan.shape[0] * prod(plan.shape[-2:]))
        self._block = _memory.empty((values,), torch.float32)
        self._stack: Tensor | None = None
        self._views: dict[torch.Size, Tensor] = {}

    def like(self, block: Tensor) -> Tensor:
        """float32 memory of the shape of ``block``."""
        shape = block.shape
        view = self._views.get(shape)
        if view is None:
            view = self._views[shape] = self._block[: shape.numel()].view(shape)
        return view

    def stack(self, images: Tensor | Sequence[Tensor], start: int, stop: int) -> Tensor:
        """A group of images as one (G, C, H, W) tensor."""
        if isinstance(images, Tensor):
            return images[start:stop]
        first = images[start]
        if stop - start == 1:
            return first.unsqueeze(0)
        shape = (stop - start, *first.shape)
        if self._stack is None or self._stack.shape != shape:
            self._stack = _memory.empty(shape, first.dtype)
        return torch.stack(tuple(images[start:stop]), out=self._stack)
