# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Notice that a batch was changed between the moment its work was begun and the model's step."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence, ValuesView
from itertools import chain
from operator import eq, is_
from typing import Any

import torch
from torch import nn

# Lists of nothing else are compared by value, in far less time than item by item.
_PLAIN = frozenset({int, float, bool, str, bytes, type(None)})


class Watch:
    """Remembers what a batch consists of.

    Hooks may change a batch before the model sees it: put another object anywhere into it, or
    write to a tensor in place. Work begun before that is out of date. What cannot be noticed are
    changes inside other mutable objects, such as numpy arrays, and writes to a tensor that torch
    does not count (through ``tensor.data`` or an array that shares its memory, or a sparse tensor).

    Args:
        batch (Any): The batch.
    """

    def __init__(self, batch: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        self._mappings: list[Mapping] = []
        self._contents: list[Collection] = []  # sequences, and live views of values
        self._plain: list[tuple[list, list]] = []
        self._sets: list[set] = []  # of data elements, the names of their fields
        self._walk(batch, {})
        self._lengths = list(map(len, chain(self._contents, self._sets)))
        # Held, so that no other object can get one of their identities.
        self._held = list(chain.from_iterable(self._contents))
        self._keys = list(map(list, self._mappings))
        self._floats = [tensor for tensor in self._tensors if tensor.dtype.is_floating_point]
        self._required = [tensor.requires_grad for tensor in self._floats]
        self._states = _States(self._tensors)

    def changed(self) -> bool:
        """bool: Whether the batch is no longer what it was."""
        return not (
            all(map(eq, map(len, chain(self._contents, self._sets)), self._lengths))
            and all(map(is_, chain.from_iterable(self._contents), self._held))
            and all(map(eq, map(list, self._mappings), self._keys))
            and all(now == then for now, then in self._plain)
            and not self._states.changed()
            and [tensor.requires_grad for tensor in self._floats] == self._required
        )

    def _walk(self, thing: Any, seen: dict[int, Any]) -> None:
        if isinstance(thing, torch.Tensor):
            if _is_counted(thing):
                self._tensors.append(thing)
        elif isinstance(thing, (str, bytes, int, float)) or id(thing) in seen:
            return
        elif isinstance(thing, Sequence):
            seen[id(thing)] = thing
            if type(thing) is list and _PLAIN.issuperset(map(type, thing)):
                self._plain.append((thing, thing.copy()))
                return
            # Some sequences make their items anew each time that they are asked for them.
            if not isinstance(thing, tuple) and all(map(is_, thing, thing)):
                self._contents.append(thing)
            for item in thing:
                self._walk(item, seen)
        elif isinstance(thing, Mapping):
            seen[id(thing)] = thing
            self._mappings.append(thing)
            self._contents.append(_values(thing))
            for item in _values(thing):
                self._walk(item, seen)
        elif isinstance(thing, set):
            self._sets.append(thing)
        elif hasattr(thing, 'to'):
            seen[id(thing)] = thing
            fields = getattr(thing, '__dict__', {})
            self._contents.append(fields.values())
            for item in fields.values():
                self._walk(item, seen)


def _values(mapping: Mapping) -> Collection:
    """A view of a mapping's values that stays true, whatever a subclass makes of ``values``."""
    return dict.values(mapping) if isinstance(mapping, dict) else ValuesView(mapping)


class _States:
    """What changes when tensors are written in place, or are given other data or dimensions.

    To look at a batch again is work of the thread that trains, and by then nothing of it is in
    the processor's caches: each tensor is touched once, nothing is built, and what is compared
    with lies side by side or is shared by many tensors.

    Args:
        tensors (list[torch.Tensor]): Strided tensors.
    """

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        shared: dict = {}
        self._tensors = tensors
        self._pointers = array('Q', [tensor.data_ptr() for tensor in tensors])
        self._versions = [tensor._version for tensor in tensors]
        strides = [tensor.stride() for tensor in tensors]
        self._strides = list(map(shared.setdefault, strides, strides))
        self._numels = [tensor.numel() for tensor in tensors]

    def changed(self) -> bool:
        """bool: Whether one of the tensors is no longer what it was."""
        now_and_then = zip(
            self._tensors, self._versions, self._pointers, self._strides, self._numels, strict=True
        )
        for tensor, version, pointer, stride, numel in now_and_then:
            if (
                tensor._version != version
                or tensor.data_ptr() != pointer
                or tensor.stride() != stride
                or tensor.numel() != numel
            ):
                return True
        return False


def _is_counted(tensor: torch.Tensor) -> bool:
    """Whether torch counts the writes to a tensor, and it has one block of memory."""
    return tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_inference()


def _are(now: list, then: list) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


class FieldWatch:
    """Notices that a field of a preprocessor was changed, its tensors in place included.

    Args:
        module (nn.Module): The preprocessor.
        attributes (bool): Whether all of its attributes are fields. A class that is not known may
            keep books in them while it works; of that the tensors count.
    """

    # Neither is a field: the first follows the model's mode, the second is kept for a warning.
    _IGNORED = frozenset({'training', '_unseen_mean'})

    def __init__(self, module: nn.Module, attributes: bool) -> None:
        self._module = module
        self._attributes = attributes
        self._remember(self._objects())

    def changed(self) -> bool:
        """bool: Whether a field is no longer what it was when this was last asked."""
        objects = self._objects()
        if _are(objects, self._then) and not self._states.changed():
            return False
        self._remember(objects)
        return True

    def _remember(self, objects: list) -> None:
        self._then = objects
        tensors = (thing for thing in objects if isinstance(thing, torch.Tensor))
        self._states = _States([tensor for tensor in tensors if _is_counted(tensor)])

    def _objects(self) -> list:
        objects: list[Any] = []
        for module in self._module.modules():
            if self._attributes:
                objects += [v for name, v in vars(module).items() if name not in self._IGNORED]
            objects += (*module._buffers.values(), *module._parameters.values())
        return objects
