# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Rebuild the preprocessing that a checkpoint records, and choose between it and a config's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log
from mmengine.registry import MODELS, Registry
from mmengine.runner import CheckpointLoader
from torch import nn

from ..attach import attach
from ..data_preprocessor import PrefetchDataPreprocessor, build
from ..fields.binding import REVERSAL, Binding, aligned, same
from ..fields.classes import constructor_fields, find_class, type_name_of
from ..fields.datasets import FieldSource
from ..fields.resolve import NOT_FIELDS, resolve
from .safe_loading import allow_checkpoint_types

PARTS_KEY = 'parts'
RECORD_KEY = 'data_preprocessor'
# A split that the checkpoint knows nothing of is taken to be like the next one.
SPLITS = ('test', 'val', 'train')
CONFIG, CHECKPOINT = SOURCES = ('config', 'checkpoint')


def load_preprocessor(
    checkpoint: str | Path | Mapping, split: str = 'test', part: str | None = None
) -> nn.Module:
    """Rebuild the preprocessor that a checkpoint records, without dataset or training config.

    Where the checkpoint has no record of the split, the next of test, val and train is taken, and
    a warning says so.

    Args:
        checkpoint (str | Path | Mapping): A checkpoint's file, or what was loaded from one.
        split (str): 'test', 'val' or 'train'. Defaults to 'test'.
        part (str, optional): The config key of one of its datasets, needed where these differ in
            mean, std or channel order.

    Returns:
        nn.Module: An object of the recorded class, on the CPU. Where that class could not reverse
        the channels of images that have other than three, it is inside a
        :class:`PrefetchDataPreprocessor`, which can.

    Raises:
        ValueError: The checkpoint holds no record, or the split is unknown, or the recorded class
            is not registered here, or the recorded fields do not fit it; or the split's datasets
            differ, and ``part`` names none of them.
    """
    split, record = read_record(checkpoint, split)
    parts = record.pop(PARTS_KEY, {})
    if part in parts:
        record.update(parts[part])
    elif parts or part is not None:
        known = ', '.join(parts) or 'none: its datasets agree'
        raise ValueError(
            f'part={part!r} is none of the datasets of the {split} split that differ in what '
            f'they are normalised with; write one of these: {known}'
        )
    binding, module = _build(split, record)
    if getattr(module, '_any_channels', False) and binding.reverses_channels:
        mean = binding.fields.get('mean')
        if mean is None or len(mean) != 3:
            return PrefetchDataPreprocessor.around(module, binding.fields)
    return module


def read_record(checkpoint: str | Path | Mapping, split: str = 'test') -> tuple[str, dict]:
    """Read what a checkpoint records of a split's preprocessing.

    Args:
        checkpoint (str | Path | Mapping): A checkpoint's file, or what was loaded from one.
        split (str): 'test', 'val' or 'train'. Defaults to 'test'.

    Returns:
        tuple[str, dict]: The split that the record is of, and the record: ``type``, the name of
        the preprocessor's class, and its fields.

    Raises:
        ValueError: The checkpoint holds no record, or the split is unknown.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: write 'test', 'val' or 'train'")
    records = _records(checkpoint)
    taken = next((name for name in SPLITS[SPLITS.index(split) :] if name in records), None)
    if taken is None:
        found = f'only that of {", ".join(records)}' if records else 'none'
        raise ValueError(
            f"checkpoint['meta']['{RECORD_KEY}'] should hold the preprocessing of the {split} "
            f'split, found {found}. PrefetchHook writes it: save the checkpoint again from a run '
            "with the loops of mmprefetch (`train_cfg=dict(type='PrefetchLoop', ...)`), or build "
            'the preprocessor from a config of your own '
            "(`MODELS.build(dict(type='ImgDataPreprocessor', mean=[...], std=[...]))`)"
        )
    if taken != split:
        _say(
            f'The checkpoint has no record of the {split} split; the preprocessing of its {taken} '
            'split is taken.',
            logging.WARNING,
        )
    return taken, dict(records[taken])


def type_name(cls: type[nn.Module]) -> str:
    """Name a preprocessor's class so that it is found from anywhere.

    Args:
        cls (type): The class.

    Returns:
        str: The registered name if it is mmengine's own; with the package in front if it is
        registered in another one (``mmdet.DetDataPreprocessor``); else with its module.
    """
    for registry in _tree(MODELS):
        for name, registered in registry.module_dict.items():
            if registered is cls and registry is not MODELS:
                return f'{registry.scope}.{name}'
            # A class of the script that is running can't be imported under its module's name.
            if registered is cls and cls.__module__.split('.')[0] in ('mmengine', '__main__'):
                return name
    return f'{cls.__module__}.{cls.__qualname__}'


def describe(split: str, found: Mapping[str, tuple[Any, Any]], source: str = CONFIG) -> str:
    """Say which preprocessing a split uses, and show both where they differ.

    Args:
        split (str): 'train', 'val' or 'test'.
        found (Mapping): For each field that differs the value by the config and that by the
            checkpoint.
        source (str): The one that is used, 'config' or 'checkpoint'. Defaults to 'config'.

    Returns:
        str: One line, or several with a table: field, value by the config, by the checkpoint.
    """
    if not found:
        return f'The {split} split is preprocessed as the config and the checkpoint both say.'
    rows = [('field', *SOURCES), *((name, *map(repr, pair)) for name, pair in found.items())]
    other = CHECKPOINT if source == CONFIG else CONFIG
    return '\n'.join(
        [
            f'The {split} split: the config says another preprocessing than the checkpoint.',
            *(f'  {line}' for line in aligned(rows)),
            f"The {source}'s is used; to use the {other}'s, say `--preprocess-from {other}`.",
        ]
    )


def choose_preprocessing(
    runner: Any, checkpoint: str | Path | Mapping, split: str = 'test', source: str = CONFIG
) -> dict[str, tuple[Any, Any]]:
    """Choose between the preprocessing of a runner's config and that of a checkpoint.

    Logs which is used, as a warning that shows both where they differ.

    Args:
        runner (Runner): The runner, before the split's loop is run. The loop is built if it is
            not yet.
        checkpoint (str | Path | Mapping): A checkpoint's file, or what was loaded from one.
        split (str): The split that is about to run. Defaults to 'test'.
        source (str): 'config', or 'checkpoint' to replace the split's effective preprocessor.
            Defaults to 'config'.

    Returns:
        dict[str, tuple]: For each field that differs the value by the config and that by the
        checkpoint. A field that one of them leaves out is at its default there. The names of the
        channel order count as one field, and the class is among them as ``type``. Empty if the
        source is the config and the checkpoint holds no record.

    Raises:
        ValueError: The source is another word; or it is 'checkpoint', and the checkpoint holds no
            record, or the model has no data preprocessor.
    """
    if source not in SOURCES:
        raise ValueError(f'preprocess-from={source!r}: write {" or ".join(map(repr, SOURCES))}')
    preprocessor = _attached(runner, split)
    if preprocessor is None:
        if source == CONFIG:
            return {}
        raise ValueError(
            "preprocess-from='checkpoint': the model has no data preprocessor to replace; write "
            "`model.data_preprocessor=dict(type='PrefetchDataPreprocessor')` in the config"
        )
    if source == CONFIG and not _records(checkpoint):
        _say(f'The {split} split is preprocessed as the config says; the checkpoint says nothing.')
        return {}
    recorded_split, record = read_record(checkpoint, split)
    ours = preprocessor.bindings[split]
    if ours.parts or PARTS_KEY in record:
        if source == CHECKPOINT:
            raise ValueError(
                f"preprocess-from='checkpoint': datasets of the {split} split differ in what they "
                'are normalised with, in the config or in the checkpoint; only the config can say '
                "which sample is which, so write preprocess-from='config'"
            )
        _compare_parts(split, ours, record)
        return {}
    # Without its class, which need not be installed here, the record has our class's defaults.
    theirs = Binding(split, ours.cls, _fields(record), {})
    if source == CHECKPOINT:
        theirs, module = _build(recorded_split, record)
        preprocessor.bind(split, module)
        preprocessor.bindings[split] = replace(theirs, split=split)
    found = {}
    names = ours.type_name, type_name_of(record['type'])
    if names[0] != names[1]:
        found['type'] = names
    found.update(ours.differences(theirs))
    if REVERSAL in found:
        name = 'to_rgb' if 'to_rgb' in constructor_fields(ours.cls)[0] else 'bgr_to_rgb'
        found[name] = found.pop(REVERSAL)
    _say(describe(split, found, source), logging.WARNING if found else logging.INFO)
    return found


def _compare_parts(split: str, ours: Binding, record: Mapping) -> None:
    """Say whether config and checkpoint agree where datasets of a split differ in one of them."""
    said = [part.fields for part in ours.parts] or [ours.fields]
    recorded = list(record.get(PARTS_KEY, {}).values()) or [_fields(record)]
    if same(said, recorded):
        _say(f'The {split} split is preprocessed as the config and the checkpoint say.')
    else:
        _say(
            f'The {split} split is preprocessed as the config says, dataset by dataset: {said}. '
            f'The checkpoint says something else: {recorded}.',
            logging.WARNING,
        )


def _say(message: str, level: int = logging.INFO) -> None:
    print_log(message, logger='current', level=level)


def _attached(runner: Any, split: str) -> PrefetchDataPreprocessor | None:
    loop = getattr(runner, f'{split}_loop')
    for module in runner.model.modules():
        if isinstance(module, PrefetchDataPreprocessor) and split in module.bindings:
            return module
    # A loop of mmengine's binds nothing, and does not say which split it runs.
    preprocessor, _ = attach(runner, split, loop.dataloader)
    if preprocessor is not None:
        preprocessor.split = split
    return preprocessor


def _records(checkpoint: str | Path | Mapping) -> Mapping:
    if not isinstance(checkpoint, Mapping):
        if '://' in str(checkpoint):
            checkpoint = CheckpointLoader.load_checkpoint(str(checkpoint), map_location='cpu')
        else:
            allow_checkpoint_types()  # another package may have taken them off the list
            checkpoint = torch.load(checkpoint, map_location='cpu', weights_only=True)
    return (checkpoint.get('meta') or {}).get(RECORD_KEY) or {}


def _build(split: str, record: Mapping) -> tuple[Binding, nn.Module]:
    cls = _find(record['type'])
    source = FieldSource(f"checkpoint['meta']['{RECORD_KEY}']['{split}']", _fields(record))
    binding = resolve(split, cls, [source])
    return binding, build(cls, binding.fields)


def _fields(record: Mapping) -> dict:
    return {name: value for name, value in record.items() if name not in (*NOT_FIELDS, PARTS_KEY)}


def _find(name: str) -> type[nn.Module]:
    known = (registry.module_dict.get(name) for registry in _tree(MODELS))
    cls = find_class(MODELS, name) or next(filter(None, known), None)
    # The name comes from a file: it must not get any other callable called.
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        found = 'is not registered here' if cls is None else 'is not a module of torch'
        package = name.partition('.')[0] if '.' in name else 'the package that defines it'
        raise ValueError(
            f"checkpoint['meta']['{RECORD_KEY}']: type={name!r} {found}. Install and import "
            f'{package} before the checkpoint is read'
        )
    return cls


def _tree(registry: Registry) -> Iterator[Registry]:
    yield registry
    for child in registry.children.values():
        yield from _tree(child)
