# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass on CPU: blocks that stay in cache, few calls, recycled memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from .memory import HostMemory
from .plan import Plan

# Values that one thread works on at once. The float32 scratch for them stays in the caches; much
# smaller blocks cost more in calls than they save.
_BLOCK = 1 << 20
# More threads than this don't make blocks larger: they share the last cache.
_MOST_THREADS = 4

# Images of fewer values are gathered while they are integers: one more copy of them costs less than
# a call for each.
_SMALL = 1 << 15

_memory = HostMemory()


def normalize(plan: Plan) -> Tensor:
    """Do a batch block by block, each block of pixels written once.

    Args:
        plan: The checked batch; the images are on CPU.

    Returns:
        The batch.
    """
    out = plan.out
    if out is None:
        out = _memory.empty(plan.shape, torch.float32)
    with torch.no_grad():
        if len(plan.shape) == 4:
            _fill(plan, plan.images, plan.shapes, out)
        else:
            for frame in range(plan.shape[2]):
                _fill_frame(plan, frame, out[:, :, frame])
    return out


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
    order = plan.order
    block = _BLOCK * min(torch.get_num_threads(), _MOST_THREADS)
    scratch = _Scratch(plan, block)
    full = tuple(out.shape[-2:])
    for start, stop in _groups(shapes, plan, block):
        if plan.orders is not None:
            order = plan.orders[start]
        height, width = shapes[start][-2:]
        target = out[start:stop]
        if plan.padded and (height, width) != full:
            target[:, :, :, width:] = plan.pad_value
            target[:, :, height:, :width] = plan.pad_value
            target = target[:, :, :height, :width]
        group = scratch.gather(images[start:stop], shapes[start])
        mean, std = _constants(plan.mean, start, stop), _constants(plan.std, start, stop)
        rows = max(block // ((stop - start) * plan.shape[1] * width), 1)
        for row in range(0, height, rows):
            part = target[:, :, row : row + rows]
            if mean is None and order is None:
                _copy(group, row, part)
                continue
            values = scratch.like(part)
            _copy(group, row, values)
            _normalize(values, mean, std, order, part)


def _copy(group: Tensor | Sequence[Tensor], row: int, out: Tensor) -> None:
    """Copy rows of a group of (C, H, W) images, from one on; ``out``: (G, C, h, W)."""
    stop = row + out.shape[2]
    if isinstance(group, Tensor):
        out.copy_(group[:, :, row:stop])
    else:
        for image, place in zip(group, out.unbind(), strict=True):
            place.copy_(image[:, row:stop])


def _normalize(
    values: Tensor,
    mean: Tensor | None,
    std: Tensor | None,
    order: tuple[int, ...] | None,
    out: Tensor,
) -> None:
    """Write ``(values - mean) / std`` to ``out``, both (G, C, h, W); changes the values."""
    if order is None:
        planes = [(values, mean, std, out)]
    else:
        channels, none = values.unbind(1), [None] * len(order)
        planes = zip(
            [channels[channel] for channel in order],
            none if mean is None else mean.unbind(1),
            none if std is None else std.unbind(1),
            out.unbind(1),
            strict=True,
        )
    for plane, subtracted, divisor, target in planes:
        if subtracted is None:
            target.copy_(plane)
        else:
            # Division writes the result's memory: it waits for the divider anyway, and so hides
            # the stores that leave the cache.
            torch.div(plane.sub_(subtracted), divisor, out=target)


def _groups(shapes: Sequence[tuple], plan: Plan, block: int) -> Iterator[tuple[int, int]]:
    """Runs of neighbours of one size and order that are done together, as (start, stop)."""
    start = 0
    while start < len(shapes):
        shape = shapes[start]
        limit = min(start + max(block // prod(shape), 1), len(shapes))
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


def _constants(values: Tensor | None, start: int, stop: int) -> Tensor | None:
    """The rows of mean or std of a run of samples, to broadcast against (G, C, H, W) pixels."""
    return None if values is None else _rows(values, start, stop)[..., None, None]


class _Scratch:
    """Memory for one group of images and for one block, viewed in the shapes that are needed."""

    def __init__(self, plan: Plan, block: int) -> None:
        row = plan.shape[1] * plan.shape[-1]
        values = min(max(block, row), plan.shape[0] * row * plan.shape[-2])
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

    def gather(self, images: Tensor | Sequence[Tensor], shape: tuple) -> Tensor | Sequence[Tensor]:
        """A group of images of one shape, as one (G, C, H, W) tensor where that saves time."""
        if isinstance(images, Tensor):
            return images
        if len(images) == 1:
            return images[0].unsqueeze(0)
        # Several threads would each write a part of every image, and later read all of some.
        if prod(shape) >= _SMALL and torch.get_num_threads() == 1:
            return images
        full = (len(images), *shape)
        if self._stack is None or self._stack.shape != full:
            self._stack = _memory.empty(full, images[0].dtype)
        return torch.stack(tuple(images), out=self._stack)
