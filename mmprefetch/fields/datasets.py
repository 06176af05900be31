# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Find the datasets inside a split's dataset, and the preprocessor fields bound to each."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mmengine.registry import DATASETS
from torch.utils.data import Dataset

from .classes import find_class, valid_fields

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
        path (str): The config key of the dataset.
        type_name (str): The name of its class.
        sources (list[FieldSource]): The places that bind fields to it, lowest precedence first.
        mixed_by (str, optional): The key of the wrapper that merges its images with those of other
            datasets, if there is one.
        dataset_class (Any): Its class, None if it is not registered.
    """

    path: str
    type_name: str
    sources: list[FieldSource] = field(default_factory=list)
    mixed_by: str | None = None
    dataset_class: Any = None


@dataclass(frozen=True)
class _Surroundings:
    """What the datasets around a dataset say, outermost first."""

    declared: tuple[FieldSource, ...] = ()
    configured: tuple[FieldSource, ...] = ()
    bound: tuple[FieldSource, ...] = ()
    mixed_by: str | None = None

    def inward(self, key, names, declared=None, configured=None, bound=None) -> '_Surroundings':
        return _Surroundings(
            self.declared + tuple(filter(None, [declared])),
            self.configured + tuple(filter(None, [configured])),
            self.bound + tuple(filter(None, [bound])),
            self.mixed_by or (key if MIXING_WRAPPERS.intersection(names) else None),
        )

    def part(self, key, type_name, dataset_class) -> DatasetPart:
        sources = [*self.declared, *self.configured, *self.bound]
        return DatasetPart(key, type_name, sources, self.mixed_by, dataset_class)


def take_parts(dataset_cfg: dict, key: str) -> list[DatasetPart]:
    """Take the bound preprocessor fields out of a dataset's config.

    Removes every ``data_preprocessor`` key **in place**, except where the dataset's own constructor
    names one: hand over a copy where the config is still needed (see :func:`split_dataloader`). The
    fields in ``metainfo['preprocess']`` and in the ``METAINFO`` of the class are read and stay.

    Args:
        dataset_cfg (dict): The config; wrappers hold others in ``dataset`` or ``datasets``. A built
            dataset is read as by :func:`read_parts`.
        key (str): The config key of the dataset, such as ``train_dataloader.dataset``.

    Returns:
        list[DatasetPart]: The parts in order, one where no wrapper concatenates several.

    Raises:
        TypeError: If the fields at a key are not a dict.
    """
    return _take(dataset_cfg, key, None, _Surroundings(), {})


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
    return _read(dataset, key, None, _Surroundings())


def split_dataloader(dataloader: Any, key: str) -> tuple[Any, list[DatasetPart]]:
    """Part a dataloader's config from the fields bound to its datasets.

    Args:
        dataloader (Any): A config, which stays as it is, or a built DataLoader.
        key (str): Its config key, such as ``train_dataloader``.

    Returns:
        tuple: What to build the dataloader from (a built one is returned itself), and the list of
        :class:`DatasetPart`.

    Raises:
        TypeError: If the fields at a key are not a dict.
    """
    if not isinstance(dataloader, dict):
        return dataloader, read_parts(dataloader.dataset, f'{key}.dataset')
    remaining = _copied(dataloader)
    return remaining, take_parts(remaining['dataset'], f'{key}.dataset')


def _copied(node: Any) -> Any:
    """Copy what :func:`take_parts` may change; a deep copy would copy built datasets too."""
    if isinstance(node, dict):
        copied = node.copy()
        for name in ('dataset', 'datasets'):
            if name in node:
                copied[name] = _copied(node[name])
        return copied
    if isinstance(node, list | tuple):
        return type(node)(_copied(item) for item in node)
    return node


def _take(node, key, scope, around, taken) -> list[DatasetPart]:
    if not isinstance(node, dict):
        return _read(node, key, None, around)
    scope = node.get('_scope_', scope)
    cls = find_class(DATASETS, node.get('type'), scope)
    # One config object may stand at several places; its key is gone at the second.
    if id(node) not in taken:
        if cls is not None and KEY in valid_fields(cls):
            own = node.get(KEY)
            # What is not a dict is for the dataset alone.
            taken[id(node)] = own if isinstance(own, Mapping) else None
        else:
            taken[id(node)] = node.pop(KEY, None)
    type_name = getattr(cls, '__name__', str(node.get('type')))
    around = around.inward(
        key,
        _class_names(cls) | {type_name.rpartition('.')[2]},
        declared=_declared(cls),
        configured=_in_metainfo(node.get('metainfo'), f'{key}.metainfo'),
        bound=_source(taken[id(node)], f'{key}.{KEY}'),
    )
    parts = [
        part
        for name, inner in _inner(node.get('dataset'), node.get('datasets'))
        for part in _take(inner, f'{key}.{name}', scope, around, taken)
    ]
    return parts or [around.part(key, type_name, cls)]


def _read(node, key, holder, around) -> list[DatasetPart]:
    # A wrapper's metainfo is that of its first part, so the innermost one that exists counts.
    holder = node if hasattr(node, 'metainfo') else holder
    own = getattr(node, KEY, None)
    bound = _source(own, f'{key}.{KEY}') if isinstance(own, Mapping) else None
    outer = around.inward(key, _class_names(type(node)), bound=bound)
    parts = [
        part
        for name, item in inner_datasets(node)
        for part in _read(item, f'{key}.{name}', holder, outer)
    ]
    if parts:
        return parts
    declared = _declared(type(holder))
    configured = _in_metainfo(getattr(holder, 'metainfo', None), f'{key}.metainfo')
    if declared and configured and declared.fields == configured.fields:
        configured = None
    around = around.inward(key, (), declared=declared, configured=configured, bound=bound)
    return [around.part(key, type(node).__name__, type(node))]


def _inner(dataset: Any, datasets: Any) -> list[tuple[str, Any]]:
    """Name the datasets inside a wrapper; other things under the same keys are not datasets."""
    found = [('dataset', dataset)] if _is_dataset(dataset) else []
    if isinstance(datasets, list | tuple) and all(map(_is_dataset, datasets)):
        found += [(f'datasets.{index}', item) for index, item in enumerate(datasets)]
    return found


def inner_datasets(dataset: Any) -> list[tuple[str, Any]]:
    """Name the built datasets inside a built wrapper.

    Args:
        dataset (Any): A built dataset.

    Returns:
        list: ``(key, dataset)`` in the order of :func:`read_parts`; empty for a leaf.
    """
    inner = _inner(getattr(dataset, 'dataset', None), getattr(dataset, 'datasets', None))
    return [(name, item) for name, item in inner if not isinstance(item, dict)]


def _is_dataset(value: Any) -> bool:
    return isinstance(value, dict | Dataset) or hasattr(value, 'metainfo')


def _class_names(cls: Any) -> set[str]:
    return {base.__name__ for base in getattr(cls, '__mro__', ())}


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
