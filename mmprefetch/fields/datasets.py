# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Find the datasets inside a split's dataset, and the preprocessor fields bound to each."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from mmengine.registry import DATASETS
from torch.utils.data import Dataset

from .classes import constructor_fields, find_class

KEY = 'data_preprocessor'
META_KEY = 'preprocess'
# Wrappers that hand images of several samples to one transform (mosaic, mixup, copy-paste).
MIXING_WRAPPERS = frozenset({'MultiImageMixDataset'})


@dataclass(frozen=True)
class FieldSource:
    """Preprocessor fields set in one place.

    Attributes:
        key (str): The config key of the place, such as
            ``train_dataloader.dataset.data_preprocessor``.
        fields (dict): The fields as they stand there.
    """

    key: str
    fields: dict


@dataclass
class DatasetPart:
    """One dataset of a split that is not a wrapper of others.

    Attributes:
        key (str): The config key of the dataset.
        cls (Any): Its class, None if it is not registered.
        type_name (str): The name of its class.
        sources (list[FieldSource]): The places that bind fields to it, lowest precedence first.
        mixed_by (str, optional): The key of the wrapper that merges its images with those of other
            datasets, if there is one.
    """

    key: str
    cls: Any
    type_name: str
    sources: list[FieldSource]
    mixed_by: str | None


# What the datasets around a dataset say, outermost first, each with its precedence: that of the
# METAINFO of classes is lowest, then `metainfo` in the config, then the fields that are bound.
_Found = list[tuple[int, FieldSource | None]]
_DECLARED, _CONFIGURED, _BOUND = range(3)


def split_dataloader(dataloader: Any, key: str) -> tuple[Any, list[DatasetPart]]:
    """Part a dataloader's config from the fields bound to its datasets.

    These stand at the keys ``data_preprocessor``. Where a dataset's own constructor names such an
    argument, it stays in the config as well, as do ``metainfo['preprocess']`` and ``METAINFO`` of
    the class.

    Args:
        dataloader (Any): A config, which stays as it is, or a built DataLoader.
        key (str): Its config key, such as ``train_dataloader``.

    Returns:
        tuple: What to build the dataloader from (a built one is returned itself), and the list of
        :class:`DatasetPart`, one where no wrapper concatenates several.

    Raises:
        TypeError: If the fields at a key are not a dict.
    """
    if not isinstance(dataloader, dict):
        return dataloader, read_parts(dataloader.dataset, f'{key}.dataset')
    remaining = _copied(dataloader)
    return remaining, _take(remaining['dataset'], f'{key}.dataset', None, [], None)


def split_dataloaders(dataloader: Any, key: str) -> tuple[Any, list[DatasetPart]]:
    """The same for what a loop of another package may be given: a list of dataloaders, or
    something that is none.

    Args:
        dataloader (Any): A dataloader or its config, or a list of such.
        key (str): Its config key.

    Returns:
        tuple: As :func:`split_dataloader`.

    Raises:
        TypeError: If the fields at a key are not a dict.
        ValueError: If the dataloaders of a list bind different fields: which one a batch is from
            cannot be told.
    """
    if not isinstance(dataloader, (list, tuple)):
        if isinstance(dataloader, dict) and 'dataset' not in dataloader:
            return dataloader, []
        if not hasattr(dataloader, 'dataset') and not isinstance(dataloader, dict):
            return dataloader, []
        return split_dataloader(dataloader, key)
    found = [split_dataloaders(each, f'{key}.{n}') for n, each in enumerate(dataloader)]
    first: list[DatasetPart] = []
    for _, parts in found:
        first = first or parts
        for part in parts:
            said, other = ([s.fields for s in each.sources] for each in (part, first[0]))
            if said != other:
                raise ValueError(
                    f'{part.key} and {first[0].key} bind different preprocessor fields, {said} and '
                    f'{other}, but several dataloaders of one split are run by a loop that does '
                    'not say which one a batch is from. Bind the same fields to all of them, or '
                    'leave `data_preprocessor` out and set the fields in model.data_preprocessor.'
                )
    if not any(part.sources for _, parts in found for part in parts):
        return dataloader, first
    return type(dataloader)(remaining for remaining, _ in found), first[:1]


def read_parts(dataset: Any, key: str = 'dataset') -> list[DatasetPart]:
    """Read the bound preprocessor fields of a built dataset.

    Args:
        dataset (Any): The dataset; wrappers hold others in ``dataset`` or ``datasets``. Fields
            are in the attributes ``data_preprocessor`` (where that is a dict) and ``metainfo``.
        key (str): What to call the dataset in messages. Defaults to 'dataset'.

    Returns:
        list[DatasetPart]: The parts in order, one where no wrapper concatenates several.

    Raises:
        TypeError: If ``metainfo['preprocess']`` is not a dict.
    """
    return _read(dataset, key, None, [], None)


def inner_datasets(dataset: Any) -> list[tuple[str, Any]]:
    """Name the built datasets inside a built wrapper.

    Args:
        dataset (Any): A built dataset.

    Returns:
        list: ``(key, dataset)`` in the order of :func:`read_parts`; empty for a leaf.
    """
    inner = _inner(getattr(dataset, 'dataset', None), getattr(dataset, 'datasets', None))
    return [(name, item) for name, item in inner if not isinstance(item, dict)]


def _copied(node: Any) -> Any:
    """Copy what :func:`_take` changes; a deep copy would copy built datasets too."""
    if isinstance(node, dict):
        copied = node.copy()
        for name in ('dataset', 'datasets'):
            if name in node:
                copied[name] = _copied(node[name])
        return copied
    if isinstance(node, list | tuple):
        return type(node)(_copied(item) for item in node)
    return node


def _take(
    node: Any, key: str, scope: str | None, found: _Found, mixed_by: str | None
) -> list[DatasetPart]:
    """Take the bound fields out of a dataset's config, in place."""
    if not isinstance(node, dict):
        return _read(node, key, None, found, mixed_by)
    scope = node.get('_scope_', scope)
    cls = find_class(DATASETS, node.get('type'), scope)
    if cls is not None and KEY in constructor_fields(cls)[0]:
        own = node.get(KEY)
        fields = own if isinstance(own, Mapping) else None  # anything else is for the dataset alone
    else:
        fields = node.pop(KEY, None)
    type_name = getattr(cls, '__name__', str(node.get('type')))
    found = [
        *found,
        (_DECLARED, _declared(cls)),
        (_CONFIGURED, _in_metainfo(node.get('metainfo'), f'{key}.metainfo')),
        (_BOUND, _source(fields, f'{key}.{KEY}')),
    ]
    if _mixes(cls) or type_name.rpartition('.')[2] in MIXING_WRAPPERS:
        mixed_by = mixed_by or key
    parts = [
        part
        for name, inner in _inner(node.get('dataset'), node.get('datasets'))
        for part in _take(inner, f'{key}.{name}', scope, found, mixed_by)
    ]
    return parts or [_part(key, cls, type_name, found, mixed_by)]


def _read(
    node: Any, key: str, holder: Any, found: _Found, mixed_by: str | None
) -> list[DatasetPart]:
    # A wrapper's metainfo is that of its first part, so the innermost one that exists counts.
    holder = node if hasattr(node, 'metainfo') else holder
    own = getattr(node, KEY, None)
    if isinstance(own, Mapping):
        found = [*found, (_BOUND, _source(own, f'{key}.{KEY}'))]
    inner_mixed_by = mixed_by or (key if _mixes(type(node)) else None)
    parts = [
        part
        for name, item in inner_datasets(node)
        for part in _read(item, f'{key}.{name}', holder, found, inner_mixed_by)
    ]
    if parts:
        return parts
    declared = _declared(type(holder))
    configured = _in_metainfo(getattr(holder, 'metainfo', None), f'{key}.metainfo')
    if declared and configured and declared.fields == configured.fields:
        configured = None
    found = [*found, (_DECLARED, declared), (_CONFIGURED, configured)]
    return [_part(key, type(node), type(node).__name__, found, mixed_by)]


def _part(key: str, cls: Any, type_name: str, found: _Found, mixed_by: str | None) -> DatasetPart:
    ordered = sorted(found, key=itemgetter(0))
    return DatasetPart(key, cls, type_name, [source for _, source in ordered if source], mixed_by)


def _inner(dataset: Any, datasets: Any) -> list[tuple[str, Any]]:
    """Name the datasets inside a wrapper; other things under the same keys are not datasets."""
    inner = [('dataset', dataset)] if _is_dataset(dataset) else []
    if isinstance(datasets, list | tuple) and all(map(_is_dataset, datasets)):
        inner += [(f'datasets.{index}', item) for index, item in enumerate(datasets)]
    return inner


def _is_dataset(value: Any) -> bool:
    return isinstance(value, dict | Dataset) or hasattr(value, 'metainfo')


def _mixes(cls: Any) -> bool:
    return any(base.__name__ in MIXING_WRAPPERS for base in getattr(cls, '__mro__', ()))


def _declared(cls: Any) -> FieldSource | None:
    name = getattr(cls, '__name__', '')
    return _in_metainfo(getattr(cls, 'METAINFO', None), f'{name}.METAINFO')


def _in_metainfo(metainfo: Any, key: str) -> FieldSource | None:
    fields = metainfo.get(META_KEY) if hasattr(metainfo, 'get') else None
    return _source(fields, f'{key}.{META_KEY}')


def _source(fields: Any, key: str) -> FieldSource | None:
    if fields is None:
        return None
    if not isinstance(fields, Mapping):
        raise TypeError(
            f'{key}: expected a dict of preprocessor fields, found {type(fields).__name__} '
            f'{fields!r}; write {key.rpartition(".")[2]}=dict(mean=[...], std=[...], '
            'bgr_to_rgb=True), or leave the key out'
        )
    return FieldSource(key, dict(fields.items()))
