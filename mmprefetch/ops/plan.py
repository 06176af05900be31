# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What a batch must be like before the fused pass, and the plan made of it."""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

_address, _is_contiguous = Tensor.data_ptr, Tensor.is_contiguous
_dtype, _device, _shape = attrgetter('dtype'), attrgetter('device'), attrgetter('shape')
_is_cpu = attrgetter('is_cpu')


class Plan(NamedTuple):
    """A checked batch, as every implementation of the fused pass takes it.

    Attributes:
        images: The images as given.
        shapes: (C, H, W) or (C, T, H, W) of each.
        mean: float32, (1, C) for the whole batch or (N, C) for each sample; None: don't normalise.
        std: Of the same shape.
        order: Input channel of each output channel; None: as they are, or ``orders`` says.
        orders: The same for each sample, where samples differ; else None.
        pad_value: Value of the padding.
        shape: Shape of the result.
        padded: Whether any sample is smaller than the result.
        uniform: Whether all samples are of one size.
        out: The caller's result tensor, or None.
    """

    images: Tensor | Sequence[Tensor]
    shapes: list[torch.Size]
    mean: Tensor | None
    std: Tensor | None
    order: tuple[int, ...] | None
    orders: list[tuple[int, ...]] | None
    pad_value: float
    shape: tuple[int, ...]
    padded: bool
    uniform: bool
    out: Tensor | None


def reversal(channels: int) -> tuple[int, ...] | None:
    """Channel order that swaps BGR and RGB.

    Args:
        channels: Number of channels of the images.

    Returns:
        The order that swaps channels 0 and 2 and keeps every other; None below 3 channels.
    """
    return (2, 1, 0, *range(3, channels)) if channels >= 3 else None


def identity_of(channels: int) -> tuple[int, ...]:
    """Channel order that changes nothing.

    Args:
        channels: Number of channels of the images.

    Returns:
        The order.
    """
    return tuple(range(channels))


def strides_of(stride: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of C, T, H, W of one image or video, of which an image has no T.

    Args:
        stride: Of a (C, H, W) or (C, T, H, W) tensor.

    Returns:
        Four of them.
    """
    return stride if len(stride) == 4 else (stride[0], 0, *stride[1:])


def table_of(plan: Plan) -> np.ndarray:
    """Where the images of a batch are, for implementations that read their memory.

    Args:
        plan: The checked batch.

    Returns:
        int64 array with a row for each image, or one row where they lie at one distance from each
        other in one tensor: address, distance, T, H, W, and the strides of C, T, H, W. All but the
        address is counted in values.
    """
    images = plan.images
    if isinstance(images, Tensor):
        return np.array([_row(images.data_ptr(), images.stride(0), plan.shapes[0], images[0])])
    if plan.uniform and all(map(_is_contiguous, images)):
        table = np.empty((len(images), 9), np.int64)
        table[:] = _row(0, 0, plan.shapes[0], images[0])
        table[:, 0] = list(map(_address, images))
        return table
    return np.array(
        [_row(image.data_ptr(), 0, image.shape, image) for image in images], dtype=np.int64
    )


def _row(address: int, distance: int, shape: tuple[int, ...], image: Tensor) -> tuple[int, ...]:
    frames = shape[1] if len(shape) == 4 else 1
    return (address, distance, frames, *shape[-2:], *strides_of(image.stride()))


def plan_batch(
    images: Tensor | Sequence[Tensor],
    mean: Tensor | None = None,
    std: Tensor | None = None,
    channel_order: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
    size_divisor: int = 1,
    size: tuple[int, int] | None = None,
    pad_value: float = 0,
    out: Tensor | None = None,
) -> Plan:
    """Check the arguments of :func:`mmprefetch.ops.normalize_batch` and bring them into one form.

    Raises:
        ValueError: See :func:`mmprefetch.ops.normalize_batch`.
    """
    if isinstance(images, Tensor):
        if images.dim() not in (4, 5) or not images.shape[0]:
            raise ValueError(
                f'images: a tensor of shape {tuple(images.shape)}; write a non-empty '
                '(N, C, H, W) or (N, C, T, H, W) tensor'
            )
        first = images
        shapes = [images.shape[1:]] * images.shape[0]
        distinct = {shapes[0]}
    else:
        if not len(images):
            raise ValueError('images: an empty sequence; write at least one (C, H, W) tensor')
        if not all(issubclass(kind, Tensor) for kind in set(map(type, images))):
            index = next(i for i, image in enumerate(images) if not isinstance(image, Tensor))
            raise ValueError(
                f'images: sample {index} is a {type(images[index]).__name__}; write tensors, for '
                'an array `torch.from_numpy(array)`'
            )
        first = images[0]
        shapes = list(map(_shape, images))
        distinct = set(shapes)
        _check_alike(images, shapes, distinct)
    if any(0 in shape for shape in distinct):
        index = next(i for i, shape in enumerate(shapes) if 0 in shape)
        raise ValueError(
            f'images: sample {index} has shape {tuple(shapes[index])}, which has no pixels; '
            'leave out empty images in the dataset'
        )
    count, channels = len(shapes), shapes[0][0]
    order, orders = _orders(channel_order, count, channels)
    if (mean is None) != (std is None):
        given, missing = ('std', 'mean') if mean is None else ('mean', 'std')
        raise ValueError(f'{missing}: None beside a {given}; write both or neither')
    if mean is not None:
        mean = _per_channel('mean', mean, count, channels, first.device)
        std = _per_channel('std', std, count, channels, first.device)
        if mean.shape != std.shape:
            mean, std = torch.broadcast_tensors(mean, std)
    extent = _extent(shapes, distinct, size_divisor, size, isinstance(images, Tensor))
    shape = (count, channels, *extent)
    if out is not None:
        _check_out(out, shape, first.device, images)
    return Plan(
        images=images,
        shapes=shapes,
        mean=mean,
        std=std,
        order=order,
        orders=orders,
        pad_value=pad_value,
        shape=shape,
        padded=any(item[1:] != extent for item in distinct),
        uniform=len(distinct) == 1,
        out=out,
    )


def _check_out(
    out: Tensor, shape: tuple[int, ...], device: torch.device, images: Tensor | Sequence[Tensor]
) -> None:
    """Check that each element of ``out`` has memory of its own, apart from the images."""
    if (out.shape, out.dtype, out.device) != (shape, torch.float32, device):
        raise ValueError(
            f'out: a {out.dtype} tensor of shape {tuple(out.shape)} on {out.device}; write a '
            f'torch.float32 tensor of shape {shape} on {device}'
        )
    if any(step == 0 < size - 1 for step, size in zip(out.stride(), out.shape, strict=True)):
        raise ValueError(
            f'out: strides {out.stride()}, by which elements share memory; write a tensor of its '
            'own memory'
        )
    storage = out.untyped_storage().data_ptr()
    given = [images] if isinstance(images, Tensor) else images
    for index, image in enumerate(given):
        if image.untyped_storage().data_ptr() == storage and storage:
            raise ValueError(
                f'out: shares its memory with images (sample {index}); write a tensor of its own'
            )


def _check_alike(
    images: Sequence[Tensor], shapes: list[torch.Size], distinct: set[torch.Size]
) -> None:
    """Check that all items have one dtype, device, number of dimensions and of channels."""
    if len(shapes[0]) not in (3, 4):
        raise ValueError(
            f'images: sample 0 has shape {tuple(shapes[0])}; write (C, H, W) or (C, T, H, W)'
        )
    columns = {'dtype': list(map(_dtype, images))}
    if not all(map(_is_cpu, images)):  # which is faster to ask for than the device
        columns['device'] = list(map(_device, images))
    if len(distinct) > 1:
        columns['number of dimensions'] = list(map(len, shapes))
        columns['number of channels'] = [shape[0] for shape in shapes]
    for key, values in columns.items():
        # A batch is nearly always alike: one comparison in C, and the search only for the error.
        if values.count(values[0]) != len(values):
            index = next(i for i, value in enumerate(values) if value != values[0])
            raise ValueError(
                f'images: sample {index} has {key} {values[index]} but sample 0 has {values[0]} '
                f'(shapes {tuple(shapes[index])} and {tuple(shapes[0])}); bring all images of a '
                f"batch to one {key} in the dataset's pipeline"
            )


def _orders(
    channel_order: Sequence[int] | Sequence[Sequence[int] | None] | None, count: int, channels: int
) -> tuple[tuple[int, ...] | None, list[tuple[int, ...]] | None]:
    """The order of the whole batch, or those of the samples where they differ."""
    if channel_order is None or all(isinstance(channel, int) for channel in channel_order):
        return _order(channel_order, channels), None
    if len(channel_order) != count:
        raise ValueError(
            f'channel_order: orders for {len(channel_order)} samples but the batch has {count}; '
            f'write {count} of them, or one for the whole batch'
        )
    orders = [_order(order, channels) for order in channel_order]
    if all(order == orders[0] for order in orders):
        return orders[0], None
    identity = tuple(range(channels))
    return None, [order or identity for order in orders]


def _order(channel_order: Sequence[int] | None, channels: int) -> tuple[int, ...] | None:
    if channel_order is None:
        return None
    order, identity = tuple(channel_order), tuple(range(channels))
    if tuple(sorted(order)) != identity:
        raise ValueError(
            f'channel_order: {order} for images of {channels} channels; write each of '
            f'{identity} once'
        )
    return None if order == identity else order


def _per_channel(
    key: str, values: Tensor, count: int, channels: int, device: torch.device
) -> Tensor:
    """Bring mean or std to float32 of shape (1, C) or (N, C); a view wherever possible."""
    if values.device != device:
        raise ValueError(
            f'{key}: on {values.device} but the images are on {device}; move the constants once, '
            'when the preprocessor is moved'
        )
    shape = values.shape
    if len(shape) == 1 or (len(shape) == 3 and shape[1:].numel() == 1):
        rows = None
    elif len(shape) == 2:
        rows = shape[0]
    else:
        raise ValueError(
            f'{key}: shape {tuple(shape)}; write (C,) or (C, 1, 1) for the whole batch or (N, C) '
            'for each sample'
        )
    if rows not in (None, count):
        raise ValueError(
            f'{key}: values for {rows} samples but the batch has {count}; write ({count}, '
            f'{channels}) values, or ({channels},) for the whole batch'
        )
    given = shape[0] if rows is None else shape[1]
    if given not in (1, channels):
        raise ValueError(
            f'{key}: {given} values for images of {channels} channels (sample 0); write '
            f'{"1 value" if channels == 1 else f"1 or {channels} values"}'
        )
    values = values.reshape(rows or 1, given).float()
    return values if given == channels else values.expand(-1, channels)


def _extent(
    shapes: list[torch.Size],
    distinct: set[torch.Size],
    divisor: int,
    size: tuple[int, int] | None,
    stacked: bool,
) -> tuple[int, ...]:
    """Size of the result without N and C: (H, W) or (T, H, W)."""
    if isinstance(divisor, str) or divisor != int(divisor) or divisor < 1:
        raise ValueError(f'size_divisor: {divisor!r}; write a whole number of at least 1')
    divisor = int(divisor)
    largest = tuple(map(max, zip(*(shape[1:] for shape in distinct), strict=True)))
    if size is None:
        rounded = tuple(-(-extent // divisor) * divisor for extent in largest)
        # A tensor of videos is padded in H and W alone, a sequence of them in T, too: mmengine's
        # `stack_batch` takes every dimension but the first as spatial.
        return largest[:-2] + rounded[-2:] if stacked else rounded
    if divisor != 1:
        raise ValueError(
            f'size and size_divisor: {tuple(size)} and {divisor}; write one of the two'
        )
    target = (*largest[:-2], max(size[0], largest[-2]), max(size[1], largest[-1]))
    if len(distinct) > 1:
        for index, shape in enumerate(shapes):
            own = (max(size[0], shape[-2]), max(size[1], shape[-1]))
            if own != target[-2:]:
                over = next(i for i, s in enumerate(shapes) if s[-2] > size[0] or s[-1] > size[1])
                raise ValueError(
                    f'size: {tuple(size)} but sample {over} is {tuple(shapes[over][-2:])} and '
                    f'sample {index} is {tuple(shape[-2:])}; write a size that holds every '
                    'image, or a size_divisor'
                )
    return target
