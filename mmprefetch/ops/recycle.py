# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Host memory for outputs, used again once nobody holds it any more.

Fresh memory of megabytes costs a page fault for every 4 KiB, which is most of the time that a
batch takes on CPU. A block is given out again only while this pool is the sole owner of its
storage: every tensor, view, autograd graph or array made from it holds the storage as well.
"""

import os
import sys
import threading
import weakref
from math import prod

import torch
from torch import Tensor, UntypedStorage

_use_count = getattr(torch._C, '_storage_Use_Count', None)
_pools: 'weakref.WeakSet[RecycledMemory]' = weakref.WeakSet()


class _Block:
    """A storage and the number of the request that last gave it out."""

    __slots__ = ('capacity', 'last', 'storage')

    def __init__(self, capacity: int) -> None:
        self.storage = UntypedStorage(capacity)
        self.capacity = capacity
        self.last = 0

    def holders(self) -> tuple[int, int]:
        """Owners of the memory, as torch counts them, and of its Python object."""
        storage = self.storage
        return _use_count(storage._cdata), sys.getrefcount(storage)

    def idle(self) -> bool:
        """Whether nobody but this block can reach the memory."""
        return (
            self.holders() == _HOLDERS_OF_IDLE
            # Another process may see shared memory; a resized storage is no longer this block.
            and not self.storage.is_shared()
            and self.storage.nbytes() == self.capacity
        )


def _holders_of_idle() -> tuple[int, int] | None:
    """What :meth:`_Block.holders` gives for an idle block; None where it does not tell.

    The counts are no public interface, so that they are tried on every kind of holder first.
    """
    if _use_count is None:
        return None
    block = _Block(64)
    idle = block.holders()
    tensor = torch.empty(0, dtype=torch.uint8, device='cpu').set_(block.storage, 0, (64,), (1,))
    while_held = [block.holders()]
    tensor = tensor[8:].detach()
    while_held.append(block.holders())
    array = tensor.numpy()
    del tensor
    while_held.append(block.holders())
    del array
    back = block.holders()
    storage = block.storage
    while_held.append(block.holders())
    del storage
    return idle if back == idle and idle not in while_held else None


_HOLDERS_OF_IDLE = _holders_of_idle()


class RecycledMemory:
    """A bounded pool of host memory whose blocks are given out again when nobody holds them.

    May be used from several threads. A deep copy or an unpickled one is an empty pool with the
    same bounds. Where torch does not tell who holds a storage, all memory is fresh.

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
        self._forget_all()
        _pools.add(self)

    def _forget_all(self) -> None:
        self._blocks: list[_Block] = []
        self._requests = 0
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple:
        return type(self), self._bounds

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
            A tensor of undefined values that shares its memory with no other.
        """
        max_bytes, _, _, min_bytes = self._bounds
        size = prod(shape) * dtype.itemsize
        capacity = _size_class(size)
        if size < min_bytes or capacity > max_bytes or _HOLDERS_OF_IDLE is None:
            return torch.empty(shape, dtype=dtype, device='cpu')
        tensor = torch.empty(0, dtype=dtype, device='cpu')
        with self._lock:
            return tensor.set_(self._take(size, capacity).storage, 0, shape)

    def _take(self, size: int, capacity: int) -> _Block:
        """The smallest idle block that fits, or a new one; forgets what is beyond the bounds."""
        max_bytes, max_blocks, max_age, _ = self._bounds
        self._requests += 1
        oldest = self._requests - max_age
        self._blocks = [block for block in self._blocks if block.last > oldest]
        best = None
        for block in self._blocks:
            if (
                size <= block.capacity <= capacity + capacity // 4
                and (best is None or block.capacity < best.capacity)
                and block.idle()
            ):
                best = block
        if best is None:
            best = _Block(capacity)
            self._blocks.append(best)
        best.last = self._requests
        if len(self._blocks) > max_blocks or self.nbytes > max_bytes:
            self._blocks.sort(key=_last)
            while len(self._blocks) > max_blocks or self.nbytes > max_bytes:
                del self._blocks[0]
        return best


def _last(block: _Block) -> int:
    return block.last


def _size_class(size: int) -> int:
    """Round up to an eighth of the power of two below, so that like sizes share blocks."""
    step = max((1 << size.bit_length()) >> 4, 64)
    return -(-size // step) * step


def _forget_after_fork() -> None:
    for pool in _pools:
        pool._forget_all()


# A lock that another thread held while the process forked would stay locked in the child.
os.register_at_fork(after_in_child=_forget_after_fork)
