# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Walk a nested batch as ``cast_data`` does, and leave the places of its tensors open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from mmengine.structures import BaseDataElement
from torch.overrides import TorchFunctionMode

from .elements import is_ordinary, new_like
from .sections import Entry, Place

DIRECT = 1 << 20
"""Bytes. A tensor that is pinned already and at least this large goes from where it lies."""


class Skeleton:
    """The structure that ``BaseDataPreprocessor.cast_data`` builds, with its tensors left out.

    Its methods mirror the cases of ``cast_data``.

    Args:
        batch (Any): A batch as the collate function made it.
        device (torch.device): Where its tensors will go.

    Attributes:
        root (list): Holds the structure at index 0.
        packed (list): ``(tensor, place)`` of tensors for the staging buffer.
        direct (list): ``(tensor, place)`` of tensors that are moved the ordinary way.
        foreign (list): ``(object, moved, place)`` of objects with a ``to`` of their own; ``moved``
            holds the places of the tensors that it moves, in order.
        rebuild (list): ``(type, items, place)`` of immutable sequences, inner ones first.
    """

    def __init__(self, batch: Any, device: torch.device) -> None:
        self.device = device
        self.root: list = [None]
        self.packed: list[Entry] = []
        self.direct: list[Entry] = []
        self.foreign: list[tuple[Any, list[list], Place]] = []
        self.rebuild: list[tuple[type, list, Place]] = []
        self.walk(batch, self.root, 0)

    def complete(self) -> Any:
        """Put together what needs its tensors first, when all places are filled.

        Returns:
            Any: The batch on the device.
        """
        for thing, moved, (container, key) in self.foreign:
            with _Replay([holder[0] for holder in moved], self.device):
                container[key] = thing.to(self.device, non_blocking=False)
        for kind, items, (container, key) in self.rebuild:
            container[key] = kind(*items) if hasattr(kind, '_fields') else kind(items)
        return self.root[0]

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
            or data.is_nested
            or data.is_conj()
            or data.is_neg()
            or (data.nbytes >= DIRECT and self.device.type != 'cpu' and data.is_pinned())
        ):
            self.direct.append((data, (container, key)))
        else:
            self.packed.append((data, (container, key)))

    def element(self, data: BaseDataElement, container: Any, key: Any) -> None:
        if not is_ordinary(data):
            self.object(data, container, key)
            return
        copied, fields = new_like(data)
        container[key] = copied
        for name in data._data_fields & fields.keys():  # a property's value has another name
            value = fields[name]
            if isinstance(value, torch.Tensor):
                self.tensor(value, fields, name)
            elif isinstance(value, BaseDataElement):
                self.element(value, fields, name)
            elif hasattr(value, 'to'):
                self.object(value, fields, name)

    def object(self, data: Any, container: Any, key: Any) -> None:
        """Something whose own ``to`` decides what it holds: see which tensors that moves."""
        with _Record(self.device) as record:
            data.to(self.device, non_blocking=False)
        moved: list[list] = []
        for tensor in record.tensors:
            holder: list = [None]
            self.tensor(tensor, holder, 0)
            moved.append(holder)
        self.foreign.append((data, moved, (container, key)))


def copy_by_to(thing: Any) -> Any:
    """Copy an object by its own ``to``: each tensor that this moves is copied.

    Args:
        thing (Any): An object with a ``to``.

    Returns:
        Any: The copy; the same object where ``to`` moves no tensor.
    """
    device = torch.device('cpu')
    with _Record(device) as record:
        thing.to(device)
    if not record.tensors:
        return thing
    with _Replay([tensor.clone() for tensor in record.tensors], device):
        return thing.to(device)


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
