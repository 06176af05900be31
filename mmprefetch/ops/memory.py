# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Host memory for outputs, used again once nobody holds it any more.

Fresh memory of megabytes costs a page fault for every 4 KiB, which is most of the time that a
batch takes on CPU. A block is a NumPy array, and what is given out are tensors made of it by
:func:`torch.from_numpy`: their storage holds a reference to the array until the last tensor, view,
autograd graph or array on it is gone. So the array's reference count tells whether a block is idle.
"""

from __future__ import annotations

import sys
import threading
from math import prod

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes, as torch's own memory


class _Block:
    """An array and the number of the request that last gave it out."""

    __slots__ = ('array', 'capacity', 'last', 'start')

    def __init__(self, capacity: int) -> None:
        self.array = np.empty(capacity + _ALIGNMENT, np.uint8)
        self.start = -self.array.__array_interface__['data'][0] % _ALIGNMENT
        self.capacity = capacity
        self.last = 0

    def references(self) -> int:
        return sys.getrefcount(self.array)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, size: int) -> Tensor:
        # NumPy lets every slice of a slice refer to the array that owns the memory. The storage
        # is as large as the tensor, so that a file that the tensor is saved to is not larger.
        storage = torch.from_numpy(self.array[self.start : self.start + size]).untyped_storage()
        # Neither `view` nor `reshape`, whose results autograd takes for views of another tensor.
        return torch.empty(0, dtype=dtype, device='cpu').set_(storage, 0, shape)


_REFERENCES_OF_IDLE = _Block(1).references()


class HostMemory(threading.local):
    """A bounded pool of host memory for each thread, whose blocks are given out again when nobody
    holds them.

    What was given out may be held, and let go of, by any thread. As of every tensor made from a
    NumPy array, its storage can't be resized.

    Args:
        max_bytes: Most bytes that blocks known to the pool may have together; beyond it the
            longest unused are forgotten, whether held by someone (who keeps them) or not.
        max_blocks: Most blocks known to the pool.
        max_age: A block that was not given out in this many requests is forgotten, so that the
            memory of a size that is no longer asked for goes back.
        min_bytes: Requests below it get fresh memory.
    """

    def __init__(
        self,
        max_bytes: int = 1 << 30,
        max_blocks: int = 32,
        max_age: int = 128,
        min_bytes: int = 1 << 16,
    ) -> None:
        self._bounds = (max_bytes, max_blocks, max_age, min_bytes)
        self._blocks: list[_Block] = []  # the longest unused first
        self._requests = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks known to the pool, held by someone or not."""
        return sum(block.capacity for block in self._blocks)

    def __len__(self) -> int:
        return len(self._blocks)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Like :func:`torch.empty` on CPU, from memory used before where there is some.

        Args:
            shape: Shape of the tensor.
            dtype: dtype of the tensor.

        Returns:
            A contiguous tensor of undefined values that shares its memory with no other.
        """
        max_bytes, max_blocks, max_age, min_bytes = self._bounds
        size = prod(shape) * dtype.itemsize
        capacity = _size_class(size)
        if size < min_bytes or capacity > max_bytes:
            return torch.empty(shape, dtype=dtype, device='cpu')
        self._requests += 1
        idle = [
            block
            for block in self._blocks
            if size <= block.capacity <= capacity + capacity // 4
            and block.references() == _REFERENCES_OF_IDLE
        ]
        taken = min(idle, key=lambda block: block.capacity) if idle else _Block(capacity)
        taken.last = self._requests
        oldest = self._requests - max_age
        self._blocks = [
            block for block in self._blocks if block is not taken and block.last > oldest
        ]
        self._blocks.append(taken)
        while len(self._blocks) > max_blocks or self.nbytes > max_bytes:
            del self._blocks[0]
        return taken.tensor(shape, dtype, size)


def _size_class(size: int) -> int:
    """Round up to an eighth of the power of two below, so that like sizes share blocks."""
    step = max((1 << size.bit_length()) >> 4, _ALIGNMENT)
    return -(-size // step) * step
