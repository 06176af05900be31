# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Which levels of a config say something of the preprocessor, and which of them count."""

from __future__ import annotations

from typing import Any

from mmengine.config import Config
from mmengine.model import BaseTTAModel
from mmengine.registry import MODELS
from torch import nn

from .binding import same
from .classes import find_class, type_name_of
from .datasets import FieldSource
from .resolve import NOT_FIELDS

TOP, MODEL = 'data_preprocessor', 'model.data_preprocessor'
PREPROCESSOR = 'PrefetchDataPreprocessor'
DEFAULT_WRAPS = 'ImgDataPreprocessor'
PREFETCH_LOOPS = (
    *('PrefetchLoop', 'PrefetchEpochBasedTrainLoop', 'PrefetchIterBasedTrainLoop'),
    *('PrefetchValLoop', 'PrefetchTestLoop'),
)


def levels_that_count(cfg: Config | dict) -> dict[str, Any]:
    """Say which of a config's two levels the model's preprocessor is made from.

    mmengine's Runner ignores the top-level ``data_preprocessor`` as a whole where the model has one
    of its own. Only where that is a ``PrefetchDataPreprocessor`` do both count, field by field.

    Args:
        cfg (Config or dict): The config.

    Returns:
        dict: What stands at each level that counts, lowest precedence first.
    """
    key, model = called_model(cfg)
    if not isinstance(model, dict):
        return {}
    if 'data_preprocessor' not in model:
        return {TOP: cfg.get(TOP)}
    own = model['data_preprocessor']
    key = f'{key}.data_preprocessor'
    return {key: own, TOP: cfg.get(TOP)} if _is_prefetching(own) else {key: own}


def called_model(cfg: Config | dict) -> tuple[str, Any]:
    """Find the model whose preprocessor is called: not a wrapper for test-time augmentation, which
    calls that of the model inside.

    Args:
        cfg (Config or dict): The config.

    Returns:
        tuple: Its config key, and what stands there.
    """
    key, model = 'model', cfg.get('model')
    while isinstance(model, dict) and isinstance(model.get('module'), dict):
        cls = find_class(MODELS, model.get('type'), model.get('_scope_'))
        if not isinstance(cls, type) or not issubclass(cls, BaseTTAModel):
            break
        outer, key, model = model, f'{key}.module', model['module']
        if outer.get('data_preprocessor') is not None:  # it replaces that of the model
            model = {**model, 'data_preprocessor': outer['data_preprocessor']}
    return key, model


def dropped_top_level(cfg: Config | dict) -> str:
    """Say which fields of the top-level ``data_preprocessor`` have no effect.

    Args:
        cfg (Config or dict): The config.

    Returns:
        str: A warning that names those that the model sets otherwise, or not; empty if there are
        none.
    """
    top, levels = cfg.get(TOP), levels_that_count(cfg)
    if TOP in levels or not isinstance(top, dict):
        return ''
    own = next(iter(levels.values()), None)
    own = own if isinstance(own, dict) else {}
    dropped = [
        name
        for name, value in top.items()
        if name not in NOT_FIELDS and not (name in own and same(own[name], value))
    ]
    if not dropped:
        return ''
    return (
        f'data_preprocessor: nothing reads {", ".join(dropped)} at the top level, since the '
        "model's own data_preprocessor replaces it whole; to merge them field by field, write "
        "type='PrefetchDataPreprocessor' and wraps=... in model.data_preprocessor, or move them to "
        'the datasets'
    )


def preprocessor_sources(cfg: Config | dict) -> tuple[Any, str | None, list[FieldSource]]:
    """Read which preprocessor a config uses, and the fields that hold for every split.

    Args:
        cfg (Config or dict): The config.

    Returns:
        tuple: The ``type`` of the preprocessor, which is the wrapped one in the case of
        ``PrefetchDataPreprocessor``, and None where the config leaves it to the model; its
        ``_scope_``; and the places, lowest precedence first.

    Raises:
        TypeError: If a ``data_preprocessor`` is not a dict.
        ValueError: If the top-level ``data_preprocessor`` names two classes.
    """
    type_, scope, sources = None, None, []
    for key, level in levels_that_count(cfg).items():
        if level is None:
            continue
        if isinstance(level, nn.Module):  # built already: its fields are not known
            type_ = type(level)
            continue
        if not isinstance(level, dict):
            raise TypeError(
                f'{key}: expected a dict, found {type(level).__name__}; write '
                f"{key.rpartition('.')[2]}=dict(type='{PREPROCESSOR}', ...)"
            )
        sources.append(FieldSource(key, dict(level.items())))
        named = _named_class(key, level)
        if named is not None:
            type_, scope = named, level.get('_scope_')
    if type_ is None and any(_is_prefetching(source.fields) for source in sources):
        type_ = DEFAULT_WRAPS
    return type_, scope, sources


def is_prefetch_loop(loop: Any) -> bool:
    """Whether a loop's config names one of this package's loops.

    Args:
        loop (Any): What stands at ``train_cfg``, ``val_cfg`` or ``test_cfg``.

    Returns:
        bool: True if its ``type`` is such a name, with or without scope, or such a class.
    """
    return isinstance(loop, dict) and type_name_of(loop.get('type')) in PREFETCH_LOOPS


def _is_prefetching(level: Any) -> bool:
    return isinstance(level, dict) and type_name_of(level.get('type')) == PREPROCESSOR


def _named_class(key: str, level: dict) -> Any:
    type_, wraps = level.get('type'), level.get('wraps')
    if type_ is None or _is_prefetching(level):
        return wraps
    if wraps is not None and type_name_of(type_) != type_name_of(wraps):
        raise ValueError(
            f'{key}: type={type_name_of(type_)!r} and wraps={type_name_of(wraps)!r} name two '
            'preprocessors; write only one of them'
        )
    return type_
