# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Attach prefetching to a runner's model: wrap its preprocessor, bind each split's fields."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from typing import Any

from mmengine.logging import print_log
from torch import nn

from .data_preprocessor import PrefetchDataPreprocessor, build, find_wrapped
from .engine.mixed import PartConstants
from .families import family_of
from .fields.binding import Binding, same
from .fields.datasets import DatasetPart, FieldSource, split_dataloader
from .fields.resolve import NOT_FIELDS, resolve_parts
from .fields.sources import MODEL, dropped_top_level_fields, levels_that_count, preprocessor_sources

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
        bound = [source.key for part in parts for source in part.sources]
        if preprocessor is not None:
            if bound or name not in preprocessor.bindings:
                _bind(preprocessor, runner.cfg, name, parts)
        elif bound:
            raise ValueError(
                f'{bound[0]} is set, but the model has no data preprocessor that could take its '
                'fields. Give the model one: '
                "`model.data_preprocessor=dict(type='PrefetchDataPreprocessor')`."
            )
    return preprocessor, dataloader


def _wrap(runner: Any) -> PrefetchDataPreprocessor | None:
    """Find the preprocessor that the runner's model is stepped with, and wrap it if it is plain."""
    for module in runner.model.modules():
        found = module._modules.get('data_preprocessor')
        if isinstance(found, PrefetchDataPreprocessor):
            return found
        if found is not None:
            dropped = dropped_top_level_fields(runner.cfg)
            if dropped:
                print_log(
                    f'The top-level `data_preprocessor` sets {sorted(dropped)}, which has no '
                    "effect: the model's own `data_preprocessor` replaces the top level whole. To "
                    'have them merged field by field, write '
                    "`model.data_preprocessor.type='PrefetchDataPreprocessor'` and name the class "
                    'it wraps in `wraps`.',
                    logger='current',
                    level=logging.WARNING,
                )
            # What it was built from: a plain one is made from one level alone.
            level = next(iter(levels_that_count(runner.cfg).values()), None)
            level = level if isinstance(level, dict) else {}
            fields = {name: value for name, value in level.items() if name not in NOT_FIELDS}
            module.data_preprocessor = PrefetchDataPreprocessor.around(found, fields)
            return module.data_preprocessor
    return None


def _bind(
    preprocessor: PrefetchDataPreprocessor, cfg: Any, split: str, parts: list[DatasetPart]
) -> None:
    named, scope, levels = preprocessor_sources(cfg)
    # The model's code may have added to its fields, so they are taken from the preprocessor.
    own = FieldSource(levels[0].key if levels else MODEL, preprocessor.fields)
    above = levels[1:] if preprocessor.opted_in else []
    cls = find_wrapped(named, scope) if above else type(preprocessor.wrapped)
    if not preprocessor.opted_in and not any(part.sources for part in parts):
        # A plain preprocessor that no dataset changes is what it is: there is nothing to check.
        origin = dict.fromkeys(own.fields, own.key)
        preprocessor.bindings[split] = Binding(split, cls, dict(own.fields), origin)
        return
    bindings = resolve_parts(split, cls, [own, *above], parts)
    binding = preprocessor.bindings[split] = replace(bindings[0], part='')
    if not preprocessor.opted_in:
        preprocessor.bind(split, _rebound(preprocessor, cls, binding.fields))
    elif cls is not type(preprocessor.wrapped) or not same(binding.fields, preprocessor.fields):
        preprocessor.bind(split, build(cls, binding.fields))
    if any(binding.differences(other) for other in bindings):
        if not family_of(cls).by_sample:
            raise ValueError(
                f'{bindings[0].part} and other parts of {split}_dataloader.dataset differ in mean, '
                f'std or channel order, but {cls.__name__} cannot normalise each sample with '
                'values of its own. Give all parts the same values, or use one of the '
                'preprocessors that can, such as ImgDataPreprocessor.'
            )
        binding.parts = bindings
        means, stds = ([part.value(name) for part in bindings] for name in ('mean', 'std'))
        reverse = [part.reverses_channels for part in bindings]
        preprocessor.mix(split, PartConstants(means, stds, reverse))


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
            if name in old and name in new and same(old[name], new[name]):
                continue
            if name in new:
                getattr(effective, table)[name] = new[name]
            else:
                getattr(effective, table).pop(name, None)
    return effective
