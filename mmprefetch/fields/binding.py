# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fields that one preprocessor ends up with, and what two such sets of fields differ in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .classes import constructor_fields

# Three names for one decision: whether the order of the channels is reversed.
CHANNEL_ORDER = ('to_rgb', 'bgr_to_rgb', 'rgb_to_bgr')
# What that decision is called among differences.
REVERSAL = 'channel order'


@dataclass
class Binding:
    """The effective fields of a preprocessor.

    Attributes:
        split (str): 'train', 'val' or 'test'.
        cls (Callable): The preprocessor's class.
        fields (dict): The fields that are set; the defaults of the class hold for all others.
        origin (dict[str, str]): The config key that each of them comes from.
        overridden (dict[str, list[tuple[str, Any]]]): The (config key, value) pairs that a field
            had at lower precedence, lowest first. May name a field that is no longer set, as
            where ``rgb_to_bgr`` replaced ``bgr_to_rgb``.
        part (str): The config key of the dataset; empty if it holds for the whole split.
        parts (list[Binding]): Of a split whose datasets differ in what their samples are
            normalised with, the binding of each; else empty.
    """

    split: str
    cls: Callable
    fields: dict
    origin: dict[str, str]
    overridden: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    part: str = ''
    parts: list[Binding] = field(default_factory=list)

    @property
    def type_name(self) -> str:
        """str: The name of the preprocessor's class."""
        return getattr(self.cls, '__name__', str(self.cls))

    @property
    def reverses_channels(self) -> bool:
        """bool: Whether the preprocessor reverses the order of the channels."""
        return any(self.value(name) for name in CHANNEL_ORDER)

    def value(self, name: str) -> Any:
        """Give the value of a field.

        Args:
            name (str): The field.

        Returns:
            Any: What is set, else the class's default, None if it has none.
        """
        if name in self.fields:
            return self.fields[name]
        return constructor_fields(self.cls)[0].get(name)

    def differences(self, other: Binding) -> dict[str, tuple[Any, Any]]:
        """Compare with the fields of another preprocessor.

        A field that one of them leaves out is at its default there.

        Args:
            other (Binding): The other.

        Returns:
            dict[str, tuple]: For each field that differs the value here and there. Whether channels
            are reversed is compared as one, under the name :data:`REVERSAL`.
        """
        names = dict.fromkeys([*self.fields, *other.fields])
        values = {
            name: (plain(self.value(name)), plain(other.value(name)))
            for name in names
            if name not in CHANNEL_ORDER
        }
        values[REVERSAL] = (self.reverses_channels, other.reverses_channels)
        return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def same(a: Any, b: Any) -> bool:
    """Whether two values of a field mean the same, whatever sequences they are written as.

    Args:
        a (Any): A value from a config.
        b (Any): Another.

    Returns:
        bool: True if they are equal with tuples, arrays and tensors read as lists.
    """
    return plain(a) == plain(b)


def plain(value: Any) -> Any:
    """Turn the tuples, arrays and tensors in a field's value into lists.

    Args:
        value (Any): A value from a config.

    Returns:
        Any: The same, in lists, dicts and what they hold.
    """
    if hasattr(value, 'tolist'):
        value = value.tolist()
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def table(bindings: Sequence[Binding]) -> str:
    """Show the effective fields and where each came from.

    Args:
        bindings (Sequence[Binding]): One for each split, or for each dataset where they differ.

    Returns:
        str: A table in aligned columns: split, field, value, from.
    """
    rows = [('split', 'field', 'value', 'from')]
    for binding in bindings:
        split = f'{binding.split} ({binding.part})' if binding.part else binding.split
        rows += [
            (split, name, repr(plain(value)), binding.origin[name])
            for name, value in binding.fields.items()
        ]
        if not binding.fields:
            rows.append((split, '-', f'defaults of {binding.type_name}', '-'))
    return '\n'.join(aligned(rows))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write the rows of a table in columns of equal width.

    Args:
        rows (Sequence[Sequence[str]]): The cells, row by row.

    Returns:
        list[str]: The lines.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ['  '.join(map(str.ljust, row, widths)).rstrip() for row in rows]
