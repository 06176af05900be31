# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Attach prefetching to a runner's model: wrap its preprocessor, bind each split's fields."""

from __future__ import annotations

import copy
import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from mmengine.logging import print_log
from mmengine.model import BaseDataPreprocessor, BaseTTAModel
from torch import nn

from .data_preprocessor import PrefetchDataPreprocessor, build, find_wrapped
from .engine.mixed import PartConstants
from .families import family_of
from .fields.binding import Binding, same
from .fields.datasets import DatasetPart, FieldSource, split_dataloaders
from .fields.resolve import NOT_FIELDS, not_normalised, resolve, resolve_parts
from .fields.sources import MODEL, dropped_top_level, levels_that_count, preprocessor_sources

SPLITS = ('train', 'val', 'test')

_attachments: weakref.WeakKeyDictionary[Any, Attachment] = weakref.WeakKeyDictionary()


def attachment_of(runner: Any) -> Attachment:
    """The attachment of a runner, made at the first call.

    Args:
        runner (Runner): The runner.

    Returns:
        Attachment: One for all of its loops.
    """
    if runner not in _attachments:
        _attachments[runner] = Attachment(weakref.proxy(runner))
    return _attachments[runner]


def attach(runner: Any, split: str, dataloader: Any) -> tuple[PrefetchDataPreprocessor | None, Any]:
    """Wrap the preprocessor of a runner's model, and bind the fields of its datasets.

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
    attachment = attachment_of(runner)
    dataloader = attachment.take_fields(split, dataloader)
    return attachment.bind(), dataloader


class Attachment:
    """What mmprefetch has taken from a runner's dataloaders, and given to its model.

    The datasets' ``data_preprocessor`` keys are left out of the configs that dataloaders are built
    from, since no dataset knows them; the runner's own config keeps them. They are bound to the
    model's preprocessor as soon as there is one: some runners build their loops first.

    Args:
        runner (Runner): The runner.
    """

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self._parts: dict[str, list[DatasetPart]] = {}
        self._remaining: dict[str, Any] = {}
        self._bound: dict[str, list[DatasetPart]] = {}

    def take_fields(self, split: str, dataloader: Any) -> Any:
        """Take the bound fields out of a split's dataloader, and out of those of the other splits:
        these may be run by loops that do not look ahead.

        Args:
            split (str): 'train', 'val' or 'test'.
            dataloader (DataLoader | dict): The split's dataloader or its config.

        Returns:
            DataLoader | dict: What to build the split's dataloader from.

        Raises:
            ValueError: A split has several dataloaders that bind different fields.
        """
        for name in SPLITS:
            held = f'_{name}_dataloader'
            loader = dataloader if name == split else getattr(self._runner, held, None)
            if loader is None:
                continue
            if name in self._parts and (
                loader is self._remaining[name] or not isinstance(loader, (dict, list, tuple))
            ):
                continue  # what is left of it says less than it did
            self._remaining[name], self._parts[name] = split_dataloaders(
                loader, f'{name}_dataloader'
            )
            if name == split:
                dataloader = self._remaining[name]
            if hasattr(self._runner, held):
                setattr(self._runner, held, self._remaining[name])
        return dataloader

    def may_be_mixed(self, split: str) -> bool:
        """Whether samples of a split may need constants of their own.

        Args:
            split (str): 'train', 'val' or 'test'.

        Returns:
            bool: Whether its datasets are bound to different fields.
        """
        said = [[source.fields for source in part.sources] for part in self._parts[split]]
        return any(other != said[0] for other in said)

    @property
    def model_is_built(self) -> bool:
        """bool: Whether the runner has its model already."""
        return isinstance(self._runner.model, nn.Module)

    def bind(self) -> PrefetchDataPreprocessor | None:
        """Wrap the preprocessors that the model calls, and bind the fields of all splits to them.

        Returns:
            PrefetchDataPreprocessor | None: The one that the model is stepped with; None where it
            has none.

        Raises:
            ValueError: Fields are bound to a dataset, but no preprocessor could take them; or they
                do not fit it.
        """
        runner = self._runner
        called = list(_called_preprocessors(runner.model))
        keys = [source.key for parts in self._parts.values() for part in parts
                for source in part.sources]  # fmt: skip
        if not called:
            if keys:
                raise ValueError(
                    f'{keys[0]} is set, but the model has no data preprocessor that could take its '
                    'fields. Give the model one: '
                    "`model.data_preprocessor=dict(type='PrefetchDataPreprocessor')`."
                )
            return None
        (_, owner), *others = called
        first = owner.data_preprocessor
        if not isinstance(first, PrefetchDataPreprocessor):
            first = owner.data_preprocessor = _wrapped(first, runner.cfg)
        for split, parts in self._parts.items():
            if self._bound.get(split) is parts:
                continue
            _bind(first, runner.cfg, split, parts)
            for name, owner in others if keys else ():
                other = owner.data_preprocessor
                if not isinstance(other, PrefetchDataPreprocessor):
                    other = owner.data_preprocessor = PrefetchDataPreprocessor.around(other)
                _bind_another(other, name, split, parts)
            self._bound[split] = parts
        return first


def _called_preprocessors(module: nn.Module, name: str = '') -> Iterator[tuple[str, nn.Module]]:
    """Find the modules of a model that have a preprocessor, which it may call, and its name. That
    of a wrapper for test-time augmentation is never called; those inside others belong to them."""
    if 'data_preprocessor' in module._modules and not isinstance(module, BaseTTAModel):
        yield f'{name}data_preprocessor', module
    for key, child in module.named_children():
        if key != 'data_preprocessor':
            yield from _called_preprocessors(child, f'{name}{key}.')


def _wrapped(plain: nn.Module, cfg: Any) -> PrefetchDataPreprocessor:
    dropped = dropped_top_level(cfg)
    if dropped:
        print_log(dropped, logger='current', level=logging.WARNING)
    # What it was built from: a plain one is made from one level alone.
    level = next(iter(levels_that_count(cfg).values()), None)
    level = level if isinstance(level, dict) else {}
    fields = {name: value for name, value in level.items() if name not in NOT_FIELDS}
    return PrefetchDataPreprocessor.around(plain, fields)


def _bind(
    preprocessor: PrefetchDataPreprocessor, cfg: Any, split: str, parts: list[DatasetPart]
) -> None:
    named, scope, levels = preprocessor_sources(cfg)
    # The model's code may have added to its fields, so they are taken from the preprocessor.
    own = FieldSource(levels[0].key if levels else MODEL, preprocessor.fields)
    above = levels[1:] if preprocessor.opted_in else []
    cls = find_wrapped(named, scope) if above else type(preprocessor.wrapped)
    _bind_class(preprocessor, cls, [own, *above], split, parts)


def _bind_another(
    preprocessor: PrefetchDataPreprocessor, name: str, split: str, parts: list[DatasetPart]
) -> None:
    """Bind a split's fields to a further preprocessor, which the model need not call."""
    own = FieldSource(f'model.{name}', preprocessor.fields)
    try:
        _bind_class(preprocessor, type(preprocessor.wrapped), [own], split, parts)
    except ValueError as error:
        preprocessor.refuse(
            split,
            f'The model calls model.{name} as well, a {type(preprocessor.wrapped).__name__}, which '
            f'cannot take the fields that are bound to the datasets of {split}: {error}',
        )


def _bind_class(
    preprocessor: PrefetchDataPreprocessor,
    cls: type[nn.Module],
    levels: list[FieldSource],
    split: str,
    parts: list[DatasetPart],
) -> None:
    own = levels[0]
    if not preprocessor.opted_in and not any(part.sources for part in parts):
        # A plain preprocessor that no dataset changes is what it is: there is nothing to check.
        origin = dict.fromkeys(own.fields, own.key)
        preprocessor.bindings[split] = Binding(split, cls, dict(own.fields), origin)
        return
    bindings = resolve_parts(split, cls, levels, parts) or [resolve(split, cls, levels)]
    binding = preprocessor.bindings[split] = replace(bindings[0], part='')
    if not preprocessor.opted_in:
        preprocessor.bind(split, _rebound(preprocessor, cls, binding.fields))
    elif cls is not type(preprocessor.wrapped) or not same(binding.fields, preprocessor.fields):
        preprocessor.bind(split, build(cls, binding.fields))
    if any(binding.differences(other) for other in bindings):
        if not_normalised(bindings):
            raise ValueError(not_normalised(bindings))
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
    effective = copy.deepcopy(preprocessor.wrapped)
    _carry_over(cls(**preprocessor.fields), cls(**fields), effective)
    return effective


def _carry_over(before: nn.Module, after: nn.Module, effective: nn.Module) -> None:
    for table in ('__dict__', '_buffers'):
        old, new, ours = (getattr(module, table) for module in (before, after, effective))
        for name in {*old, *new} - {'_buffers', '_parameters', '_modules'}:
            if name not in new:
                ours.pop(name, None)
            elif name not in old or not same(old[name], new[name]):
                ours[name] = new[name]
    for name, inner in after.named_children():
        if isinstance(inner, BaseDataPreprocessor):
            _carry_over(getattr(before, name), inner, getattr(effective, name))
