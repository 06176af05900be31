# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Pinned staging buffers that are used again, each when the copy out of it has finished."""

from __future__ import annotations

import threading
import warnings
from collections import deque
from collections.abc import Callable

import torch


class PinnedRing:
    """Pinned staging buffers, each reused when the copy out of it has finished.

    A buffer grows to the largest batch it has held, rounded up to a power of two, so that batches
    of changing size settle: at most ``slots`` buffers of at most twice the largest batch are kept.
    Where more batches than that are staged and not yet in transfer, as when several passes go on
    at a time, each further one gets a buffer that is not kept. May be used by several threads.

    Args:
        slots (int): How many batches may be staged or in transfer at a time.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free: deque[torch.Tensor] = deque()
        self._in_transfer: deque[tuple[torch.Tensor, Callable[[], None]]] = deque()
        self._sizes: dict[int, int] = {}
        self._pinned = True
        # A lease that is collected as garbage gives its buffer back in the middle of anything.
        self._lock = threading.RLock()

    @property
    def nbytes(self) -> int:
        """int: Bytes of all buffers, those that are taken included."""
        return sum(self._sizes.values())

    def take(self, nbytes: int) -> Lease:
        """Take a buffer, waiting until the copy out of it has finished.

        Args:
            nbytes (int): Bytes needed.

        Returns:
            Lease: The buffer, for this caller alone.
        """
        buffer = wait = None
        with self._lock:
            if self._free:
                buffer = self._free.popleft()
            elif len(self._sizes) >= self.slots and self._in_transfer:
                buffer, wait = self._in_transfer.popleft()
        if wait is not None:
            wait()
        if buffer is None or buffer.numel() < nbytes:
            if buffer is not None:
                self._forget(buffer)
                del buffer  # before a larger one is made
            buffer = self._allocate(1 << max(nbytes - 1, 1).bit_length())
            with self._lock:
                self._sizes[id(buffer)] = buffer.numel()
        return Lease(self, buffer, nbytes)

    def give_back(self, buffer: torch.Tensor, wait: Callable[[], None] | None) -> None:
        """Take a buffer back.

        Args:
            buffer (torch.Tensor): The whole of it.
            wait (Callable | None): Returns when the copy out of it has finished. None: there was
                none.
        """
        with self._lock:
            if len(self._sizes) > self.slots:
                self._forget(buffer)
            elif wait is None:
                self._free.append(buffer)
            else:
                self._in_transfer.append((buffer, wait))

    def _forget(self, buffer: torch.Tensor) -> None:
        with self._lock:
            self._sizes.pop(id(buffer), None)

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


class Lease:
    """A buffer that one batch has for itself, until it is copied out of or dropped.

    Args:
        ring (PinnedRing): Where it is from.
        whole (torch.Tensor): uint8, the whole buffer.
        nbytes (int): Bytes needed of it.

    Attributes:
        buffer (torch.Tensor): uint8, ``nbytes`` elements.
    """

    def __init__(self, ring: PinnedRing, whole: torch.Tensor, nbytes: int) -> None:
        self.buffer = whole[:nbytes]
        self._whole = whole
        self._ring: PinnedRing | None = ring

    def copied(self, wait: Callable[[], None]) -> None:
        """Give the buffer back: the copy out of it was issued.

        Args:
            wait (Callable): Returns when the copy has finished.
        """
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.give_back(self._whole, wait)

    def __del__(self) -> None:
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.give_back(self._whole, None)
