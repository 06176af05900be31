# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Attach prefetching to a runner's model: wrap its preprocessor, bind each split's fields."""

from __future__ import annotations

import copy
import logging
from collections import deque
from typing import Any

import torch
from mmengine.logging import print_log
from torch import nn

from .binding import Binding, DatasetPart, FieldSource, merge_parts, read_parts, take_parts
from .config import dropped_top_level_fields
from .data_preprocessor import PrefetchDataPreprocessor, build, find_class

SPLITS = ('train', 'val', 'test')
_NOT_FIELDS = ('type', 'wraps', 'prefetch_safe', '_scope_')


def attach(runner: Any, split: str, dataloader: Any) -> PrefetchDataPreprocessor | None:
    """Wrap the preprocessor of a runner's model, and bind the fields of its datasets.

    The datasets' ``data_preprocessor`` keys are taken out of the dataloader configs, since no
    dataset knows them; the runner's own config keeps them. Dataloaders of the other splits are
    bound too: they may be run by loops that do not look ahead.

    Args:
        runner (Runner): The runner. Its model is built.
        split (str): 'train', 'val' or 'test'.
        dataloader (DataLoader | dict): The split's dataloader or its config.

    Returns:
        PrefetchDataPreprocessor | None: None when the model has no preprocessor.

    Raises:
        ValueError: Fields are bound to a dataset, but no preprocessor could take them; or they do
            not fit it.
    """
    preprocessor = _wrap(runner)
    for name in SPLITS:
        loader = dataloader if name == split else getattr(runner, f'_{name}_dataloader', None)
        parts = _parts(loader, name)
        if name in (preprocessor.bindings if preprocessor is not None else ()) and not any(
            part.sources for part in parts
        ):
            continue  # bound before; its config has been emptied since
        if preprocessor is None:
            _refuse(parts)
        elif parts:
            _bind(preprocessor, runner.cfg, name, parts)
    return preprocessor


def _wrap(runner: Any) -> PrefetchDataPreprocessor | None:
    """Find the preprocessor that the runner's model is stepped with, and wrap it if it is plain."""
    pending = deque([runner.model])
    while pending:
        module = pending.popleft()
        found = module._modules.get('data_preprocessor')
        if isinstance(found, PrefetchDataPreprocessor):
            return found
        if found is not None:
            _warn_of_dropped_fields(runner.cfg)
            wrapper = PrefetchDataPreprocessor.around(found, _plain_fields(runner.cfg))
            module.data_preprocessor = wrapper
            return wrapper
        pending.extend(module.children())
    return None


def _plain_fields(cfg: Any) -> dict:
    """The config that a model's plain preprocessor was built from."""
    model = cfg.get('model')
    own = model.get('data_preprocessor') if isinstance(model, dict) else None
    fields = own or cfg.get('data_preprocessor')
    return _fields(fields) if isinstance(fields, dict) else {}


def _fields(config: dict) -> dict:
    return {key: value for key, value in config.items() if key not in _NOT_FIELDS}


def _warn_of_dropped_fields(cfg: Any) -> None:
    dropped = dropped_top_level_fields(cfg)
    if dropped:
        print_log(
            f'The top-level `data_preprocessor` sets {sorted(dropped)}, which has no effect: '
            "the model's own `data_preprocessor` replaces the top level whole. To have them "
            "merged field by field, write `model.data_preprocessor.type='PrefetchDataPreprocessor'`"
            ' and name the class it wraps in `wraps`.',
            logger='current',
            level=logging.WARNING,
        )


def _parts(loader: Any, split: str) -> list[DatasetPart]:
    key = f'{split}_dataloader.dataset'
    if isinstance(loader, dict):
        dataset = loader.get('dataset')
        return take_parts(dataset, key) if isinstance(dataset, dict) else read_parts(dataset)
    if loader is None:
        return []
    return read_parts(getattr(loader, 'dataset', None))


def _refuse(parts: list[DatasetPart]) -> None:
    bound = [source.key for part in parts for source in part.sources]
    if bound:
        raise ValueError(
            f'{bound[0]} is set, but the model has no data preprocessor that could take its '
            'fields. Give the model one: '
            "`model.data_preprocessor=dict(type='PrefetchDataPreprocessor')`."
        )


def _bind(
    preprocessor: PrefetchDataPreprocessor, cfg: Any, split: str, parts: list[DatasetPart]
) -> None:
    if preprocessor.opted_in:
        cls, sources = _opted_in_sources(preprocessor, cfg)
    else:
        cls = type(preprocessor.wrapped)
        key = 'data_preprocessor'
        if isinstance(cfg.get('model'), dict) and cfg.model.get('data_preprocessor'):
            key = 'model.data_preprocessor'
        sources = [FieldSource(key, preprocessor.fields)]
        if not any(part.sources for part in parts):
            preprocessor.bindings[split] = _unchecked(split, cls, sources[0])
            return
    binding, of_parts = merge_parts(split, cls, sources, parts)
    _refuse_mixed(binding, of_parts, parts)
    preprocessor.bindings[split] = binding
    if preprocessor.opted_in:
        if cls is not type(preprocessor.wrapped) or binding.fields != preprocessor.fields:
            preprocessor.bind(split, build(cls, binding.fields))
    else:
        preprocessor.bind(split, _rebound(preprocessor, cls, binding.fields))


def _opted_in_sources(
    preprocessor: PrefetchDataPreprocessor, cfg: Any
) -> tuple[type[nn.Module], list[FieldSource]]:
    cls = type(preprocessor.wrapped)
    sources = [FieldSource('model.data_preprocessor', preprocessor.fields)]
    top = cfg.get('data_preprocessor')
    model = cfg.get('model')
    if isinstance(top, dict) and isinstance(model, dict) and model.get('data_preprocessor'):
        named = top.get('wraps') or top.get('type')
        if named is not None and find_class(named) is not PrefetchDataPreprocessor:
            cls = find_class(named)
        sources.append(FieldSource('data_preprocessor', _fields(top)))
    return cls, sources


def _unchecked(split: str, cls: type, source: FieldSource) -> Binding:
    """The binding of a plain preprocessor that no dataset changes: it is what it is."""
    origin = dict.fromkeys(source.fields, source.key)
    return Binding(split, cls.__name__, dict(source.fields), origin, {})


def _refuse_mixed(binding: Binding, of_parts: list[Binding], parts: list[DatasetPart]) -> None:
    for other, part in zip(of_parts, parts, strict=True):
        if other.fields != binding.fields:
            differing = sorted(
                name
                for name in {*other.fields, *binding.fields}
                if other.fields.get(name) != binding.fields.get(name)
            )
            name = differing[0]
            raise ValueError(
                f'{parts[0].path} and {part.path} are parts of one dataset but differ in '
                f'`data_preprocessor.{name}`: {binding.fields.get(name)!r} and '
                f'{other.fields.get(name)!r}. Give both the same value.'
            )


def _rebound(
    preprocessor: PrefetchDataPreprocessor, cls: type[nn.Module], fields: dict
) -> nn.Module:
    """A copy of a plain preprocessor in which only what the fields change is changed.

    Model code may have given it more than its config says (batch augmentations, for example), so
    it cannot simply be built again: what differs between one built with the old fields and one
    built with the new ones is carried over.
    """
    before, after = cls(**preprocessor.fields), cls(**fields)
    effective = copy.deepcopy(preprocessor.wrapped)
    for table in ('__dict__', '_buffers'):
        old, new = getattr(before, table), getattr(after, table)
        for name in {*old, *new} - {'_buffers', '_parameters', '_modules'}:
            if name in old and name in new and _same(old[name], new[name]):
                continue
            if name in new:
                getattr(effective, table)[name] = new[name]
            else:
                getattr(effective, table).pop(name, None)
    return effective


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and one.shape == other.shape and torch.equal(one, other)
    return bool(one == other)
