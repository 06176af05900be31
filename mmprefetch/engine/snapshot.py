# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Snapshots of a batch and of a preprocessor's fields: has anything changed since?

Work is begun ahead of the step. A hook that changes the batch or the preprocessor in between has
to count, as under mmengine's own loops, so whoever collects the work asks the snapshots first.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, ValuesView
from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn

# Items that neither lead to tensors nor change in place.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})
_MISSING = object()


def _is_counted(tensor: torch.Tensor) -> bool:
    """Whether torch counts the writes to a tensor, and it has one block of memory."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_inference()


class _TensorStates:
    """What changes when tensors are written in place, or are given other data or dimensions.

    To look at a batch again is work of the thread that trains, so nothing is built on the way.

    Args:
        tensors (Iterable[torch.Tensor]): Others than those whose writes torch counts are left out.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        shared: dict[tuple, tuple] = {}  # most tensors of a batch are of a few shapes
        self._states = [
            (
                tensor,
                tensor._version,
                tensor.data_ptr(),
                shared.setdefault(tensor.shape, tensor.shape),
                None if tensor.is_contiguous() else tensor.stride(),
                tensor.requires_grad,
            )
            for tensor in filter(_is_counted, tensors)
        ]

    def changed(self) -> bool:
        """bool: Whether a tensor is no longer what it was."""
        for tensor, version, pointer, shape, stride, requires_grad in self._states:
            if (
                tensor._version != version
                or tensor.data_ptr() != pointer
                or tensor.shape != shape
                or not (tensor.is_contiguous() if stride is None else tensor.stride() == stride)
                or tensor.requires_grad != requires_grad
            ):
                return True
        return False


class BatchSnapshot:
    """Remembers what a batch consists of.

    What cannot be noticed are changes inside other mutable objects, such as numpy arrays, and
    writes to a tensor that torch does not count (through ``tensor.data`` or an array that shares
    its memory, or a sparse tensor).

    Args:
        batch (Any): The batch.
    """

    def __init__(self, batch: Any) -> None:
        self._views: list[Collection] = []  # live: they show what their container holds now
        tensors: list[torch.Tensor] = []
        self._walk(batch, tensors, {})
        self._lengths = list(map(len, self._views))
        # Held, so that no other object can get the identity of one of them.
        self._items = list(chain.from_iterable(self._views))
        self._states = _TensorStates(tensors)

    def changed(self) -> bool:
        """bool: Whether the batch is no longer what it was."""
        return not (
            list(map(len, self._views)) == self._lengths
            and all(map(is_, chain.from_iterable(self._views), self._items))
            and not self._states.changed()
        )

    def _walk(self, thing: Any, tensors: list[torch.Tensor], seen: dict[int, Any]) -> None:
        if isinstance(thing, torch.Tensor):
            tensors.append(thing)
        elif isinstance(thing, (str, bytes, int, float)) or id(thing) in seen:
            return
        elif isinstance(thing, Mapping):
            seen[id(thing)] = thing
            # A subclass may make something else of `values`.
            plain = isinstance(thing, dict)
            values = dict.values(thing) if plain else ValuesView(thing)
            self._views += (dict.keys(thing) if plain else thing.keys(), values)
            self._walk_all(values, tensors, seen)
        elif isinstance(thing, Sequence):
            seen[id(thing)] = thing
            # Some sequences make their items anew each time that they are asked for them.
            if not isinstance(thing, tuple) and all(map(is_, thing, thing)):
                self._views.append(thing)
            self._walk_all(thing, tensors, seen)
        elif isinstance(thing, set):  # such as the names of a data element's fields
            self._views.append(thing)
        elif hasattr(thing, 'to'):
            seen[id(thing)] = thing
            fields = getattr(thing, '__dict__', {}).values()
            self._views.append(fields)
            self._walk_all(fields, tensors, seen)

    def _walk_all(
        self, things: Collection, tensors: list[torch.Tensor], seen: dict[int, Any]
    ) -> None:
        if not _PLAIN.issuperset(map(type, things)):
            for thing in things:
                self._walk(thing, tensors, seen)


class FieldSnapshot:
    """Remembers the attributes, buffers, parameters and submodules of some modules.

    Args:
        modules (Iterable[nn.Module]): The modules whose fields count.
        mode_counts (bool): Whether ``training``, which follows the model's mode, is a field too.

    Attributes:
        modules (list[nn.Module]): The same.
    """

    def __init__(self, modules: Iterable[nn.Module], mode_counts: bool = False) -> None:
        self.modules = list(modules)
        self._ignored = frozenset() if mode_counts else frozenset({'training'})
        self._tables = [
            table
            for module in self.modules
            for table in (vars(module), module._buffers, module._parameters, module._modules)
        ]
        self._views = [table.values() for table in self._tables]
        self._values = list(chain.from_iterable(self._views))
        self._then = list(map(dict, self._tables))
        self._states = _TensorStates(
            value for value in self._values if isinstance(value, torch.Tensor)
        )

    def changed(self, but: Collection[str] = ()) -> bool:
        """Whether a field is no longer what it was.

        Args:
            but (Collection[str]): Names of attributes that do not count.

        Returns:
            bool: True if an attribute is another object, or a tensor was written in place.
        """
        return self._states.changed() or (
            not self._are_the_same() and any(name not in but for name in self._differing())
        )

    def _are_the_same(self) -> bool:
        return sum(map(len, self._views)) == len(self._values) and all(
            map(is_, chain.from_iterable(self._views), self._values)
        )

    def _differing(self) -> Iterator[str]:
        for now, then in zip(self._tables, self._then, strict=True):
            for name in (now.keys() | then) - self._ignored:
                if now.get(name, _MISSING) is not then.get(name, _MISSING):
                    yield name
