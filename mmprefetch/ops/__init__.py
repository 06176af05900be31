# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass: channel order, float, mean/std, padding and batching of images in one pass.

One function, :func:`normalize_batch`, with three implementations behind it, chosen by where the
images are: ``reference`` (plain torch, any device, differentiable), ``cpu`` (compiled by numba
where that is installed) and ``triton``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec

from torch import Tensor
from torch.nn import Parameter

from .cpu import normalize as _cpu
from .cpu import prepare
from .plan import plan_batch, reversal
from .reference import normalize as _reference

__all__ = ['normalize_batch', 'prepare', 'reversal']


def normalize_batch(
    images: Tensor | Sequence[Tensor],
    mean: Tensor | None = None,
    std: Tensor | None = None,
    *,
    channel_order: Sequence[int] | Sequence[Sequence[int] | None] | None = None,
    size_divisor: int = 1,
    size: tuple[int, int] | None = None,
    pad_value: float = 0,
    out: Tensor | None = None,
) -> Tensor:
    """Turn a batch of raw images into one normalised, padded batch tensor.

    The result is equal to the bit to mmengine's ``(x.float() - mean) / std`` followed by
    ``stack_batch``. Nothing here makes the host wait for an accelerator, and no index tensor is
    made on the host.

    Args:
        images: Non-empty sequence of (C, H_i, W_i) tensors of any sizes, contiguous or not, or
            one (N, C, H, W) tensor; video: (C, T_i, H_i, W_i) items or one (N, C, T, H, W)
            tensor. Any dtype that ``Tensor.float`` takes, the same for all.
        mean: Values to subtract, in the order of the output's channels: shape (C,), (1,) or
            (C, 1, 1) for the whole batch, or (N, C) for each sample its own; on the images'
            device. None, together with ``std``, for no normalisation.
        std: Values to divide by, shaped like ``mean``.
        channel_order: Output channel ``c`` is input channel ``channel_order[c]``; a permutation
            of ``range(C)``. None keeps the order. Or N of these, for each sample its own. See
            :func:`reversal`.
        size_divisor: The padded size is the batch's largest, rounded up to a multiple of it. As
            in ``stack_batch``, T of a sequence of videos is rounded up, too.
        size: Padded (H, W) instead; an image that is larger keeps its size.
        pad_value: Written right of and below each image, after normalisation.
        out: float32 tensor to be written and returned, of the result's shape and device and of
            any strides; it must not overlap the images.

    Returns:
        The float32 (N, C, H, W) or (N, C, T, H, W) batch.

    Raises:
        ValueError: If a value does not fit the images; names the sample, the key, the value
            found and what to write instead.
    """
    plan = plan_batch(images, mean, std, channel_order, size_divisor, size, pad_value, out)
    return _implementation(plan.images)(plan)


def _implementation(images: Tensor | Sequence[Tensor]) -> Callable:
    """The function that is to do a batch."""
    tensors = (images,) if isinstance(images, Tensor) else images
    first = tensors[0]
    if first.dtype.is_floating_point and any(image.requires_grad for image in tensors):
        return _reference
    # A subclass may keep its values where only its own operators find them.
    if set(map(type, tensors)) - {Tensor, Parameter}:
        return _reference
    if first.device.type == 'cpu':
        return _cpu
    if first.device.type == 'cuda' and _has_triton():
        from .triton import normalize

        return normalize
    return _reference


@cache
def _has_triton() -> bool:
    return find_spec('triton') is not None
