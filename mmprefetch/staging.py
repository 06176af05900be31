# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Staging: pack the tensors of a nested batch into one buffer, and unpack views of its copy.

A batch goes through two steps. :func:`stage` runs where the batch is loaded: it copies every CPU
tensor into one staging buffer and builds the structure that
``BaseDataPreprocessor.cast_data`` would build, with the tensors' places left open.
:meth:`StagedBatch.deliver` runs where the copy to the device is issued: one copy of the buffer,
then each place is filled with a view of it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from .packing import Skeleton
from .ring import Lease, PinnedRing
from .sections import Section, lay_out


class StagedBatch:
    """A batch whose tensors lie in one staging buffer.

    Its views on the device are made when it is staged, off the thread that trains, but for a
    device whose memory cannot be taken from a tensor and given back later. Until it is delivered
    no memory of the device is behind them.

    Args:
        buffer (torch.Tensor): uint8, all packed tensors.
        sections (list): Where they lie.
        skeleton (Skeleton): What is built around them.
        lease (Lease | None): Holds the buffer, where that is to be used again.
    """

    def __init__(
        self,
        buffer: torch.Tensor,
        sections: list[Section],
        skeleton: Skeleton,
        lease: Lease | None,
    ) -> None:
        self.buffer = buffer
        self.lease = lease
        self._sections = sections
        self._skeleton = skeleton
        self._flat: torch.Tensor | None = None
        if buffer.numel() and _memory_may_follow(skeleton.device):
            self._flat = self._filled_in()
            self._flat.untyped_storage().resize_(0)

    def deliver(self) -> tuple[Any, list[torch.Tensor]]:
        """Issue the copy to the device and fill the structure in. To be called once.

        Returns:
            tuple: The batch as ``BaseDataPreprocessor.cast_data`` returns it, and one tensor for
            each block of device memory that it lies in.
        """
        flat = self._flat
        if flat is None:
            flat = self._filled_in()
        else:
            flat.untyped_storage().resize_(flat.numel())
        flat.copy_(self.buffer, non_blocking=True)
        blocks = [flat] if flat.numel() else []
        device = self._skeleton.device
        for tensor, (container, key) in self._skeleton.direct:
            strided = tensor.layout == torch.strided and not tensor.is_nested
            # A subclass may not know whether it is pinned.
            pinned = type(tensor) is torch.Tensor and strided and tensor.is_pinned()
            moved = tensor.to(device, non_blocking=pinned)
            container[key] = moved
            blocks += [moved] if strided else _parts(moved)
        return self._skeleton.complete(), blocks

    def _filled_in(self) -> torch.Tensor:
        """Memory on the device for the buffer, with each tensor's place filled by a view of it."""
        flat = torch.empty_like(self.buffer, device=self._skeleton.device)
        for section in self._sections:
            for view, (container, key) in zip(section.views(flat), section.places, strict=True):
                # Not a view to autograd: each has a version of its own, as separate tensors have.
                container[key] = view.data
        return flat


def stage(batch: Any, device: torch.device, ring: PinnedRing | None = None) -> StagedBatch:
    """Pack the CPU tensors of a nested batch into one staging buffer.

    Structures are those that ``BaseDataPreprocessor.cast_data`` knows: mappings, sequences,
    namedtuples, :class:`BaseDataElement` and its subclasses, and whatever these hold that has a
    ``to`` method. Strings, numbers, numpy arrays and other objects stay the same objects. The
    batch itself is not changed.

    Args:
        batch (Any): A batch as the collate function made it.
        device (torch.device): Where its tensors will go.
        ring (PinnedRing, optional): Gives the buffer. By default a fresh pageable one, which the
            result may then hold for ever.

    Returns:
        StagedBatch: The packed batch. It shares no memory with the CPU tensors of ``batch``, but
        for those that are moved the ordinary way: sparse, quantised and pinned ones, tensor
        subclasses, and tensors that require a gradient.
    """
    skeleton = Skeleton(batch, device)
    sections = lay_out(skeleton.packed)
    total = sections[-1].stop if sections else 0
    if ring is None or total == 0:
        lease, buffer = None, torch.empty(total, dtype=torch.uint8)
    else:
        lease = ring.take(total)
        buffer = lease.buffer
    for section in sections:
        for view, tensor in zip(section.views(buffer), section.tensors, strict=True):
            view.copy_(tensor)
    return StagedBatch(buffer, sections, skeleton, lease)


@functools.cache
def _memory_may_follow(device: torch.device) -> bool:
    """Whether a device's memory can be taken from a tensor, and given back later."""
    tensor = torch.empty(1, dtype=torch.uint8, device=device)
    try:
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(1)
    except RuntimeError:  # torch does this for some kinds of device only
        return False
    return True


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a sparse tensor is made of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.values()] if tensor.is_nested else []
