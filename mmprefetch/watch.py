# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Notice that a batch was changed between the moment its work was begun and the model's step."""

from __future__ import annotations

from collections.abc import Mapping
from operator import is_
from typing import Any

import torch
from mmengine.structures import BaseDataElement


class Watch:
    """Remembers what a batch consists of.

    Hooks may change a batch before the model sees it: put another object anywhere into it, or
    write to a tensor in place. Work begun before that is out of date. What cannot be noticed is
    a change inside other mutable objects, such as numpy arrays.

    Args:
        batch (Any): The batch.
    """

    def __init__(self, batch: Any) -> None:
        self._tensors: list[torch.Tensor] = []
        self._holders: list[tuple[Any, list]] = []
        self._named: list[tuple[dict, list]] = []
        self._walk(batch)
        self._versions = [tensor._version for tensor in self._tensors]

    def changed(self) -> bool:
        """bool: Whether the batch is no longer what it was."""
        return (
            [tensor._version for tensor in self._tensors] != self._versions
            or any(
                len(holder) != len(items) or not all(map(is_, holder, items))
                for holder, items in self._holders
            )
            or any(list(holder) != names for holder, names in self._named)
        )

    def _walk(self, thing: Any) -> None:
        if isinstance(thing, torch.Tensor):
            if not thing.is_inference():  # it has no version
                self._tensors.append(thing)
        elif isinstance(thing, list):
            self._holders.append((thing, list(thing)))
            for item in thing:
                self._walk(item)
        elif isinstance(thing, tuple):
            for item in thing:
                self._walk(item)
        elif isinstance(thing, Mapping):
            self._fields(thing)
        elif isinstance(thing, BaseDataElement) or hasattr(thing, 'to'):
            self._fields(getattr(thing, '__dict__', {}))

    def _fields(self, fields: Mapping) -> None:
        values = fields.values()
        self._holders.append((values, list(values)))
        self._named.append((fields, list(fields)))
        for value in values:
            if not isinstance(value, (str, int, float)):
                self._walk(value)
