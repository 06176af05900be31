# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Switch a config to prefetching."""

from __future__ import annotations

import copy
import logging
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.logging import print_log
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop

from .fields.classes import type_name_of
from .fields.sources import is_prefetch_loop

PACKAGE = 'mmprefetch'
# mmengine's own loops at each key, and what takes their place.
STOCK_LOOPS = {
    'train_cfg': ((EpochBasedTrainLoop, IterBasedTrainLoop), 'PrefetchLoop'),
    'val_cfg': ((ValLoop,), 'PrefetchValLoop'),
    'test_cfg': ((TestLoop,), 'PrefetchTestLoop'),
}


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
    for key, (stock, name) in STOCK_LOOPS.items():
        loop = cfg.get(key)
        if isinstance(loop, dict) and _is_stock(key, loop, stock):
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
    advice = 'write a number of batches such as 2, or 0 for no look-ahead'
    if not isinstance(depth, int) or isinstance(depth, bool):
        found = type(depth).__name__
        raise TypeError(f'{key}: expected an int, found {found} {depth!r}; {advice}')
    if depth < 0:
        raise ValueError(f'{key}: found {depth}; {advice}')


def _is_stock(key: str, loop: dict, stock: tuple[type, ...]) -> bool:
    """Whether a loop's config stands for one of mmengine's loops; warns of other packages' loops,
    and checks what a training loop counts."""
    type_ = loop.get('type')
    named = next((known for known in stock if _names(type_, known)), None)
    if type_ is not None and named is None:
        if not is_prefetch_loop(loop):
            print_log(
                f'{key}: no prefetching counterpart of {type_name_of(type_)!r} is known, so the '
                'loop stays as it is; mmprefetch.look_ahead(dataloader, preprocessor) gives a loop '
                'of your own look-ahead',
                logger='current',
                level=logging.WARNING,
            )
        return False
    if key == 'train_cfg' and (named or 'by_epoch' in loop):
        by_epoch = loop['by_epoch'] if named is None else named is EpochBasedTrainLoop
        counted, other = ('max_epochs', 'max_iters')[:: 1 if by_epoch else -1]
        if counted not in loop:
            said = f'type={type_name_of(type_)!r}' if named else f'by_epoch={by_epoch}'
            found = f'{other}={loop[other]}' if other in loop else 'neither of the two'
            raise ValueError(
                f'train_cfg: {said} needs {counted}, found {found}; write {counted}=...'
            )
    return True


def _names(type_: Any, stock: type) -> bool:
    """Whether a type names one of mmengine's loops, not one of the same name elsewhere."""
    if not isinstance(type_, str):
        return type_ is stock
    scope, _, name = type_.rpartition('.')
    return name == stock.__name__ and scope in ('', 'mmengine', 'mmengine.runner', stock.__module__)
