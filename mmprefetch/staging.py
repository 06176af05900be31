# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Staging: pack the tensors of a nested batch into one buffer, and unpack views of its copy.

A batch goes through two steps. :func:`stage` runs where the batch is loaded: it copies every CPU
tensor into one staging buffer and builds the structure that
``BaseDataPreprocessor.cast_data`` would build, with the tensors' places left open.
:meth:`StagedBatch.deliver` runs where the copy to the device is issued: one copy of the buffer,
then each place is filled with a view of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from mmengine.structures import BaseDataElement
from torch.overrides import TorchFunctionMode

ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple of it, so that any dtype can be viewed and vector
loads are aligned."""

DIRECT = 1 << 20
"""Bytes. A tensor that is pinned already and at least this large goes from where it lies."""

Place = tuple[Any, Any]
"""A container (dict or list) and the key or index at which a tensor of the result belongs."""


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

    Args:
        buffer (torch.Tensor): uint8, all packed tensors.
        packed (dict): For each dtype, ``(start, lengths, fills)``: the byte where its tensors
            begin, the element counts to split at, and how each piece is viewed and placed.
        direct (list): ``(tensor, place)`` of tensors that are moved the ordinary way.
        foreign (list): ``(object, pieces, place)`` of objects with a ``to`` of their own.
        rebuild (list): ``(type, items, place)`` of immutable sequences, inner ones first.
        root (list): Holds the result at index 0.
        slot (int | None): The buffer's slot in its ring.
    """

    def __init__(self, buffer, packed, direct, foreign, rebuild, root, slot) -> None:
        self.buffer: torch.Tensor = buffer
        self.slot: int | None = slot
        self._packed = packed
        self._direct = direct
        self._foreign = foreign
        self._rebuild = rebuild
        self._root = root

    def deliver(self, device: torch.device) -> tuple[Any, list[torch.Tensor]]:
        """Issue the copy to the device and fill the structure in. To be called once.

        Args:
            device (torch.device): Where the tensors go. When it is the CPU they become views of
                the staging buffer itself.

        Returns:
            tuple: The batch as ``BaseDataPreprocessor.cast_data`` returns it, and one tensor for
            each block of device memory that it lies in.
        """
        # A buffer of a ring is going to be written again, so what is delivered never aliases it.
        flat = self.buffer.to(device, non_blocking=True, copy=self.slot is not None)
        blocks = [flat] if flat.numel() else []
        for dtype, (start, lengths, fills) in self._packed.items():
            stop = start + sum(lengths) * dtype.itemsize
            pieces = flat[start:stop].view(dtype).split_with_sizes(lengths)
            for piece, (shape, strides, (container, key)) in zip(pieces[::2], fills, strict=True):
                container[key] = _view(piece, shape, strides)
        for tensor, (container, key) in self._direct:
            strided = tensor.layout == torch.strided
            moved = tensor.to(device, non_blocking=strided and tensor.is_pinned())
            container[key] = moved
            blocks += [moved] if strided else _parts(moved)
        for thing, moved, (container, key) in self._foreign:
            with _Replay([holder[0] for holder in moved], device):
                container[key] = thing.to(device)
        for kind, items, (container, key) in self._rebuild:
            container[key] = kind(*items) if hasattr(kind, '_fields') else kind(items)
        return self._root[0], blocks


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
    return _Packer(device).pack(batch, ring)


class _Packer:
    """Walks one batch. Its methods mirror the cases of ``cast_data``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.by_dtype: dict[torch.dtype, list[tuple[torch.Tensor, Place]]] = {}
        self.direct: list[tuple[torch.Tensor, Place]] = []
        self.foreign: list[tuple[Any, list[list], Place]] = []
        self.rebuild: list[tuple[type, list, Place]] = []

    def pack(self, batch: Any, ring: PinnedRing | None) -> StagedBatch:
        root: list = [None]
        self.walk(batch, root, 0)
        packed, total = {}, 0
        for dtype, entries in self.by_dtype.items():
            lengths, fills, start = [], [], total
            for tensor, place in entries:
                count = tensor.numel()
                used = count * dtype.itemsize
                padded = -used % ALIGNMENT
                lengths += [count, padded // dtype.itemsize]
                strides = None if tensor.is_contiguous() else _kept_strides(tensor)
                fills.append((tensor.shape, strides, place))
                total += used + padded
            packed[dtype] = (start, lengths, fills)
        if ring is not None and total:
            buffer, slot = ring.take(total)
        else:
            buffer, slot = torch.empty(total, dtype=torch.uint8), None
        for dtype, (start, lengths, fills) in packed.items():
            stop = start + sum(lengths) * dtype.itemsize
            pieces = buffer[start:stop].view(dtype).split_with_sizes(lengths)
            for piece, (shape, strides, _), (tensor, _) in zip(
                pieces[::2], fills, self.by_dtype[dtype], strict=True
            ):
                if tensor.numel():
                    _view(piece, shape, strides).copy_(tensor)
        return StagedBatch(buffer, packed, self.direct, self.foreign, self.rebuild, root, slot)

    def walk(self, data: Any, container: Any, key: Any) -> None:
        if isinstance(data, torch.Tensor):
            self.tensor(data, container, key)
        elif isinstance(data, Mapping):
            copied: dict = {}
            container[key] = copied
            for name in data:
                copied[name] = None
                self.walk(data[name], copied, name)
        elif isinstance(data, (str, bytes)) or data is None:
            container[key] = data
        elif isinstance(data, BaseDataElement):
            self.element(data, container, key)
        elif isinstance(data, Sequence):
            items: list = [None] * len(data)
            for index, item in enumerate(data):
                self.walk(item, items, index)
            if type(data) is list:
                container[key] = items
            else:
                self.rebuild.append((type(data), items, (container, key)))
        else:
            container[key] = data

    def tensor(self, data: torch.Tensor, container: Any, key: Any) -> None:
        if (
            type(data) is not torch.Tensor
            or data.layout != torch.strided
            or data.requires_grad
            or data.device.type != 'cpu'
            or data.is_quantized
            or data.is_conj()
            or data.is_neg()
            or (data.nbytes >= DIRECT and self.device.type != 'cpu' and data.is_pinned())
        ):
            self.direct.append((data, (container, key)))
        else:
            self.by_dtype.setdefault(data.dtype, []).append((data, (container, key)))

    def element(self, data: BaseDataElement, container: Any, key: Any) -> None:
        kind = type(data)
        if kind.to is not BaseDataElement.to or kind.new is not BaseDataElement.new:
            self.object(data, container, key)
            return
        # `new` copies the metainfo deeply, which is what makes `to` slow: it is done here, off
        # the thread that trains.
        copied = data.new()
        container[key] = copied
        for name, value in data.items():
            if hasattr(value, 'to'):
                fields = vars(copied)
                # A property keeps its value under a leading underscore.
                held = next((n for n in (name, '_' + name) if fields.get(n) is value), None)
                place = (fields, held) if held is not None else (_Setter(copied), name)
                if isinstance(value, torch.Tensor):
                    self.tensor(value, *place)
                elif isinstance(value, BaseDataElement):
                    self.element(value, *place)
                else:
                    self.object(value, *place)

    def object(self, data: Any, container: Any, key: Any) -> None:
        """Something whose own ``to`` decides what it holds: see which tensors that moves."""
        with _Record(self.device) as record:
            data.to(self.device)
        moved: list[list] = []
        for tensor in record.tensors:
            holder: list = [None]
            self.tensor(tensor, holder, 0)
            moved.append(holder)
        self.foreign.append((data, moved, (container, key)))


class _Setter:
    """Lets an attribute be filled like a key."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __setitem__(self, name: str, value: Any) -> None:
        setattr(self._target, name, value)


class _Record(TorchFunctionMode):
    """Notes, in order, the tensors that are moved to the device; moves none."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.tensors: list[torch.Tensor] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _moves_to(self.device, func, args, kwargs):
            self.tensors.append(args[0])
            return args[0]
        return func(*args, **kwargs)


class _Replay(TorchFunctionMode):
    """Answers each move to the device with the tensor that is there already."""

    def __init__(self, moved: list[torch.Tensor], device: torch.device) -> None:
        super().__init__()
        self._moved = iter(moved)
        self.device = device

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _moves_to(self.device, func, args, kwargs):
            return next(self._moved)
        return func(*args, **kwargs)


def _moves_to(device: torch.device, func: Any, args: tuple, kwargs: dict) -> bool:
    """Whether a call is ``tensor.to(device)`` and changes nothing else."""
    if func is not torch.Tensor.to or (len(args) > 1 and isinstance(args[1], torch.Tensor)):
        return False
    target, dtype, _, memory_format = torch._C._nn._parse_to(*args[1:], **kwargs)
    return target == device and dtype is None and memory_format is None


def _parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The strided tensors that a sparse tensor is made of."""
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _view(piece: torch.Tensor, shape: torch.Size, strides: tuple | None) -> torch.Tensor:
    return piece.view(shape) if strides is None else piece.as_strided(shape, strides)


def _kept_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that ``tensor.to(device)`` would give: kept where memory is dense."""
    strides = torch.empty_like(tensor, device='meta').stride()
    return None if strides == torch.empty(tensor.shape, device='meta').stride() else strides
