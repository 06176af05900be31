# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The hook that tells which split runs, and records what its images went through."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from mmengine.dist import is_main_process
from mmengine.hooks import Hook
from mmengine.registry import HOOKS

from .checkpoints.restore import PARTS_KEY, RECORD_KEY, type_name
from .data_preprocessor import PrefetchDataPreprocessor
from .deploy_config import deploy_config
from .fields.binding import Binding, table


@HOOKS.register_module()
class PrefetchHook(Hook):
    """Tells the preprocessor which split runs, and writes a record into checkpoints.

    The loops of mmprefetch register one where the config has none, and keep it ahead of all other
    hooks, so that these find the right split.
    """

    priority = 'HIGHEST'

    def __init__(self) -> None:
        self._splits: list[str | None] = []

    def before_run(self, runner: Any) -> None:
        """Log the effective fields of each split, and where each came from."""
        preprocessor = find_preprocessor(runner)
        if preprocessor is not None and preprocessor.bindings:
            bindings = [
                shown
                for _, binding in sorted(preprocessor.bindings.items())
                for shown in (binding.parts or [binding])
            ]
            runner.logger.info(f'Preprocessing of each split:\n{table(bindings)}')

        if is_main_process():
            self._write_deploy_config(runner)

    @staticmethod
    def _write_deploy_config(runner: Any) -> None:
        """Write a config that stands alone, beside the one that mmengine writes."""
        cfg = runner.cfg
        splits = [split for split in ('test', 'val', 'train') if cfg.get(f'{split}_dataloader')]
        if not splits or not isinstance(cfg.get('model'), dict):
            return
        name = Path(cfg.filename).stem if cfg.filename else runner.timestamp
        try:
            made = deploy_config(cfg, splits[0])
        except ValueError as error:
            runner.logger.info(f'No config for deployment is written: {error}')
            return
        made.dump(str(Path(runner.work_dir) / f'{name}_deploy.py'))

    def before_train(self, runner: Any) -> None:
        """Batches that nobody began belong to the training split from here on."""
        self._enter(runner, 'train')

    def after_train(self, runner: Any) -> None:
        """Back to what was before."""
        self._leave(runner)

    def before_val(self, runner: Any) -> None:
        """Batches that nobody began belong to the validation split from here on."""
        self._enter(runner, 'val')

    def after_val(self, runner: Any) -> None:
        """Back to what was before."""
        self._leave(runner)

    def before_test(self, runner: Any) -> None:
        """Batches that nobody began belong to the test split from here on."""
        self._enter(runner, 'test')

    def after_test(self, runner: Any) -> None:
        """Back to what was before."""
        self._leave(runner)

    def before_save_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Write the effective preprocessing of each split into the checkpoint."""
        preprocessor = find_preprocessor(runner)
        if preprocessor is not None and preprocessor.bindings:
            checkpoint['meta'][RECORD_KEY] = {
                split: {
                    'type': type_name(type(preprocessor.of_split(split))),
                    **copy.deepcopy(binding.fields),
                    **_parts(binding),
                }
                for split, binding in preprocessor.bindings.items()
            }

    def _enter(self, runner: Any, split: str) -> None:
        self._splits.append(split)
        self._tell(runner, split)

    def _leave(self, runner: Any) -> None:
        if self._splits:
            self._splits.pop()
        self._tell(runner, self._splits[-1] if self._splits else None)

    @staticmethod
    def _tell(runner: Any, split: str | None) -> None:
        for module in runner.model.modules():
            if isinstance(module, PrefetchDataPreprocessor):
                module.split = split


def _parts(binding: Binding) -> dict:
    if not binding.parts:
        return {}
    return {PARTS_KEY: {part.part: copy.deepcopy(part.fields) for part in binding.parts}}


def find_preprocessor(runner: Any) -> PrefetchDataPreprocessor | None:
    """Find the prefetching preprocessor of a runner's model.

    Args:
        runner (Runner): The runner.

    Returns:
        PrefetchDataPreprocessor | None: The one nearest to the model's root, if there is one.
    """
    for module in runner.model.modules():
        if isinstance(module, PrefetchDataPreprocessor):
            return module
    return None


def put_first(runner: Any) -> None:
    """Register a :class:`PrefetchHook` if the runner has none, and put it ahead of all hooks.

    Args:
        runner (Runner): The runner.
    """
    hooks = runner._hooks
    hook = next((hook for hook in hooks if isinstance(hook, PrefetchHook)), None)
    if hook is None:
        hook = PrefetchHook()
    else:
        hooks.remove(hook)
    hooks.insert(0, hook)
