# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Transfer: the CPU tensors of a nested batch cross the bus in one copy.

Building a :class:`Transfer` packs them into one staging buffer, which is work of the host.
:meth:`Transfer.issue` puts the one copy of that buffer on the current stream, and fills views of
it into the structure that ``BaseDataPreprocessor.cast_data`` would build.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .layout import Entry, Layout, is_on_host

ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple of it, so that any dtype can be viewed and vector
loads are aligned."""


class Transfer:
    """A batch on its way to a device.

    Structures are those that ``BaseDataPreprocessor.cast_data`` knows: mappings, sequences,
    namedtuples, :class:`BaseDataElement` and its subclasses, and whatever these hold that has a
    ``to`` method. Strings, numbers, numpy arrays and other objects stay the same objects. The
    batch itself is not changed, and the result shares no memory with its CPU tensors, but for
    those that are moved the ordinary way: sparse, quantised and large pinned ones, tensor
    subclasses, and tensors that require a gradient.

    Args:
        batch (Any): A batch as the collate function made it.
        device (torch.device): Where its tensors go.
        copies (bool, optional): Whether the staging buffer is pinned and copied to the device, or
            is itself what the result lies in. Defaults to what the device needs.

    Attributes:
        buffer (torch.Tensor): uint8, the staging buffer; pinned for an accelerator. It has to be
            held until the copy out of it has finished.
        on_device (list): The tensors of the batch that are on an accelerator already.
    """

    def __init__(self, batch: Any, device: torch.device, copies: bool | None = None) -> None:
        self._layout = Layout(batch, device)
        self._starts: list[int] = []
        stop = 0
        for entry in self._layout.packed:
            self._starts.append(stop)
            stop += -(-entry.tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._copies = device.type != 'cpu' if copies is None else copies
        self.buffer = _staging_buffer(stop, pinned=self._copies)
        self.on_device = self._layout.on_device
        for view, entry in self._views(self.buffer):
            view.copy_(entry.tensor)

    def issue(self) -> Any:
        """Issue the copy on the current stream. To be called once.

        Returns:
            Any: The batch as ``BaseDataPreprocessor.cast_data`` returns it.
        """
        device = self._layout.device
        flat = self.buffer
        if self._copies:
            flat = torch.empty(flat.numel(), dtype=torch.uint8, device=device)
            flat.copy_(self.buffer, non_blocking=True)
        for view, entry in self._views(flat):
            # Not a view to autograd: each has a version of its own, as separate tensors have.
            entry.container[entry.key] = view.data
        for tensor, container, key in self._layout.direct:
            # A subclass may not know whether it is pinned.
            ordinary = type(tensor) is torch.Tensor and tensor.layout == torch.strided
            pinned = ordinary and not tensor.is_nested and tensor.is_pinned()
            container[key] = tensor.to(device, non_blocking=pinned)
        return self._layout.complete()

    def _views(self, buffer: torch.Tensor) -> Iterator[tuple[torch.Tensor, Entry]]:
        typed: dict[torch.dtype, torch.Tensor] = {}
        for start, entry in zip(self._starts, self._layout.packed):  # noqa: B905
            tensor = entry.tensor
            whole = typed.get(tensor.dtype)
            if whole is None:
                whole = typed[tensor.dtype] = buffer.view(tensor.dtype)
            yield (
                whole.as_strided(tensor.shape, _kept_strides(tensor), start // tensor.itemsize),
                entry,
            )


def memory_of(value: Any) -> list[torch.Tensor]:
    """Find the device memory behind the tensors of a nested value.

    Args:
        value (Any): Tensors, or containers and data elements of such.

    Returns:
        list[torch.Tensor]: One tensor for each block of memory.
    """
    found: dict[int, torch.Tensor] = {}
    _find_memory(value, found, {})
    return list(found.values())


def _find_memory(value: Any, found: dict[int, torch.Tensor], seen: dict[int, Any]) -> None:
    if isinstance(value, torch.Tensor):
        if is_on_host(value):
            return
        if value.layout == torch.strided and not value.is_nested:
            found.setdefault(value.untyped_storage().data_ptr(), value)
            return
        inner: Iterable = _parts(value)
    elif isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, (list, tuple)):
        inner = value
    elif hasattr(value, 'to') or dataclasses.is_dataclass(value):
        inner = getattr(value, '__dict__', {}).values()
    else:
        return
    if id(value) not in seen:
        seen[id(value)] = value
        for item in inner:
            _find_memory(item, found, seen)


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that another kind of tensor is made of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.values()] if tensor.is_nested else []


def _kept_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """The strides that ``tensor.to(device)`` would give, which keeps those of dense memory."""
    if tensor.is_contiguous() and 1 not in tensor.shape:
        return tensor.stride()
    return torch.empty_like(tensor, device='meta').stride()


def _staging_buffer(nbytes: int, pinned: bool) -> torch.Tensor:
    """A buffer from torch's caching allocator of pinned memory, which gives a block out again
    only when the copy that was issued from it has finished; pageable where there is none."""
    if pinned and nbytes:
        try:
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
        except RuntimeError as error:
            _warn_of_pageable(str(error))
    return torch.empty(nbytes, dtype=torch.uint8)


@functools.cache
def _warn_of_pageable(reason: str) -> None:
    warnings.warn(
        f'No pinned memory for a staging buffer ({reason}). Batches are staged in pageable memory, '
        'which makes their transfer block the loader thread. Raise the limit of locked memory '
        '(`ulimit -l`) or lower `prefetch_depth`.',
        stacklevel=2,
    )
