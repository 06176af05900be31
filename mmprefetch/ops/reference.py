# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass in plain torch: any device, differentiable, the measure of the other two."""

from __future__ import annotations

import torch
from torch import Tensor

from .plan import Plan


def normalize(plan: Plan) -> Tensor:
    """Do a batch image by image.

    Args:
        plan: The checked batch.

    Returns:
        The batch.
    """
    out = plan.out
    if out is None:
        out = torch.empty(plan.shape, dtype=torch.float32, device=plan.images[0].device)
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
    return out
