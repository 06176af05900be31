# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass as a Triton kernel, one launch for a whole batch, ragged or not.

Import this module only where triton is installed.
"""

from __future__ import annotations

import warnings

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from .plan import Plan, identity_of, reversal, strides_of, table_of
from .reference import normalize as reference

_DTYPES = frozenset(
    {
        *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
# What a program does: values of one plane; rows and columns of each channel.
_BLOCK, _ROWS, _COLUMNS = 2048, 16, 128
# Most programs along the second and the third axis of a grid; the first is all but endless.
_MOST = 65535
# Values in a row of the table.
_FIELDS = 9
_STEPS = ('mean_n', 'mean_c', 'std_n', 'std_c')

_failed: set[tuple] = set()


def normalize(plan: Plan) -> Tensor:
    """Do a batch on the current stream; the host waits for nothing.

    Args:
        plan: The checked batch.

    Returns:
        The batch.
    """
    first, channels = plan.images[0], plan.shape[1]
    frames = plan.shape[2] if len(plan.shape) == 5 else 1
    if first.dtype not in _DTYPES or max(channels, frames) > _MOST:
        return reference(plan)
    out = plan.out
    if out is None:
        out = torch.empty(plan.shape, dtype=torch.float32, device=first.device)
    table = table_of(plan)
    # One tensor, in one of the usual orders, is described by plain arguments, without a table.
    image = None
    if plan.orders is None and plan.order in (None, reversal(channels)):
        image = _as_one(plan, table)
    dense = first.is_contiguous() and out.is_contiguous()
    flat = image is not None and not plan.padded and dense
    variant = (first.device, first.dtype, flat, image is None, plan.mean is None)
    if variant in _failed:
        return reference(plan)
    try:
        with torch.cuda.device_of(first):
            if flat:
                _launch_flat(plan, out, image[1])
            else:
                _launch_tiles(plan, out, frames, image, table)
    except Exception as error:  # Triton, its compiler and its driver share no base class.
        _failed.add(variant)
        warnings.warn(
            f'mmprefetch: the fused kernel for {first.dtype} images cannot be used on '
            f'{first.device} ({error!r}); such batches are normalised by plain torch there, which '
            'gives the same values in more time',
            stacklevel=2,
        )
        return reference(plan)
    return out


def _launch_flat(plan: Plan, out: Tensor, distance: int) -> None:
    count, channels = plan.shape[:2]
    plane = out[0, 0].numel()
    for start in range(0, count, _MOST):
        grid = (triton.cdiv(plane, _BLOCK), min(count - start, _MOST), channels)
        _flat[grid](
            plan.images[0],
            *_constants(plan),
            out,
            start,
            distance,
            plane,
            channels,
            _swapped(plan),
            NORMALIZE=plan.mean is not None,
            BLOCK=_BLOCK,
        )


def _launch_tiles(
    plan: Plan, out: Tensor, frames: int, image: tuple[int, ...] | None, table: np.ndarray
) -> None:
    count, channels = plan.shape[:2]
    height, width = plan.shape[-2:]
    across = triton.cdiv(width, _COLUMNS)
    tiles = across * triton.cdiv(height, _ROWS)
    # An argument that the kernel does not read still has to be a tensor.
    where = plan.images[0] if image is not None else _on_device(plan, table)
    for start in range(0, count, _MOST):
        grid = (tiles, min(count - start, _MOST), frames)
        _tiles[grid](
            plan.images[0],
            where,
            *_constants(plan),
            out,
            start,
            *(image or (0,) * _FIELDS)[1:],
            out.stride(0),
            *strides_of(out.stride()[1:]),
            _swapped(plan),
            float(plan.pad_value),
            count * _FIELDS,
            channels if plan.orders else 0,
            channels,
            height,
            width,
            across,
            STACKED=image is not None,
            NORMALIZE=plan.mean is not None,
            FIELDS=_FIELDS,
            ROWS=_ROWS,
            COLUMNS=_COLUMNS,
        )


def _constants(plan: Plan) -> tuple[Tensor, Tensor, int, int, int, int]:
    """mean and std, and of each the steps to the next sample and to the next channel."""
    if plan.mean is None:
        return plan.images[0], plan.images[0], 0, 0, 0, 0
    made = plan.mean, plan.std
    for each in made:
        made += (0 if len(each) == 1 else each.stride(0), each.stride(1))
    return made


def _swapped(plan: Plan) -> int:
    """The channels up to this one are in reverse."""
    return 0 if plan.order is None else 2


def _as_one(plan: Plan, table: np.ndarray) -> tuple[int, ...] | None:
    """The row for all images, where they lie at one distance from each other, as staging packs
    images of one size; None for others."""
    first = table[0]
    if len(table) > 1:
        steps, size = np.diff(table[:, 0]), plan.images[0].itemsize
        if (table[:, 1:] != first[1:]).any() or (steps != steps[0]).any() or steps[0] % size:
            return None
        first = first.copy()
        first[1] = steps[0] // size
    return tuple(first.tolist())


def _on_device(plan: Plan, table: np.ndarray) -> Tensor:
    """A row for each image, with its distance from the first for its address, then the channel
    order or orders, on the images' device."""
    count, first = plan.shape[0], plan.images[0]
    rows = np.repeat(table, count // len(table), axis=0)
    rows[:, 0] = (rows[:, 0] - rows[0, 0]) // first.itemsize + np.arange(count) * rows[:, 1]
    orders = np.array(plan.orders or [plan.order or identity_of(plan.shape[1])], np.int64)
    made = torch.from_numpy(np.concatenate([rows.ravel(), orders.ravel()]))
    if first.device.type == 'cpu':
        return made
    # The copy of pinned memory is put on the stream without waiting, and torch gives the pinned
    # block out again only after that copy.
    return made.pin_memory().to(first.device, non_blocking=True)


# What is left open to Triton's specialisation decides whether loads and stores are of vectors. Of
# everything else, each value would make a variant of its own to compile.
@triton.jit(do_not_specialize=(*_STEPS, 'start', 'channels', 'swapped'))
def _flat(
    origin,
    mean,
    std,
    mean_n,
    mean_c,
    std_n,
    std_c,
    out,
    start,
    distance,
    plane,
    channels,
    swapped,
    NORMALIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Contiguous images that fill the contiguous result: each plane is one row of values."""
    sample = start + tl.program_id(1).to(tl.int64)
    channel = tl.program_id(2)
    origin_channel = tl.where(channel <= swapped, swapped - channel, channel).to(tl.int64)
    position = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = position < plane
    source = origin + sample * distance + origin_channel * plane
    value = tl.load(source + position, mask=inside, other=0).to(tl.float32)
    if NORMALIZE:
        value -= tl.load(mean + sample * mean_n + channel * mean_c)
        value = tl.div_rn(value, tl.load(std + sample * std_n + channel * std_c))
    tl.store(out + (sample * channels + channel) * plane + position, value, mask=inside)


@triton.jit(
    do_not_specialize=(
        *(*_STEPS, 'start', 'image_frames', 'image_height', 'swapped', 'pad_value'),
        *('orders', 'order_n', 'channels', 'height', 'across'),
    )
)
def _tiles(
    origin,
    table,
    mean,
    std,
    mean_n,
    mean_c,
    std_n,
    std_c,
    out,
    start,
    image_n,
    image_frames,
    image_height,
    image_width,
    image_c,
    image_t,
    image_h,
    image_w,
    out_n,
    out_c,
    out_t,
    out_h,
    out_w,
    swapped,
    pad_value,
    orders,
    order_n,
    channels,
    height,
    width,
    across,
    STACKED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Any images in any result: some rows and columns of all channels, padding included."""
    sample = start + tl.program_id(1).to(tl.int64)
    tile = tl.program_id(0)
    y = (tile // across * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    x = (tile % across * COLUMNS + tl.arange(0, COLUMNS)).to(tl.int64)[None, :]
    t = tl.program_id(2).to(tl.int64)
    if STACKED:
        source = origin + sample * image_n
    else:
        row = table + sample * FIELDS
        order = table + orders + sample * order_n
        source = origin + tl.load(row)
        image_frames = tl.load(row + 2)
        image_height = tl.load(row + 3)
        image_width = tl.load(row + 4)
        image_c = tl.load(row + 5)
        image_t = tl.load(row + 6)
        image_h = tl.load(row + 7)
        image_w = tl.load(row + 8)
    written = (y < height) & (x < width)
    shown = (y < tl.where(t < image_frames, image_height, 0)) & (x < image_width)
    source += t * image_t
    target = out + sample * out_n + t * out_t
    pixels = y * image_h + x * image_w
    places = y * out_h + x * out_w
    for channel in range(channels):
        if STACKED:
            origin_channel = tl.where(channel <= swapped, swapped - channel, channel).to(tl.int64)
        else:
            origin_channel = tl.load(order + channel)
        # An image is never larger than the result: what is shown is written.
        value = tl.load(source + origin_channel * image_c + pixels, mask=shown, other=0)
        value = value.to(tl.float32)
        if NORMALIZE:
            value -= tl.load(mean + sample * mean_n + channel * mean_c)
            value = tl.div_rn(value, tl.load(std + sample * std_n + channel * std_c))
        value = tl.where(shown, value, pad_value)
        tl.store(target + tl.cast(channel, tl.int64) * out_c + places, value, mask=written)
