# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass in plain torch: any device, differentiable, the measure of the other two."""

import torch
from torch import Tensor

from .checks import Plan


def normalize(plan: Plan, return_mask: bool) -> tuple[Tensor, Tensor | None]:
    """Do a batch image by image.

    Args:
        plan: The checked batch.
        return_mask: Whether the padding mask is wanted.

    Returns:
        The batch, and the (N, H, W) bool mask or None.
    """
    first = plan.images[0]
    out = plan.out
    if out is None:
        out = torch.empty(
            plan.shape, dtype=plan.dtype, device=first.device, memory_format=plan.memory_format
        )
    if plan.padded:
        out.fill_(plan.pad_value)
    for index, image in enumerate(plan.images):
        order = plan.order if plan.orders is None else plan.orders[index]
        if order is not None:
            # Slices instead of a list of indices: indexing with a list makes a tensor of it on
            # the host and copies that to the device, for which the host waits.
            image = torch.cat([image[channel : channel + 1] for channel in order])
        image = image.float()
        if plan.mean is not None:
            row = index if plan.mean.shape[0] > 1 else 0
            # Tensors, not Python numbers: a CUDA device turns division by a number into a
            # multiplication with its reciprocal, which rounds differently.
            shape = (-1,) + (1,) * (image.dim() - 1)
            image = (image - plan.mean[row].view(shape)) / plan.std[row].view(shape)
        corner = (index, ..., *map(slice, image.shape[1:]))
        out[corner].copy_(image)
    return out, padding_mask(plan, first.device) if return_mask else None


def padding_mask(plan: Plan, device: torch.device) -> Tensor:
    """The bool (N, H, W) mask of a batch, True where padded.

    Args:
        plan: The checked batch.
        device: Where the mask is to be.

    Returns:
        The mask.
    """
    mask = torch.full((plan.shape[0], *plan.shape[-2:]), plan.padded, device=device)
    if plan.padded:
        for row, shape in zip(mask, plan.shapes, strict=True):
            row[: shape[-2], : shape[-1]] = False
    return mask
