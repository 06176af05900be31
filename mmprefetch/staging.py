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
import warnings
from collections.abc import Callable
from typing import Any

import torch

from .packing import Skeleton
from .sections import Section, lay_out


class PinnedRing:
    """A ring of pinned staging buffers, each reused when the copy out of it has finished.

    A buffer grows to the largest batch it has held, rounded up to a power of two, so that batches
    of changing size settle: the ring holds at most ``slots`` buffers of at most twice the largest
    batch.

    Args:
        slots (int): How many batches may be staged or in transfer at a time.
    """

    def __init__(self, slots: int) -> None:
        self._buffers: list[torch.Tensor | None] = [None] * slots
        self._busy: list[Callable[[], None] | None] = [None] * slots
        self._next = 0
        self._pinned = True

    @property
    def nbytes(self) -> int:
        """int: Bytes held."""
        return sum(buffer.numel() for buffer in self._buffers if buffer is not None)

    def take(self, nbytes: int) -> tuple[torch.Tensor, int]:
        """Take the next buffer, waiting until the copy out of it has finished.

        Args:
            nbytes (int): Bytes needed.

        Returns:
            tuple: A uint8 tensor of ``nbytes`` elements, and its slot for :meth:`mark`.
        """
        slot, self._next = self._next, (self._next + 1) % len(self._buffers)
        wait, self._busy[slot] = self._busy[slot], None
        if wait is not None:
            wait()
        buffer = self._buffers[slot]
        if buffer is None or buffer.numel() < nbytes:
            self._buffers[slot] = None
            buffer = self._buffers[slot] = self._allocate(1 << max(nbytes - 1, 1).bit_length())
        return buffer[:nbytes], slot

    def mark(self, slot: int, wait: Callable[[], None]) -> None:
        """Note how to wait for the copy out of a slot.

        Args:
            slot (int): From :meth:`take`.
            wait (Callable): Returns when the copy has finished.
        """
        self._busy[slot] = wait

    def _allocate(self, nbytes: int) -> torch.Tensor:
        if self._pinned:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pinned = False
                warnings.warn(
                    f'No pinned memory for a staging buffer of {nbytes} bytes ({error}). Batches '
                    'are staged in pageable memory from now on, which makes their transfer block '
                    'the host. Raise the limit of locked memory (`ulimit -l`) or lower '
                    '`train_cfg.prefetch_depth`.',
                    stacklevel=2,
                )
        return torch.empty(nbytes, dtype=torch.uint8)


class StagedBatch:
    """A batch whose tensors lie in one staging buffer.

    Its views on the device are made when it is staged, off the thread that trains, but for a
    device whose memory cannot be taken from a tensor and given back later. Until it is delivered
    no memory of the device is behind them.

    Args:
        buffer (torch.Tensor): uint8, all packed tensors.
        sections (list): Where they lie.
        skeleton (Skeleton): What is built around them.
        slot (int | None): The buffer's slot in its ring.
    """

    def __init__(
        self, buffer: torch.Tensor, sections: list[Section], skeleton: Skeleton, slot: int | None
    ) -> None:
        self.buffer = buffer
        self.slot = slot
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
            moved = tensor.to(device, non_blocking=strided and tensor.is_pinned())
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
        buffer, slot = torch.empty(total, dtype=torch.uint8), None
    else:
        buffer, slot = ring.take(total)
    for section in sections:
        for view, tensor in zip(section.views(buffer), section.tensors, strict=True):
            view.copy_(tensor)
    return StagedBatch(buffer, sections, skeleton, slot)


@functools.cache
def _memory_may_follow(device: torch.device) -> bool:
    """Whether a device's memory can be taken from a tensor, and given back later."""
    tensor = torch.empty(1, dtype=torch.uint8, device=device)
    try:
        tensor.untyped_storage().resize_(0)
        tensor.untyped_storage().resize_(1)
    except (RuntimeError, NotImplementedError):  # torch does this for some kinds of device only
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
