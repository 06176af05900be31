# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Walk a nested batch as ``cast_data`` does, and leave the places of its tensors open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from mmengine.structures import BaseDataElement
from torch.overrides import TorchFunctionMode

from ..elements import is_ordinary, new_like

DIRECT = 1 << 20
"""Bytes. A tensor that is pinned already and at least this large goes from where it lies."""


class Entry(NamedTuple):
    """A tensor of a batch, and where its moved copy belongs.

    Attributes:
        tensor (torch.Tensor): The tensor.
        container (Any): A dict or list of the structure that is built.
        key (Any): The key or index in it.
    """

    tensor: torch.Tensor
    container: Any
    key: Any


class Layout:
    """The structure that ``BaseDataPreprocessor.cast_data`` builds, with its tensors left out.

    Its methods mirror the cases of ``cast_data``.

    Args:
        batch (Any): A batch as the collate function made it.
        device (torch.device): Where its tensors will go.

    Attributes:
        packed (list[Entry]): Tensors for the staging buffer.
        direct (list[Entry]): Tensors that are moved the ordinary way.
        on_device (list[torch.Tensor]): Those of them that are on an accelerator already.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self.device = device
        self.packed: list[Entry] = []
        self.direct: list[Entry] = []
        self.on_device: list[torch.Tensor] = []
        self._root: list = [None]
        # Objects with a `to` of their own, and the holders of the tensors that it moves, in order.
        self._objects: list[tuple[Any, list[list], Any, Any]] = []
        # Immutable sequences, inner ones first.
        self._frozen: list[tuple[type, list, Any, Any]] = []
        self._walk(batch, self._root, 0)

    def complete(self) -> Any:
        """Put together what needs its tensors first, when all places are filled.

        Returns:
            Any: The batch on the device.
        """
        for thing, holders, container, key in self._objects:
            with _Replay([holder[0] for holder in holders], self.device):
                container[key] = thing.to(self.device, non_blocking=False)
        for kind, items, container, key in self._frozen:
            container[key] = kind(*items) if hasattr(kind, '_fields') else kind(items)
        return self._root[0]

    def _walk(self, data: Any, container: Any, key: Any) -> None:
        if isinstance(data, torch.Tensor):
            self._tensor(data, container, key)
        elif isinstance(data, Mapping):
            container[key] = copied = dict.fromkeys(data)
            for name in data:
                self._walk(data[name], copied, name)
        elif isinstance(data, (str, bytes)) or data is None:
            container[key] = data
        elif isinstance(data, BaseDataElement):
            self._element(data, container, key)
        elif isinstance(data, Sequence):
            items: list = [None] * len(data)
            for index, item in enumerate(data):
                self._walk(item, items, index)
            if type(data) is list:
                container[key] = items
            else:
                self._frozen.append((type(data), items, container, key))
        else:
            container[key] = data

    def _tensor(self, data: torch.Tensor, container: Any, key: Any) -> None:
        on_host = is_on_host(data)
        if not on_host:
            self.on_device.append(data)
        ordinary = (
            on_host
            and type(data) is torch.Tensor
            and data.layout == torch.strided
            and not (data.requires_grad or data.is_quantized or data.is_nested)
            and not (data.is_conj() or data.is_neg())
            and not (data.nbytes >= DIRECT and self.device.type != 'cpu' and data.is_pinned())
        )
        (self.packed if ordinary else self.direct).append(Entry(data, container, key))

    def _element(self, data: BaseDataElement, container: Any, key: Any) -> None:
        if not is_ordinary(data):
            self._object(data, container, key)
            return
        copied, fields = new_like(data)
        container[key] = copied
        for name in data._data_fields & fields.keys():  # a property's value has another name
            value = fields[name]
            if isinstance(value, torch.Tensor):
                self._tensor(value, fields, name)
            elif isinstance(value, BaseDataElement):
                self._element(value, fields, name)
            elif hasattr(value, 'to'):
                self._object(value, fields, name)

    def _object(self, data: Any, container: Any, key: Any) -> None:
        """Something whose own ``to`` decides what it holds: see which tensors that moves."""
        with _Record(self.device) as record:
            data.to(self.device, non_blocking=False)
        holders: list[list] = []
        for tensor in record.tensors:
            holders.append([None])
            self._tensor(tensor, holders[-1], 0)
        self._objects.append((data, holders, container, key))


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor is complete: on an accelerator some stream may still be writing it."""
    return tensor.device.type == 'cpu'


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
