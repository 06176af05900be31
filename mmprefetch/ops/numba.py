# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass as one compiled loop over the values.

Import this module only where numba is installed. It takes most of a second.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numba import from_dtype, njit, types
from numba.extending import intrinsic

# `fastmath` stays off: the division has to round as torch's, and may not become a multiplication.
# So does `parallel`: one of numba's thread layers aborts where two threads enter it, another one
# where a process that used it forks. Callers divide the planes among threads of their own.
_OPTIONS = dict(nogil=True, error_model='numpy')


def compiled(dtype: np.dtype) -> Callable:
    """Compile the kernel for images of a dtype, or load it from the disk.

    Args:
        dtype: Of the images.

    Returns:
        A function with the arguments of :func:`_planes`.
    """
    integers, floats = types.int64[:, ::1], types.float32[:, ::1]
    signature = types.void(
        from_dtype(dtype)[::1],
        *(integers, floats, floats, integers, types.int64),
        *(types.UniTuple(types.int64, 4), types.UniTuple(types.int64, 5)),
        *(types.float32, types.int64, types.int64),
    )
    try:
        return njit(signature, cache=True, **_OPTIONS)(_planes)
    except Exception:  # nowhere to write, no space left, or a file that cannot be read any more
        return njit(signature, **_OPTIONS)(_planes)


@intrinsic
def _at(context, address, like):
    """Pointer to the memory at an address, of the dtype of an array."""
    pointer = types.CPointer(like.dtype)

    def generate(context, builder, signature, arguments):
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    return pointer(address, like), generate


@njit(**_OPTIONS)
def _normalize(source, step, target, target_step, count, mean, std):
    # Constant steps of 1 let the compiler work on vectors.
    if step == 1 and target_step == 1:
        for x in range(count):
            target[x] = (np.float32(source[x]) - mean) / std
    else:
        for x in range(count):
            target[x * target_step] = (np.float32(source[x * step]) - mean) / std


@njit(**_OPTIONS)
def _fill(target, target_step, start, stop, value):
    if target_step == 1:
        for x in range(start, stop):
            target[x] = value
    else:
        for x in range(start, stop):
            target[x * target_step] = value


def _planes(like, table, mean, std, orders, out, extent, strides, pad_value, start, stop):
    """Write some of the (H, W) planes of a batch, counted along N, C and T.

    Args:
        like: Array of the images' dtype.
        table: See :func:`mmprefetch.ops.plan.table_of`.
        mean: (1, C) or (N, C).
        std: (1, C) or (N, C).
        orders: (1, C) or (N, C), the input channel of each output channel.
        out: Address of the result.
        extent: C, T, H, W of the result.
        strides: Of the result, in values.
        pad_value: Value of the padding.
        start: The first plane.
        stop: The one behind the last.
    """
    channels, frames, height, width = extent
    out_n, out_c, out_t, out_h, out_w = strides
    for plane in range(start, stop):
        frame = plane % frames
        channel = plane // frames % channels
        sample = plane // (frames * channels)
        image = table[sample % len(table)]
        rows = image[3] if frame < image[2] else 0
        columns, row_step, step = image[4], image[7], image[8]
        source = orders[sample % len(orders), channel] * image[5] + frame * image[6]
        source = image[0] + (sample * image[1] + source) * like.itemsize
        target = out + (sample * out_n + channel * out_c + frame * out_t) * 4
        m, s = mean[sample % len(mean), channel], std[sample % len(std), channel]
        full, total = width, rows
        if columns == width and row_step == width * step and out_h == width * out_w:
            # Rows that follow one another are one: short ones would not fill the vectors.
            columns, full, total = rows * width, rows * width, min(rows, 1)
        for y in range(total):
            row = _at(target + y * out_h * 4, mean)
            pixels = _at(source + y * row_step * like.itemsize, like)
            _normalize(pixels, step, row, out_w, columns, m, s)
            _fill(row, out_w, columns, full, pad_value)
        for y in range(rows, height):
            _fill(_at(target + y * out_h * 4, mean), out_w, 0, width, pad_value)
