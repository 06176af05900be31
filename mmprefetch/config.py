# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Switch a config to prefetching, and read what it says of the preprocessor."""

import copy
import logging
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop

from .binding import NOT_FIELDS, FieldSource, same

PACKAGE = 'mmprefetch'
PREPROCESSOR = 'PrefetchDataPreprocessor'
DEFAULT_WRAPS = 'ImgDataPreprocessor'
TRAIN_LOOPS = {EpochBasedTrainLoop: 'max_epochs', IterBasedTrainLoop: 'max_iters'}
PREFETCH_LOOPS = frozenset(
    {
        'PrefetchLoop',
        'PrefetchEpochBasedTrainLoop',
        'PrefetchIterBasedTrainLoop',
        'PrefetchValLoop',
        'PrefetchTestLoop',
    }
)


def enable_prefetch(cfg: Config, prefetch_depth: int = 2) -> Config:
    """Switch prefetching on for training, validation and testing.

    Only the loops change, and ``custom_imports``: what the config computes stays the same. Loops
    of ``mmprefetch`` stay as they are. A loop that this package has no counterpart of stays too,
    with a warning.

    Args:
        cfg (Config): The config, which is not changed.
        prefetch_depth (int): How many batches to hold ready ahead of the one that is being used;
            0 switches the look-ahead off. Defaults to 2.

    Returns:
        Config: A copy of the config, with prefetching on.

    Raises:
        TypeError: If ``cfg`` is not a Config, or the depth not an int.
        ValueError: If the depth is negative, or ``train_cfg`` counts in epochs but says how many
            iterations to run, or the reverse.
    """
    if not isinstance(cfg, Config):
        raise TypeError(
            f'cfg: expected an mmengine Config, found {type(cfg).__name__}; write '
            'enable_prefetch(Config.fromfile(path)) or enable_prefetch(Config(some_dict))'
        )
    check_depth('prefetch_depth', prefetch_depth)
    cfg = copy.deepcopy(cfg)
    imports = cfg.get('custom_imports') or ConfigDict(imports=[], allow_failed_imports=False)
    modules = imports['imports']
    modules = [modules] if isinstance(modules, str) else list(modules)
    if PACKAGE not in modules:
        cfg.custom_imports = ConfigDict({**imports, 'imports': [*modules, PACKAGE]})
    for key, switch in (
        ('train_cfg', _train_loop),
        ('val_cfg', lambda loop: _evaluation_loop('val_cfg', loop, ValLoop)),
        ('test_cfg', lambda loop: _evaluation_loop('test_cfg', loop, TestLoop)),
    ):
        loop = cfg.get(key)
        name = switch(loop) if isinstance(loop, dict) else None
        if name is not None:
            kept = {k: v for k, v in dict.items(loop) if k not in ('type', 'by_epoch')}
            cfg[key] = ConfigDict({'type': name, **kept, 'prefetch_depth': prefetch_depth})
    return cfg


def check_depth(key: str, depth: Any) -> None:
    """Check a number of batches to look ahead.

    Args:
        key (str): Its config key.
        depth (Any): The value.

    Raises:
        TypeError: It is not an int.
        ValueError: It is negative.
    """
    if not isinstance(depth, int) or isinstance(depth, bool):
        raise TypeError(
            f'{key}: expected an int, found {type(depth).__name__} {depth!r}; write a number of '
            'batches such as 2, or 0 for no look-ahead'
        )
    if depth < 0:
        raise ValueError(
            f'{key}: found {depth}; write a number of batches such as 2, or 0 for no look-ahead'
        )


def dropped_top_level_fields(cfg: Config | dict) -> dict:
    """Find the fields of the top-level ``data_preprocessor`` that have no effect.

    mmengine's Runner ignores the top level as a whole where the model has a
    ``data_preprocessor`` of its own. The top level counts, field by field, where that is a
    ``PrefetchDataPreprocessor``.

    Args:
        cfg (Config or dict): The config.

    Returns:
        dict: Each field that the top level sets otherwise than the model, and its value.
    """
    top = cfg.get('data_preprocessor')
    if not isinstance(top, dict):
        return {}
    model = cfg.get('model')
    own = None
    if isinstance(model, dict):
        if 'data_preprocessor' not in model:
            return {}
        own = model['data_preprocessor']
        if is_prefetching(own):
            return {}
    own = own if isinstance(own, dict) else {}
    return {
        name: value
        for name, value in top.items()
        if name not in NOT_FIELDS and not (name in own and same(own[name], value))
    }


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
    model = cfg.get('model')
    top = cfg.get('data_preprocessor')
    levels = [('data_preprocessor', top)]
    if isinstance(model, dict) and 'data_preprocessor' in model:
        own = model['data_preprocessor']
        levels = [('model.data_preprocessor', own)]
        if is_prefetching(own):
            levels.append(('data_preprocessor', top))
    type_, scope, sources = None, None, []
    for key, level in levels:
        if level is None:
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
    if type_ is None and any(is_prefetching(level) for _, level in levels):
        type_ = DEFAULT_WRAPS
    return type_, scope, sources


def is_prefetching(preprocessor: Any) -> bool:
    """Whether a preprocessor's config names ``PrefetchDataPreprocessor``.

    Args:
        preprocessor (Any): What stands at a ``data_preprocessor`` key.

    Returns:
        bool: True if its ``type`` is that name, with or without scope, or that class.
    """
    return isinstance(preprocessor, dict) and _name(preprocessor.get('type')) == PREPROCESSOR


def is_prefetch_loop(loop: Any) -> bool:
    """Whether a loop's config names one of this package's loops.

    Args:
        loop (Any): What stands at ``train_cfg``, ``val_cfg`` or ``test_cfg``.

    Returns:
        bool: True if its ``type`` is such a name, with or without scope, or such a class.
    """
    return isinstance(loop, dict) and _name(loop.get('type')) in PREFETCH_LOOPS


def _named_class(key: str, level: dict) -> Any:
    type_, wraps = level.get('type'), level.get('wraps')
    if type_ is None or is_prefetching(level):
        return wraps
    if wraps is not None and _name(type_) != _name(wraps):
        raise ValueError(
            f'{key}: type={_name(type_)!r} and wraps={_name(wraps)!r} name two preprocessors; '
            'write only one of them'
        )
    return type_


def _train_loop(loop: dict) -> str | None:
    type_ = loop.get('type')
    if type_ is None:
        if 'by_epoch' not in loop:
            return 'PrefetchLoop'
        counted = 'max_epochs' if loop['by_epoch'] else 'max_iters'
    else:
        stock = [known for known in TRAIN_LOOPS if _is_stock(type_, known)]
        if not stock:
            _keep('train_cfg', loop)
            return None
        counted = TRAIN_LOOPS[stock[0]]
    if counted not in loop:
        other = 'max_iters' if counted == 'max_epochs' else 'max_epochs'
        found = f'{other}={loop[other]}' if other in loop else 'neither of the two'
        said = f'type={_name(type_)!r}' if type_ else f'by_epoch={loop["by_epoch"]}'
        raise ValueError(f'train_cfg: {said} needs {counted}, found {found}; write {counted}=...')
    return 'PrefetchLoop'


def _evaluation_loop(key: str, loop: dict, stock: type) -> str | None:
    if loop.get('type') is None or _is_stock(loop['type'], stock):
        return f'Prefetch{stock.__name__}'
    _keep(key, loop)
    return None


def _keep(key: str, loop: dict) -> None:
    if not is_prefetch_loop(loop):
        print_log(
            f'{key}: no prefetching counterpart of {_name(loop["type"])!r} is known, the loop '
            'stays as it is',
            logger='current',
            level=logging.WARNING,
        )


def _is_stock(type_: Any, stock: type) -> bool:
    """Whether a type names one of mmengine's loops, not one of the same name elsewhere."""
    if not isinstance(type_, str):
        return type_ is stock
    scope, _, name = type_.rpartition('.')
    return name == stock.__name__ and scope in ('', 'mmengine', 'mmengine.runner', stock.__module__)


def _name(type_: Any) -> str:
    if isinstance(type_, str):
        return type_.rpartition('.')[2]
    return getattr(type_, '__name__', str(type_))
