# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Merge the preprocessor fields of several places field by field, and check what comes out."""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import MODELS

from .binding import CHANNEL_ORDER, REVERSAL, Binding, plain
from .classes import constructor_fields, find_class, nearest, type_name_of
from .datasets import DatasetPart, FieldSource

# Said of a preprocessor, these are no arguments of the class that it wraps.
NOT_FIELDS = frozenset({'type', 'wraps', 'prefetch_safe', '_scope_'})
# What is subtracted and divided by; mmpretrain's `TwoNormDataPreprocessor` has both pairs.
STATISTICS = (('mean', 'std'), ('second_mean', 'second_std'))
# What may differ from sample to sample of a batch.
BY_SAMPLE = ('mean', 'std', REVERSAL)
# The field of mmdet's `MultiBranchDataPreprocessor` that holds the config of another preprocessor.
INNER = 'data_preprocessor'


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
    if INNER in constructor_fields(cls)[0]:
        return _resolve_with_inner(split, cls, sources)
    binding = Binding(split, cls, {}, {})
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
    _check_statistics(binding)
    return binding


def _resolve_with_inner(split: str, cls: Callable, sources: Sequence[FieldSource]) -> Binding:
    """Resolve the fields of a preprocessor that has another inside. What the outer class does not
    know is for the inner one, whether it is written flat or nested."""
    names = constructor_fields(cls)[0].keys() - {INNER}
    outer = Binding(split, cls, {}, {})
    inner: list[FieldSource] = []
    for source in sources:
        nested = source.fields.get(INNER)
        if nested is not None and not isinstance(nested, dict):
            raise TypeError(
                f'{source.key}.{INNER}: expected a dict of preprocessor fields, found {nested!r}'
            )
        if nested:
            inner.append(FieldSource(f'{source.key}.{INNER}', dict(nested.items())))
        rest = source.fields.keys() - NOT_FIELDS - {INNER}
        for name in rest & names:
            if name in outer.fields:
                lower = (outer.origin[name], outer.fields[name])
                outer.overridden.setdefault(name, []).append(lower)
            outer.fields[name], outer.origin[name] = source.fields[name], source.key
        if rest - names:
            flat = {name: source.fields[name] for name in rest - names}
            inner.append(FieldSource(source.key, flat))
    typed = [source.fields for source in inner if source.fields.get('type') is not None]
    if not typed:
        raise ValueError(
            f'{sources[0].key if sources else "model.data_preprocessor"}: {outer.type_name} needs '
            f'a preprocessor inside; write {INNER}=dict(type=..., ...)'
        )
    type_, scope = typed[-1]['type'], typed[-1].get('_scope_')
    inner_cls = find_class(MODELS, type_, scope)
    resolved = (
        _unregistered(split, inner) if inner_cls is None else resolve(split, inner_cls, inner)
    )
    named = {'type': type_} if scope is None else {'type': type_, '_scope_': scope}
    outer.fields[INNER] = {**named, **resolved.fields}
    outer.origin[INNER] = inner[-1].key
    outer.overridden.update(
        (f'{INNER}.{name}', lower) for name, lower in resolved.overridden.items()
    )
    return outer


def _unregistered(split: str, sources: Sequence[FieldSource]) -> Binding:
    """Merge the fields of a class that is not known here, so that any field may be its own."""
    binding = Binding(split, dict, {}, {})
    for source in sources:
        own = {name: value for name, value in source.fields.items() if name not in NOT_FIELDS}
        binding.fields.update(own)
        binding.origin.update(dict.fromkeys(own, source.key))
    numbers = {name: [v] if _is_number(v) else v for name, v in binding.fields.items()}
    _check_statistics(replace(binding, fields=numbers))
    return binding


def resolve_parts(
    split: str,
    cls: Callable,
    model_sources: Sequence[FieldSource],
    parts: Sequence[DatasetPart],
) -> list[Binding]:
    """Resolve the fields of each dataset of a split, and check that they fit together.

    Mean, std and the channel order may differ between datasets, all other fields must agree.

    Args:
        split (str): 'train', 'val' or 'test'.
        cls (Callable): The class of the preprocessor that the fields are for.
        model_sources (Sequence[FieldSource]): The places that hold for every split, lowest first.
        parts (Sequence[DatasetPart]): The datasets of the split.

    Returns:
        list[Binding]: The binding of each dataset, in order.

    Raises:
        ValueError: As :func:`resolve`; if a dataset names another preprocessor; if datasets differ
            in a field that can't vary by sample; or if a wrapper merges images of datasets that
            are normalised differently.
    """
    bindings: list[Binding] = []
    mixed: dict[str, Binding] = {}
    for part in parts:
        for source in part.sources:
            _check_named(source, cls)
        sources = [*model_sources, *part.sources]
        binding = replace(resolve(split, cls, sources), part=part.key)
        bindings.append(binding)
        found = bindings[0].differences(binding)
        for name in sorted(found.keys() - set(BY_SAMPLE)):
            raise ValueError(
                f'{_said(bindings[0], name)}, but {_said(binding, name)}: parts of one split may '
                f'differ in mean, std and channel order alone. Give {name!r} the same value for '
                f'{parts[0].type_name} at {parts[0].key} and {part.type_name} at {part.key}'
            )
        if part.mixed_by is not None:
            first = mixed.setdefault(part.mixed_by, binding)
            for name, (a, b) in first.differences(binding).items():
                raise ValueError(
                    f'{part.mixed_by} merges images of several samples into one before they are '
                    f"normalised, so that its datasets can't differ in {name}: {first.part} has "
                    f'{a!r}, {part.key} has {b!r}. Give both the same value, or concatenate the '
                    'datasets outside of the mixing wrapper'
                )
    return bindings


def not_normalised(bindings: Sequence[Binding]) -> str | None:
    """Find a part that is not normalised beside one that is.

    Args:
        bindings (Sequence[Binding]): The bindings of a split's datasets.

    Returns:
        str | None: What is wrong and what to write; None if all are normalised, or none is.
    """
    raw = [each.part for each in bindings if each.value('mean') is None]
    others = [each.part for each in bindings if each.part not in raw]
    if not raw or not others:
        return None
    return (
        f'{raw[0]} has neither mean nor std, but {others[0]} has, in one split: its images would '
        f'stay as they are among normalised ones. Write its own into {raw[0]}.data_preprocessor, '
        'or mean=[0], std=[1] there if that is meant'
    )


def _said(binding: Binding, name: str) -> str:
    origin = binding.origin.get(name, f'{binding.type_name} by default')
    return f'{origin} says {name}={binding.value(name)!r} for {binding.part}'


def _translate(source: FieldSource, cls: Callable) -> dict:
    """Bring one place's fields to the names that the class knows, and check them."""
    names, takes_others = constructor_fields(cls)
    own = {name: value for name, value in source.fields.items() if name not in NOT_FIELDS}
    for one, other in itertools.combinations([name for name in CHANNEL_ORDER if name in own], 2):
        # `rgb_to_bgr` is another direction, the first two names are for the same one.
        both, differ = own[one] and own[other], bool(own[one]) != bool(own[other])
        if both if other == 'rgb_to_bgr' else differ:
            raise ValueError(
                f'{source.key}: {one}={own[one]!r} and {other}={own[other]!r} contradict each '
                'other; write only one of them'
            )
    for known, alias in (('to_rgb', 'bgr_to_rgb'), ('bgr_to_rgb', 'to_rgb')):
        if known in names and alias not in names and alias in own:
            own[known] = own.pop(alias)
    if not takes_others:
        for name in own:
            if name not in names:
                cure = ''
                if cls is BaseDataPreprocessor:
                    cure = (
                        ". It is what mmengine gives a model that has none: write the model's own, "
                        "model.data_preprocessor=dict(type='ImgDataPreprocessor', ...)"
                    )
                raise ValueError(
                    f'{source.key}: {getattr(cls, "__name__", cls)} has no field {name!r}'
                    f'{nearest(name, names)}; valid fields: {", ".join(names)}{cure}'
                )
    return own


def _check_named(source: FieldSource, cls: Callable) -> None:
    """A dataset gives fields of the model's preprocessor; it does not choose the preprocessor."""
    own = getattr(cls, '__name__', str(cls))
    for key in ('type', 'wraps'):
        named = source.fields.get(key)
        if named is not None and type_name_of(named) not in (own, 'PrefetchDataPreprocessor'):
            raise ValueError(
                f'{source.key}: {key}={named!r}, but the model preprocesses with {own}; leave '
                f'{key} out, and name the class in model.data_preprocessor'
            )


def _check_statistics(binding: Binding) -> None:
    """Check the values of mean and std while they are plain numbers: nothing else does, as reading
    them from an accelerator would make the host wait."""
    names = {*constructor_fields(binding.cls)[0], *binding.fields}
    for mean, std in STATISTICS:
        if names.issuperset((mean, std)):
            _check_pair(mean, std, binding)


def _check_pair(mean: str, std: str, binding: Binding) -> None:
    means, stds = _numbers(mean, binding), _numbers(std, binding)
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
    if not np.all(np.float32(stds)):
        raise ValueError(
            f'{origins[1]}: {std}={stds} holds a zero in float32, by which images would be '
            'divided; write 1 for a channel that is not to be scaled'
        )


def _numbers(name: str, binding: Binding) -> list | None:
    value = plain(binding.value(name))
    if value is None:
        return None
    # A class whose own default is a single number takes one.
    if _is_number(value) and _is_number(constructor_fields(binding.cls)[0].get(name)):
        value = [value]
    said = f'{binding.origin.get(name, "default")}: {name}={value!r}'
    if not isinstance(value, list) or not value or not all(map(_is_number, value)):
        raise ValueError(
            f'{said} is not a sequence of numbers; write a list with one number for each of the '
            f"image's channels, such as {name}=[127.5, 127.5, 127.5]"
        )
    if not all(map(math.isfinite, value)):
        raise ValueError(f'{said} holds a value that is not finite; write finite numbers')
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
