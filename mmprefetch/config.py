# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Switch a config to prefetching."""

from __future__ import annotations

import copy
import logging
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop

from .fields.sources import is_prefetch_loop, type_name_of

PACKAGE = 'mmprefetch'
TRAIN_LOOPS = {EpochBasedTrainLoop: 'max_epochs', IterBasedTrainLoop: 'max_iters'}


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
        said = f'type={type_name_of(type_)!r}' if type_ else f'by_epoch={loop["by_epoch"]}'
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
            f'{key}: no prefetching counterpart of {type_name_of(loop["type"])!r} is known, so the '
            'loop stays as it is; mmprefetch.look_ahead(dataloader, preprocessor) gives a loop of '
            'your own look-ahead',
            logger='current',
            level=logging.WARNING,
        )


def _is_stock(type_: Any, stock: type) -> bool:
    """Whether a type names one of mmengine's loops, not one of the same name elsewhere."""
    if not isinstance(type_, str):
        return type_ is stock
    scope, _, name = type_.rpartition('.')
    return name == stock.__name__ and scope in ('', 'mmengine', 'mmengine.runner', stock.__module__)
