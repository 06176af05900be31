# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Attach prefetching to a runner's model: wrap its preprocessor, bind each split's fields."""

from __future__ import annotations

import copy
import logging
from collections import deque
from dataclasses import replace
from typing import Any

import torch
from mmengine.logging import print_log
from torch import nn

from .data_preprocessor import PrefetchDataPreprocessor, build, find_wrapped
from .engine.mixed import PartConstants
from .families import family_of
from .fields.datasets import DatasetPart, FieldSource, split_dataloader
from .fields.resolve import NOT_FIELDS, Binding, effective, merge_parts, reverses_channels, same
from .fields.sources import dropped_top_level_fields, is_prefetching, preprocessor_sources

SPLITS = ('train', 'val', 'test')


def attach(runner: Any, split: str, dataloader: Any) -> tuple[PrefetchDataPreprocessor | None, Any]:
    """Wrap the preprocessor of a runner's model, and bind the fields of its datasets.

    The datasets' ``data_preprocessor`` keys are left out of the configs that dataloaders are built
    from, since no dataset knows them; the runner's own config keeps them. Dataloaders of the other
    splits are bound too: they may be run by loops that do not look ahead.

    Args:
        runner (Runner): The runner. Its model is built.
        split (str): 'train', 'val' or 'test'.
        dataloader (DataLoader | dict): The split's dataloader or its config.

    Returns:
        tuple: The preprocessor (None when the model has none), and what to build the split's
        dataloader from.

    Raises:
        ValueError: Fields are bound to a dataset, but no preprocessor could take them; or they do
            not fit it.
    """
    preprocessor = _wrap(runner)
    for name in SPLITS:
        held = f'_{name}_dataloader'
        loader = dataloader if name == split else getattr(runner, held, None)
        if loader is None:
            continue
        loader, parts = split_dataloader(loader, f'{name}_dataloader')
        if name == split:
            dataloader = loader
        else:
            setattr(runner, held, loader)
        if preprocessor is None:
            _refuse(parts)
        elif any(part.sources for part in parts) or name not in preprocessor.bindings:
            _bind(preprocessor, runner.cfg, name, parts)
    return preprocessor, dataloader


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
    if not isinstance(fields, dict):
        return {}
    return {key: value for key, value in fields.items() if key not in NOT_FIELDS}


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
        sources = [FieldSource(_plain_key(cfg), preprocessor.fields)]
        if not any(part.sources for part in parts):
            preprocessor.bindings[split] = _unchecked(split, cls, sources[0])
            return
    binding, of_parts = merge_parts(split, cls, sources, parts)
    preprocessor.bindings[split] = binding
    if not preprocessor.opted_in:
        preprocessor.bind(split, _rebound(preprocessor, cls, binding.fields))
    elif cls is not type(preprocessor.wrapped) or binding.fields != preprocessor.fields:
        preprocessor.bind(split, build(cls, binding.fields))
    if _differ(cls, of_parts):
        _mix(preprocessor, split, cls, of_parts)


def _plain_key(cfg: Any) -> str:
    model = cfg.get('model')
    own = isinstance(model, dict) and model.get('data_preprocessor')
    return 'model.data_preprocessor' if own else 'data_preprocessor'


def _opted_in_sources(
    preprocessor: PrefetchDataPreprocessor, cfg: Any
) -> tuple[type[nn.Module], list[FieldSource]]:
    # The model's code may have added to its fields, so they are taken from the preprocessor.
    own = FieldSource('model.data_preprocessor', preprocessor.fields)
    if not is_prefetching(cfg.get('model', {}).get('data_preprocessor')):
        return type(preprocessor.wrapped), [own]  # the top level is the model's own
    named, scope, sources = preprocessor_sources(cfg)
    above = [source for source in sources if source.key != own.key]
    return find_wrapped(named, scope), [own, *above]


def _unchecked(split: str, cls: type, source: FieldSource) -> Binding:
    """The binding of a plain preprocessor that no dataset changes: it is what it is."""
    origin = dict.fromkeys(source.fields, source.key)
    return Binding(split, cls.__name__, dict(source.fields), origin, {})


def _differ(cls: type, bindings: list[Binding]) -> bool:
    return any(
        reverses_channels(cls, binding) != reverses_channels(cls, bindings[0])
        or not all(
            same(effective(cls, binding, name), effective(cls, bindings[0], name))
            for name in ('mean', 'std')
        )
        for binding in bindings[1:]
    )


def _mix(
    preprocessor: PrefetchDataPreprocessor, split: str, cls: type, bindings: list[Binding]
) -> None:
    family = family_of(cls)
    if not family.by_sample:
        raise ValueError(
            f'{bindings[0].part} and other parts of {split}_dataloader.dataset differ in mean, std '
            f'or channel order, but {cls.__name__} cannot normalise each sample with values of its '
            'own. Give all parts the same values, or use one of the preprocessors that can, such '
            'as ImgDataPreprocessor.'
        )
    means, stds = (
        [effective(cls, binding, name) for binding in bindings] for name in ('mean', 'std')
    )
    reverse = [reverses_channels(cls, binding) for binding in bindings]
    preprocessor.mix(split, PartConstants(means, stds, reverse))
    preprocessor.bindings[split] = replace(preprocessor.bindings[split], parts=bindings)


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
