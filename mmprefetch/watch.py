# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Notice that a batch was changed between the moment its work was begun and the model's step."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from torch import nn


class Watch:
    """Remembers what a batch consists of.

    Hooks may change a batch before the model sees it: put another object anywhere into it, or
    write to a tensor in place. Work begun before that is out of date. What cannot be noticed are
    changes inside other mutable objects, such as numpy arrays, and writes to a tensor that torch
    does not count (through ``tensor.data`` or an array that shares its memory).

    Args:
        batch (Any): The batch.
    """

    def __init__(self, batch: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        self._lists: list[tuple[list, list]] = []
        self._mappings: list[tuple[Mapping, list, list]] = []
        self._objects: set[int] = set()
        self._walk(batch)
        self._states = list(map(_state, self._tensors))

    def changed(self) -> bool:
        """bool: Whether the batch is no longer what it was."""
        return (
            list(map(_state, self._tensors)) != self._states
            or not all(_are(now, then) for now, then in self._lists)
            or not all(
                list(mapping) == keys and _are(list(mapping.values()), values)
                for mapping, keys, values in self._mappings
            )
        )

    def _walk(self, thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            if not thing.is_inference():  # it has no version
                self._tensors.append(thing)
        elif isinstance(thing, list):
            self._lists.append((thing, list(thing)))
            for item in thing:
                self._walk(item)
        elif isinstance(thing, tuple):
            for item in thing:
                self._walk(item)
        elif isinstance(thing, Mapping):
            self._fields(thing)
        elif hasattr(thing, 'to') and id(thing) not in self._objects:  # it may refer to itself
            self._objects.add(id(thing))
            self._fields(getattr(thing, '__dict__', {}))

    def _fields(self, fields: Mapping) -> None:
        values = list(fields.values())
        self._mappings.append((fields, list(fields), values))
        for value in values:
            if not isinstance(value, (str, int, float)):
                self._walk(value)


def _state(tensor: torch.Tensor) -> tuple[int, int]:
    """What changes when a tensor is written in place, or its data replaced."""
    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor._version, 0
    return tensor._version, tensor.data_ptr()


def _are(now: list, then: list) -> bool:
    return len(now) == len(then) and all(map(is_, now, then))


class FieldWatch:
    """Notices that a field of a preprocessor was changed, its tensors in place included.

    Args:
        module (nn.Module): The preprocessor.
    """

    # Neither is a field: the first follows the model's mode, the second is kept for a warning.
    _IGNORED = frozenset({'training', '_unseen_mean'})

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._then = self._now()

    def changed(self) -> bool:
        """bool: Whether a field is no longer what it was when this was last asked."""
        before, self._then = self._then, self._now()
        return not _are(self._then[0], before[0]) or self._then[1] != before[1]

    def _now(self) -> tuple[list, list]:
        objects: list[Any] = []
        states = []
        for module in self._module.modules():
            objects += [v for name, v in vars(module).items() if name not in self._IGNORED]
            for tensor in (*module._buffers.values(), *module._parameters.values()):
                objects.append(tensor)
                if tensor is not None and not tensor.is_inference():
                    states.append(_state(tensor))
        return objects, states
