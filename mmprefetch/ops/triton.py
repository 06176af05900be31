# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass as one Triton kernel for a whole batch, ragged or not.

Import this module only where triton is installed.
"""

from __future__ import annotations

import warnings
from functools import cache
from math import prod

import torch
import triton
import triton.language as tl
from torch import Tensor

from .plan import Plan, plan_batch, reversal
from .reference import normalize as reference

_BLOCK = 1024
_DTYPES = frozenset(
    {
        *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
    }
)
# Values that the table holds of each image.
_COLUMNS = 8
_SCALARS = (
    *('image_n', 'image_frames', 'image_height', 'image_width'),
    *('image_c', 'image_t', 'image_h', 'image_w'),
    *('out_n', 'out_c', 'out_t', 'out_h', 'out_w', 'mean_n', 'mean_c', 'std_n', 'std_c'),
    *('pad_value', 'order_n', 'channels', 'frames', 'height', 'width'),
)


@cache
def usable(device: torch.device) -> bool:
    """Whether the kernel can be built and launched on a device; tried once, warns if not.

    Triton needs a supported device and, with many versions, a C compiler on the machine.

    Args:
        device: The accelerator.

    Returns:
        Whether :func:`normalize` may be used there.
    """
    image = torch.zeros(1, 3, 1, 1, dtype=torch.uint8, device=device)
    ones = torch.ones(3, device=device)
    try:
        normalize(plan_batch(image, ones, ones))
    except Exception as error:  # Triton, its compiler and its driver share no base class.
        warnings.warn(
            f'mmprefetch: the fused kernel cannot be used on {device} ({error!r}); images are '
            'normalised by plain torch there, which gives the same values in more time',
            stacklevel=2,
        )
        return False
    return True


def normalize(plan: Plan) -> Tensor:
    """Do a batch with one launch on the current stream; the host waits for nothing.

    Args:
        plan: The checked batch.

    Returns:
        The batch.
    """
    first = plan.images[0]
    # The kernel counts the pixels of one sample with 32 bits, whose division is far cheaper.
    if first.dtype not in _DTYPES or prod(plan.shape[2:]) > 2**31 - _BLOCK:
        return reference(plan)
    out = plan.out
    if out is None:
        out = torch.empty(plan.shape, dtype=torch.float32, device=first.device)
    # An argument that the kernel does not read still has to be a tensor with two strides.
    mean = first if plan.mean is None else plan.mean
    std = first if plan.std is None else plan.std
    frames = plan.shape[2] if len(plan.shape) == 5 else 1
    height, width = plan.shape[-2:]
    orders = (None, reversal(plan.shape[1]))
    # One tensor, in one of the usual orders, is described by plain arguments, without a table.
    images = plan.images if isinstance(plan.images, Tensor) else _as_one(plan)
    stacked = images is not None and plan.orders is None and plan.order in orders
    # Every image is found by its distance from the first, whichever memory it is in.
    table = first if stacked else _table(plan, first)
    grid = (triton.cdiv(frames * height * width, _BLOCK), plan.shape[0])
    with torch.cuda.device_of(first):
        _kernel[grid](
            first,
            table,
            mean,
            std,
            out,
            images.stride(0) if stacked else 0,
            *(_layout(first) if stacked else (0,) * (_COLUMNS - 1)),
            out.stride(0),
            *_strides(out[0]),
            0 if mean.shape[0] == 1 else mean.stride(0),
            mean.stride(1),
            0 if std.shape[0] == 1 else std.stride(0),
            std.stride(1),
            float(plan.pad_value),
            0 if plan.orders is None else plan.shape[1],
            plan.shape[1],
            frames,
            height,
            width,
            STACKED=stacked,
            REVERSED=stacked and plan.order is not None,
            NORMALIZE=plan.mean is not None,
            COLUMNS=_COLUMNS,
            BLOCK=_BLOCK,
        )
    return out


def _as_one(plan: Plan) -> Tensor | None:
    """One strided view of images that lie at one distance from each other, as staging packs
    images of one size; None for others."""
    first = plan.images[0]
    if not plan.uniform or len(plan.images) < 2:
        return None
    addresses = [image.data_ptr() for image in plan.images]
    distance = addresses[1] - addresses[0]
    last = addresses[0] + distance * len(addresses)
    storage, stride = first.untyped_storage().data_ptr(), first.stride()
    if (
        distance <= 0
        or distance % first.itemsize
        or addresses != list(range(addresses[0], last, distance))
        or any(
            image.untyped_storage().data_ptr() != storage or image.stride() != stride
            for image in plan.images
        )
    ):
        return None
    return first.as_strided((len(addresses), *first.shape), (distance // first.itemsize, *stride))


def _layout(image: Tensor) -> tuple[int, ...]:
    """T, H, W of an image or video and its strides of C, T, H, W."""
    frames = image.shape[1] if image.dim() == 4 else 1
    return (frames, *image.shape[-2:], *_strides(image))


def _strides(image: Tensor) -> tuple[int, ...]:
    """Strides of C, T, H, W of one (C, H, W) or (C, T, H, W) tensor."""
    stride = image.stride()
    return (stride[0], stride[1] if len(stride) == 4 else 0, *stride[-2:])


def _table(plan: Plan, first: Tensor) -> Tensor:
    """Offset and layout of each image, then the channel order or orders, on their device."""
    start = first.data_ptr()
    values = []
    for image in plan.images:
        values.append((image.data_ptr() - start) // image.itemsize)
        values.extend(_layout(image))
    for order in plan.orders or [plan.order or range(plan.shape[1])]:
        values.extend(order)
    table = torch.tensor(values, dtype=torch.int64)
    if first.device.type == 'cpu':
        return table
    # The copy of pinned memory is put on the stream without waiting, and torch gives the pinned
    # block out again only after that copy.
    return table.pin_memory().to(first.device, non_blocking=True)


# Every size and stride of a batch would make a variant of its own to compile otherwise.
@triton.jit(do_not_specialize=_SCALARS)
def _kernel(
    origin,
    table,
    mean,
    std,
    out,
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
    mean_n,
    mean_c,
    std_n,
    std_c,
    pad_value,
    order_n,
    channels,
    frames,
    height,
    width,
    STACKED: tl.constexpr,
    REVERSED: tl.constexpr,
    NORMALIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sample = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = (position % width).to(tl.int64)
    row = position // width
    y = (row % height).to(tl.int64)
    t = (row // height).to(tl.int64)
    written = position < frames * height * width
    if STACKED:
        source = origin + sample * image_n
    else:
        entry = table + sample * COLUMNS
        order = table + tl.num_programs(1) * COLUMNS + sample * order_n
        source = origin + tl.load(entry)
        image_frames = tl.load(entry + 1)
        image_height = tl.load(entry + 2)
        image_width = tl.load(entry + 3)
        image_c = tl.load(entry + 4)
        image_t = tl.load(entry + 5)
        image_h = tl.load(entry + 6)
        image_w = tl.load(entry + 7)
    shown = (x < image_width) & (y < image_height) & (t < image_frames)
    source += t * image_t + y * image_h + x * image_w
    target = out + sample * out_n + t * out_t + y * out_h + x * out_w
    for channel in range(channels):
        origin_channel = tl.cast(channel, tl.int64)
        target_channel = origin_channel
        if REVERSED:
            origin_channel = tl.where(origin_channel < 3, 2 - origin_channel, origin_channel)
        if not STACKED:
            origin_channel = tl.load(order + channel)
        value = tl.load(source + origin_channel * image_c, mask=shown & written, other=0)
        value = value.to(tl.float32)
        if NORMALIZE:
            value -= tl.load(mean + sample * mean_n + channel * mean_c)
            value = tl.div_rn(value, tl.load(std + sample * std_n + channel * std_c))
        value = tl.where(shown, value, pad_value)
        tl.store(target + target_channel * out_c, value, mask=written)
