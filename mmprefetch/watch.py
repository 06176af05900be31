# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Notice that a batch was changed between the moment its work was begun and the model's step."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from operator import is_
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
        self._sequences: list[Collection] = []
        self._mappings: list[Mapping] = []
        self._fields: list[dict] = []
        self._plain: list[tuple[list, list]] = []
        self._sets: list[set] = []  # of data elements, the names of their fields
        self._walk(batch, {})
        contents = self._contents()
        self._lengths = list(map(len, chain(contents, self._sets)))
        # Held, so that no other object can get one of their identities.
        self._held = list(chain.from_iterable(contents))
        self._keys = list(map(list, self._mappings))
        self._floats = [tensor for tensor in self._tensors if tensor.dtype.is_floating_point]
        self._states = self._states_now()

    def changed(self) -> bool:
        """bool: Whether the batch is no longer what it was."""
        contents = self._contents()
        return (
            list(map(len, chain(contents, self._sets))) != self._lengths
            or not all(map(is_, chain.from_iterable(contents), self._held))
            or list(map(list, self._mappings)) != self._keys
            or any(now != then for now, then in self._plain)
            or self._states_now() != self._states
        )

    def _contents(self) -> list[Collection]:
        mappings = (*self._mappings, *self._fields)
        return [*self._sequences, *[mapping.values() for mapping in mappings]]

    def _states_now(self) -> tuple[list, list[bool]]:
        return _states(self._tensors), [tensor.requires_grad for tensor in self._floats]

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
                self._sequences.append(thing)
            for item in thing:
                self._walk(item, seen)
        elif isinstance(thing, Mapping):
            seen[id(thing)] = thing
            self._mappings.append(thing)
            for item in thing.values():
                self._walk(item, seen)
        elif isinstance(thing, set):
            self._sets.append(thing)
        elif hasattr(thing, 'to'):
            seen[id(thing)] = thing
            fields = getattr(thing, '__dict__', {})
            self._fields.append(fields)
            for item in fields.values():
                self._walk(item, seen)


def _states(tensors: list[torch.Tensor]) -> list:
    """What changes when tensors are written in place, or are given other data or dimensions."""
    states: list = []
    for tensor in tensors:  # each touched once: by now they are no longer in the caches
        states += (tensor._version, tensor.data_ptr(), tensor.stride(), tensor.numel())
    return states


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
        self._then = self._now()

    def changed(self) -> bool:
        """bool: Whether a field is no longer what it was when this was last asked."""
        before, self._then = self._then, self._now()
        return not _are(self._then[0], before[0]) or self._then[1] != before[1]

    def _now(self) -> tuple[list, list]:
        objects: list[Any] = []
        tensors = []
        for module in self._module.modules():
            if self._attributes:
                objects += [v for name, v in vars(module).items() if name not in self._IGNORED]
            for tensor in (*module._buffers.values(), *module._parameters.values()):
                objects.append(tensor)
                if tensor is not None and _is_counted(tensor):
                    tensors.append(tensor)
        return objects, _states(tensors)
