# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A config that stands alone for deployment."""

from __future__ import annotations

import copy

from mmengine.config import Config, ConfigDict
from mmengine.registry import DefaultScope

from .config import PACKAGE
from .fields.classes import type_name_of
from .fields.datasets import split_dataloaders
from .fields.explain import SPLITS, preprocessor_class
from .fields.resolve import resolve, resolve_parts
from .fields.sources import TOP, called_model, is_prefetch_loop, preprocessor_sources


def deploy_config(cfg: Config, split: str = 'test', part: str | None = None) -> Config:
    """Make a config from which the model can be built without mmprefetch and without the datasets'
    fields, as inference tools do.

    Its ``model.data_preprocessor`` is the plain class with the split's effective values. Bound
    fields are taken out of the datasets, and loops and hooks of mmprefetch are mmengine's again.

    Args:
        cfg (Config): The config of a run, which is not changed.
        split (str): 'train', 'val' or 'test', whose values count. Defaults to 'test'.
        part (str, optional): The config key of a dataset, where those of the split differ in what
            their samples are normalised with. Defaults to None.

    Returns:
        Config: The config.

    Raises:
        ValueError: The config has no such split or part, its datasets differ and no part is named,
            or its fields do not fit the preprocessor.
    """
    cfg = copy.deepcopy(cfg)
    if cfg.get(f'{split}_dataloader') is None:
        found = [name for name in SPLITS if cfg.get(f'{name}_dataloader') is not None]
        raise ValueError(
            f'split={split!r}: the config has no {split}_dataloader; write one of {found}'
        )
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
        cls, levels = preprocessor_class(cfg)
        type_, scope, _ = preprocessor_sources(cfg)
        parts = []
        for name in SPLITS:
            key = f'{name}_dataloader'
            if cfg.get(key) is not None:
                cfg[key], found = split_dataloaders(cfg[key], key)
                parts = found if name == split else parts
        bindings = resolve_parts(split, cls, levels, parts) or [resolve(split, cls, levels)]
    chosen = [binding for binding in bindings if part in (None, binding.part)]
    if not chosen or any(chosen[0].differences(other) for other in chosen):
        raise ValueError(
            f'part={part!r}: the datasets of the {split} split differ in what their samples are '
            f'normalised with; write one of {[each.key for each in parts]}'
        )
    named = {} if type_ is None else {'type': type_}
    if scope is not None:
        named['_scope_'] = scope
    cfg.pop(TOP, None)  # it has been merged, or did not count
    model = cfg
    for name in called_model(cfg)[0].split('.'):
        model = model[name]
        model.pop(TOP, None)
    model[TOP] = ConfigDict({**named, **chosen[0].fields})
    _take_out_mmprefetch(cfg)
    return cfg


def _take_out_mmprefetch(cfg: Config) -> None:
    for split in SPLITS:
        loop = cfg.get(f'{split}_cfg')
        if is_prefetch_loop(loop):
            name = type_name_of(loop.type)
            if name == 'PrefetchLoop':
                by_epoch = loop.get('max_epochs') is not None
                name = 'PrefetchEpochBasedTrainLoop' if by_epoch else 'PrefetchIterBasedTrainLoop'
            loop.type = name[len('Prefetch') :]
            for argument in ('prefetch_depth', 'loader_thread'):
                loop.pop(argument, None)
    if cfg.get('custom_hooks'):
        cfg.custom_hooks = [
            hook
            for hook in cfg.custom_hooks
            if not isinstance(hook, dict) or type_name_of(hook.get('type')) != 'PrefetchHook'
        ]
    imports = cfg.get('custom_imports')
    if imports:
        modules = imports['imports']
        modules = [modules] if isinstance(modules, str) else modules
        imports['imports'] = [module for module in modules if module != PACKAGE]
        if not imports['imports']:
            cfg.pop('custom_imports')
