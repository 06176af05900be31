# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Give a batch memory of its own.

Without worker processes a dataset may hand out views of memory that its next item overwrites.
Under mmengine's loops the step is over by then; with look-ahead it is not, nor have the hooks and
metrics seen the batch. So each batch that is loaded early gets memory of its own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from mmengine.structures import BaseDataElement

from .elements import IMMUTABLE, is_ordinary, new_like
from .packing import copy_by_to


def own_memory(batch: Any) -> Any:
    """Copy a batch's tensors and arrays, and what holds them.

    Args:
        batch (Any): A batch as the collate function made it.

    Returns:
        Any: A batch of the same types and values that shares no tensor or array with it. What is
        one object at several places of it stays one. Objects that hold neither stay the same
        objects.
    """
    return _Copies().of(batch)


class _Copies:
    """Copies of the things in one batch, found again by the identity of the things."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}
        # Some containers make their items anew when asked: none may get the identity of another.
        self._originals: list[Any] = []

    def of(self, thing: Any) -> Any:
        if type(thing) in IMMUTABLE:
            return thing
        if id(thing) not in self._made:
            self._originals.append(thing)
            self._copy(thing)
        return self._made[id(thing)]

    def _note(self, thing: Any, copied: Any) -> Any:
        self._made[id(thing)] = copied
        return copied

    def _copy(self, thing: Any) -> None:
        """Note the copy of a thing; of a container before its items, which may lead back to it."""
        if isinstance(thing, torch.Tensor):
            # Strides are kept, since they may decide which kernel works on the tensor.
            self._note(thing, thing.detach().clone().requires_grad_(thing.requires_grad))
        elif isinstance(thing, np.ndarray):
            # An array of objects holds references, which may lead to such memory as well.
            deep = thing.dtype == object
            self._note(thing, copy.deepcopy(thing) if deep else thing.copy(order='K'))
        elif isinstance(thing, MutableMapping):
            copied = self._note(thing, copy.copy(thing))
            for key in thing:
                copied[key] = self.of(thing[key])
        elif isinstance(thing, Mapping):
            copied = self._note(thing, {})
            copied.update((key, self.of(thing[key])) for key in thing)
        elif isinstance(thing, list):
            copied = self._note(thing, copy.copy(thing))
            copied[:] = map(self.of, thing)
        elif isinstance(thing, tuple):
            items = map(self.of, thing)
            kind = type(thing)
            self._note(thing, kind(*items) if hasattr(thing, '_fields') else kind(items))
        elif isinstance(thing, BaseDataElement) and is_ordinary(thing):
            copied, fields = new_like(thing)
            self._note(thing, copied)
            for name in thing._data_fields & fields.keys():
                fields[name] = self.of(fields[name])
        elif hasattr(thing, 'to'):
            self._note(thing, _deep_copy(thing))
        elif isinstance(thing, (str, bytes)):
            self._note(thing, thing)
        elif isinstance(thing, (Sequence, set, frozenset)):
            items = list(thing)
            copies = list(map(self.of, items))
            same = all(map(is_, copies, items))  # a range cannot be made of its items
            self._note(thing, thing if same else type(thing)(copies))
        elif dataclasses.is_dataclass(thing) and not isinstance(thing, type):
            copied = self._note(thing, copy.copy(thing))
            for field in dataclasses.fields(thing):
                object.__setattr__(copied, field.name, self.of(getattr(thing, field.name)))
        else:
            self._note(thing, thing)


def _deep_copy(thing: Any) -> Any:
    try:
        return copy.deepcopy(thing)
    except TypeError:  # it holds what cannot be copied, such as a lock
        return copy_by_to(thing)
