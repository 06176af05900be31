# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass with the values that a preprocessor's attributes hold."""

from __future__ import annotations

import warnings
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn

from ..ops import normalize_batch, reversal

_dtype, _shape = attrgetter('dtype'), attrgetter('shape')


def laid_out_as_usual(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides that a new one of its shape has.

    Args:
        tensor (torch.Tensor): Any.

    Returns:
        bool: True if so. A dimension of a single element may have any without being called not
        contiguous.
    """
    if not tensor.is_contiguous():
        return False
    return 1 not in tensor.shape or (
        tensor.stride() == torch.empty(tensor.shape, device='meta').stride()
    )


def channels_of(images: Any, dims: int = 3) -> int | None:
    """The number of channels of a batch that the pass takes.

    Args:
        images (Any): Whatever a batch holds as ``inputs``.
        dims (int): Dimensions of one image, the channels first.

    Returns:
        int | None: None if the images are no plain tensors, or not alike.
    """
    if type(images) is Tensor:
        return images.shape[1] if images.dim() == dims + 1 and len(images) else None
    if not isinstance(images, (list, tuple)) or set(map(type, images)) != {Tensor}:
        return None
    shapes = set(map(_shape, images))
    if len(set(map(_dtype, images))) > 1 or {len(shape) for shape in shapes} != {dims}:
        return None
    channels = {shape[0] for shape in shapes}
    return channels.pop() if len(channels) == 1 else None


def becomes_float(preprocessor: nn.Module, dtype: torch.dtype) -> bool:
    """Whether ``(x - mean) / std`` is float32 by torch's own rules, and no less exact on the way.

    Args:
        preprocessor (nn.Module): Holds the constants.
        dtype (torch.dtype): dtype of ``x``, for a class that does not make it float32 first.

    Returns:
        bool: True if the fused pass computes the same.
    """
    for values in (preprocessor.mean, preprocessor.std):
        dtype = torch.promote_types(dtype, values.dtype)
        if dtype not in (torch.float32, torch.int64):
            return False
    return True


def note_unscaled(preprocessor: nn.Module, fields: dict) -> None:
    """Note which means lie in 0..1, which is wrong beside images of whole numbers.

    The first batch says of which dtype the images are, but to read the values from a device then
    would make the host wait.

    Args:
        preprocessor (nn.Module): The preprocessor.
        fields (dict): The arguments that it was built from.
    """
    noted = vars(preprocessor)['_unscaled'] = {}
    for name, value in fields.items():
        if name == 'data_preprocessor' and isinstance(value, dict):
            note_unscaled(getattr(preprocessor, name), value)
        elif (
            name in ('mean', 'second_mean')
            and isinstance(value, (list, tuple))
            and any(value)
            and all(0 <= each <= 1 for each in value)
        ):
            noted[name] = list(value)


def fused(
    preprocessor: nn.Module,
    images: Any,
    *,
    reverse: bool,
    drops: bool = False,
    names: tuple[str, str] = ('mean', 'std'),
    dims: int = 3,
    **options: Any,
) -> Tensor | None:
    """Run the pass over a batch.

    Args:
        preprocessor (nn.Module): Holds the constants, and ``_enable_normalize``.
        images (Any): Sequence of (C, H_i, W_i) tensors or one (N, C, H, W) tensor.
        reverse (bool): Whether the class reverses three channels.
        drops (bool): Whether the class drops all but three channels then, if there are others.
            Where the user has opted in, channels 0 and 2 are swapped instead.
        names (tuple): The attributes that hold the values to subtract and to divide by.
        dims (int): Dimensions of one image, the channels first.
        **options: For :func:`mmprefetch.ops.normalize_batch`.

    Returns:
        Tensor | None: The float32 batch. None if the input is not one for the pass, so that the
        class itself has to say what it makes of it.

    Raises:
        ValueError: The images do not fit the constants or each other.
    """
    channels = channels_of(images, dims)
    if channels is None:
        return None
    swaps = channels == 3 or (drops and getattr(preprocessor, '_any_channels', False))
    order = reversal(channels) if swaps else None
    samples = getattr(preprocessor, '_samples', None)
    if samples is not None:
        return _by_sample(samples, images, order, options)
    if reverse and drops and not swaps:
        return None
    mean = std = None
    if preprocessor._enable_normalize:
        mean, std = (getattr(preprocessor, name) for name in names)
        for values in (mean, std):
            # In both cases torch's own rules give the result another dtype, or more channels.
            if values.dtype == torch.float64 or (channels == 1 < values.numel()):
                return None
        if mean.dim() > 3:  # (C, 1, 1, 1), as classes of videos keep them
            mean, std = mean.flatten(), std.flatten()
    if isinstance(images, Tensor) and not laid_out_as_usual(images):
        return None  # the class's result has the strides of its input, which decide about kernels
    unscaled = vars(preprocessor).get('_unscaled', {}).pop(names[0], None)
    if unscaled is not None and not images[0].dtype.is_floating_point:
        warnings.warn(
            f'data_preprocessor: {names[0]} {unscaled} lies in 0..1 but the images are '
            f'{images[0].dtype}; write mean and std in the units of the images (for uint8, times '
            '255)',
            stacklevel=2,
        )
    return _normalize(images, mean, std, order if reverse else None, options)


def _by_sample(samples: Any, images: Any, order: Any, options: dict) -> Tensor | None:
    if len(images) != len(samples):
        return None
    mean, std = samples.values.to(images[0].device)
    orders = [order if reverse else None for reverse in samples.reverse]
    return _normalize(images, mean, std, orders, options)


def _normalize(images: Any, mean: Any, std: Any, order: Any, options: dict) -> Tensor:
    try:
        return normalize_batch(images, mean, std, channel_order=order, **options)
    except ValueError as error:
        raise ValueError(f'data_preprocessor: {error}') from error
