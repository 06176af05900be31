# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Merge, check and show the preprocessor fields bound to the datasets of a split."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any

import torch

from .classes import accepts_any, field_default, nearest, valid_fields
from .datasets import DatasetPart, FieldSource

# Said of a preprocessor, these are no arguments of the class that it wraps.
NOT_FIELDS = frozenset({'type', 'wraps', 'prefetch_safe', '_scope_'})
# Three names for one decision: whether the order of the channels is reversed.
CHANNEL_ORDER = ('to_rgb', 'bgr_to_rgb', 'rgb_to_bgr')
BY_SAMPLE = frozenset({'mean', 'std', *CHANNEL_ORDER})
# What is subtracted and divided by; mmpretrain's `TwoNormDataPreprocessor` has both pairs.
STATISTICS = (('mean', 'std'), ('second_mean', 'second_std'))
# The field of mmdet's `MultiBranchDataPreprocessor` that holds the config of another preprocessor.
INNER = 'data_preprocessor'


@dataclass
class Binding:
    """The effective fields of a preprocessor.

    Attributes:
        split (str): 'train', 'val' or 'test'.
        type_name (str): The name of the preprocessor's class.
        fields (dict): The fields that are set; its defaults hold for all others.
        origin (dict[str, str]): The config key that each of them comes from.
        overridden (dict[str, list[tuple[str, Any]]]): The (config key, value) pairs that a field
            had at lower precedence, lowest first. May name a field that is no longer set, as
            where ``rgb_to_bgr`` replaced ``bgr_to_rgb``.
        part (str): The config key of the dataset; empty if it holds for the whole split.
        parts (list[Binding]): Of a split whose datasets differ in what their samples are
            normalised with, the binding of each; else empty.
    """

    split: str
    type_name: str
    fields: dict
    origin: dict[str, str]
    overridden: dict[str, list[tuple[str, Any]]] = field(default_factory=dict)
    part: str = ''
    parts: list['Binding'] = field(default_factory=list)


def resolve(split: str, cls: Callable, sources: Sequence[FieldSource]) -> Binding:
    """Merge the fields from several places field by field, and check the result.

    The three names of the channel order count as one field: the highest place that gives any of
    them decides. ``to_rgb`` and ``bgr_to_rgb`` are translated to the one that the class has.

    Args:
        split (str): 'train', 'val' or 'test'.
        cls (Callable): The class of the preprocessor that the fields are for.
        sources (Sequence[FieldSource]): The places, lowest precedence first.

    Returns:
        Binding: The effective fields and where they come from.

    Raises:
        ValueError: If a field is unknown, if two fields of one place disagree, if mean comes
            without std or the reverse, or if their values can't be used. The message names the
            config key.
    """
    binding = Binding(split, getattr(cls, '__name__', str(cls)), {}, {})
    for source in sources:
        own = _translate(source, cls)
        replaced = set(own)
        if replaced.intersection(CHANNEL_ORDER):
            replaced.update(CHANNEL_ORDER)
        for name in [name for name in binding.fields if name in replaced]:
            lower = (binding.origin.pop(name), binding.fields.pop(name))
            binding.overridden.setdefault(name, []).append(lower)
        binding.fields.update(own)
        binding.origin.update(dict.fromkeys(own, source.key))
    _check_statistics(binding, cls)
    return binding


def merge_parts(
    split: str,
    cls: Callable,
    model_sources: Sequence[FieldSource],
    parts: Sequence[DatasetPart],
) -> tuple[Binding, list[Binding]]:
    """Resolve the fields of each dataset of a split, and check that they fit together.

    Mean, std and the channel order may differ between datasets, all other fields must agree.

    Args:
        split (str): 'train', 'val' or 'test'.
        cls (Callable): The class of the preprocessor that the fields are for.
        model_sources (Sequence[FieldSource]): The places that hold for every split, lowest first.
        parts (Sequence[DatasetPart]): The datasets of the split.

    Returns:
        tuple[Binding, list[Binding]]: The binding of the split, which holds the first dataset's
        values, and the binding of each dataset, in order.

    Raises:
        ValueError: As :func:`resolve`; if datasets differ in a field that can't vary by sample;
            or if a wrapper merges images of datasets that are normalised differently.
    """
    if not parts:
        return resolve(split, cls, model_sources), []
    for part in parts:
        for source in part.sources:
            _check_named(source, cls)
    bindings = [
        replace(resolve(split, cls, [*model_sources, *part.sources]), part=part.path)
        for part in parts
    ]
    for part, binding in zip(parts, bindings, strict=True):
        for name in sorted(({*bindings[0].fields, *binding.fields}) - BY_SAMPLE):
            if not same(effective(cls, bindings[0], name), effective(cls, binding, name)):
                raise ValueError(
                    f'{_said(cls, bindings[0], name)}, but {_said(cls, binding, name)}: parts of '
                    f'one split may differ in mean, std and channel order alone. Give {name!r} the '
                    f'same value for {parts[0].type_name} at {parts[0].path} and '
                    f'{part.type_name} at {part.path}'
                )
        _check_mixing(cls, parts, bindings, part, binding)
    return replace(bindings[0], part=''), bindings


def effective(cls: Callable, binding: Binding, name: str) -> Any:
    """Give the value that a field has in a binding, the class's default if nothing sets it.

    Args:
        cls (Callable): The class of the preprocessor.
        binding (Binding): The binding.
        name (str): The field.

    Returns:
        Any: The value.
    """
    return binding.fields[name] if name in binding.fields else field_default(cls, name)


def reverses_channels(cls: Callable, binding: Binding) -> bool:
    """Whether a preprocessor with these fields reverses the order of the channels.

    Args:
        cls (Callable): The class of the preprocessor.
        binding (Binding): The binding.

    Returns:
        bool: True if any of ``to_rgb``, ``bgr_to_rgb`` and ``rgb_to_bgr`` is on.
    """
    return any(effective(cls, binding, name) for name in CHANNEL_ORDER)


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
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ('  '.join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return '\n'.join(lines)


def _translate(source: FieldSource, cls: Callable) -> dict:
    """Bring one place's fields to the names that the class knows, and check them."""
    names = valid_fields(cls)
    own = {name: value for name, value in source.fields.items() if name not in NOT_FIELDS}
    if {'to_rgb', 'bgr_to_rgb'} <= own.keys() and bool(own['to_rgb']) != bool(own['bgr_to_rgb']):
        raise _disagreement(source, 'to_rgb', 'bgr_to_rgb')
    for forward in ('to_rgb', 'bgr_to_rgb'):
        if own.get(forward) and own.get('rgb_to_bgr'):
            raise _disagreement(source, forward, 'rgb_to_bgr')
    for known, alias in (('to_rgb', 'bgr_to_rgb'), ('bgr_to_rgb', 'to_rgb')):
        if known in names and alias not in names and alias in own:
            own[known] = own.pop(alias)
    if not accepts_any(cls):
        for name in own:
            if name not in names:
                raise ValueError(
                    f'{source.key}: {getattr(cls, "__name__", cls)} has no field {name!r}'
                    f'{nearest(name, names)}; valid fields: {", ".join(names)}'
                )
    return own


def _check_named(source: FieldSource, cls: Callable) -> None:
    """A dataset gives fields of the model's preprocessor; it does not choose the preprocessor."""
    own = getattr(cls, '__name__', str(cls))
    for key in ('type', 'wraps'):
        named = source.fields.get(key)
        name = getattr(named, '__name__', str(named)).rpartition('.')[2]
        if named is not None and name not in (own, 'PrefetchDataPreprocessor'):
            raise ValueError(
                f'{source.key}: {key}={named!r}, but the model preprocesses with {own}; leave '
                f'{key} out, and name the class in model.data_preprocessor'
            )


def _disagreement(source: FieldSource, one: str, other: str) -> ValueError:
    return ValueError(
        f'{source.key}: {one}={source.fields[one]!r} and {other}={source.fields[other]!r} '
        'contradict each other; write only one of them'
    )


def _check_statistics(binding: Binding, cls: Callable) -> None:
    """Check the values of mean and std while they are plain numbers: nothing else does, as reading
    them from an accelerator would make the host wait."""
    names = {*valid_fields(cls), *binding.fields}
    for mean, std in STATISTICS:
        if names.issuperset((mean, std)):
            _check_pair(mean, std, binding, cls)
    inner = binding.fields.get(INNER)
    if isinstance(inner, dict):
        # Its class is looked up elsewhere: the defaults are not known, and a number may do.
        fields = {name: [value] if _is_number(value) else value for name, value in inner.items()}
        origin = dict.fromkeys(inner, f'{binding.origin[INNER]}.{INNER}')
        _check_statistics(Binding(binding.split, str(inner.get('type')), fields, origin), dict)


def _check_pair(mean: str, std: str, binding: Binding, cls: Callable) -> None:
    means, stds = _numbers(mean, binding, cls), _numbers(std, binding, cls)
    if (means is None) != (stds is None):
        given, missing = (mean, std) if stds is None else (std, mean)
        where = binding.origin.get(given) or f'{binding.type_name}, by default'
        if missing in binding.origin:
            where += f', but {binding.origin[missing]} says {missing}=None'
        raise ValueError(
            f'{given} is given ({where}), {missing} is not, in the {binding.split} split: write '
            f'both, or {given}=None to leave normalisation out'
        )
    if means is None:
        return
    origins = [binding.origin.get(name, 'default') for name in (mean, std)]
    # mmengine spreads a single value over all channels.
    if len(means) != len(stds) and 1 not in (len(means), len(stds)):
        raise ValueError(
            f'{mean} has {len(means)} values ({origins[0]}), {std} has {len(stds)} ({origins[1]}), '
            f"in the {binding.split} split: write one value for each of the image's channels in "
            'both'
        )
    if not all(torch.tensor(list(map(float, stds)), dtype=torch.float32)):
        raise ValueError(
            f'{origins[1]}: {std}={stds} holds a zero in float32, by which images would be '
            'divided; write 1 for a channel that is not to be scaled'
        )


def _numbers(name: str, binding: Binding, cls: Callable) -> list | None:
    value = plain(effective(cls, binding, name))
    if value is None:
        return None
    # A class whose own default is a single number takes one.
    if _is_number(value) and _is_number(field_default(cls, name)):
        value = [value]
    if not isinstance(value, list) or not value or not all(map(_is_number, value)):
        raise ValueError(
            f'{binding.origin.get(name, "default")}: {name}={value!r} is not a sequence of '
            f"numbers; write a list with one number for each of the image's channels, such as "
            f'{name}=[127.5, 127.5, 127.5]'
        )
    if not all(map(math.isfinite, value)):
        raise ValueError(
            f'{binding.origin.get(name, "default")}: {name}={value} holds a value that is not '
            'finite; write finite numbers'
        )
    return value


def _check_mixing(cls, parts, bindings, part, binding) -> None:
    if part.mixed_by is None:
        return
    first = [other.mixed_by for other in parts].index(part.mixed_by)
    for name in ('mean', 'std', 'channel order'):
        a, b = (
            reverses_channels(cls, one) if name == 'channel order' else effective(cls, one, name)
            for one in (bindings[first], binding)
        )
        if not same(a, b):
            raise ValueError(
                f'{part.mixed_by} merges images of several samples into one before they are '
                f"normalised, so that its datasets can't differ in {name}: "
                f'{parts[first].path} has {plain(a)!r}, {part.path} has {plain(b)!r}. Give both '
                'the same value, or concatenate the datasets outside of the mixing wrapper'
            )


def _said(cls: Callable, binding: Binding, name: str) -> str:
    origin = binding.origin.get(name, f'{binding.type_name} by default')
    return f'{origin} says {name}={effective(cls, binding, name)!r} for {binding.part}'


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
