# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The loops: mmengine's own, on a dataloader that looks ahead."""

from __future__ import annotations

import inspect
from typing import Any

from mmengine.evaluator import Evaluator
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from mmengine.runner.base_loop import BaseLoop
from torch.utils.data import DataLoader

from .attach import attach
from .classes import nearest
from .hooks import put_first
from .lookahead import LookAheadLoader
from .mixed import PartRecorder


class _LookAheadLoop:
    """What the five loops share: checked arguments, a dataloader that looks ahead, a clean end."""

    _split: str

    def __new__(cls, *args: Any, **kwargs: Any) -> _LookAheadLoop:
        _refuse_unknown(cls, kwargs)
        return super().__new__(cls)

    def run(self) -> Any:
        """Run the loop of mmengine; end the look-ahead for whatever reason it ends."""
        put_first(self.runner)
        try:
            return super().run()
        finally:
            self.dataloader.close()


def _looking_ahead(
    loop: _LookAheadLoop,
    runner: Any,
    dataloader: DataLoader | dict,
    prefetch_depth: int,
    loader_thread: bool,
) -> LookAheadLoader:
    """Build a loop's dataloader, and give it look-ahead."""
    split = loop._split
    cfg = f'{split}_cfg'
    if isinstance(prefetch_depth, bool) or not isinstance(prefetch_depth, int):
        raise TypeError(
            f'{cfg}.prefetch_depth must be a whole number, got {prefetch_depth!r} '
            f'({type(prefetch_depth).__name__}). Write for example `prefetch_depth=2`; 0 turns '
            'look-ahead off.'
        )
    if prefetch_depth < 0:
        raise ValueError(
            f'{cfg}.prefetch_depth must not be negative, got {prefetch_depth}. Write for example '
            '`prefetch_depth=2`; 0 turns look-ahead off.'
        )
    if not isinstance(loader_thread, bool):
        raise TypeError(f'{cfg}.loader_thread must be True or False, got {loader_thread!r}.')
    preprocessor, dataloader = attach(runner, split, dataloader)
    BaseLoop.__init__(loop, runner, dataloader)
    _refuse_empty(loop.dataloader, split)
    put_first(runner)
    recorder = None
    if preprocessor is not None and preprocessor.is_mixed(split):
        recorder = PartRecorder(loop.dataloader, split)
    return LookAheadLoader(
        loop.dataloader, preprocessor, split, prefetch_depth, loader_thread, recorder
    )


def _refuse_empty(dataloader: DataLoader, split: str) -> None:
    try:
        batches = len(dataloader)
    except TypeError:
        return  # an iterable dataset has no length
    if batches == 0:
        raise ValueError(
            f'{split}_dataloader has no batches: its dataset has {len(dataloader.dataset)} '
            f'samples, batch_size={dataloader.batch_size}, drop_last={dataloader.drop_last}. '
            f'Check the paths in `{split}_dataloader.dataset`, or write a smaller `batch_size`.'
        )


@LOOPS.register_module()
class PrefetchEpochBasedTrainLoop(_LookAheadLoop, EpochBasedTrainLoop):
    """Epoch-based training that prepares batches ahead of the step.

    Args:
        runner (Runner): A reference of runner.
        dataloader (DataLoader or dict): A dataloader object or a dict to build one.
        max_epochs (int): Total training epochs.
        val_begin (int): The epoch that begins validating. Defaults to 1.
        val_interval (int): Validation interval, in epochs. Defaults to 1.
        dynamic_intervals (list, optional): ``(milestone, interval)`` tuples. Defaults to None.
        prefetch_depth (int): Batches in flight ahead of the one being trained; 0 turns look-ahead
            off. Defaults to 2.
        loader_thread (bool): Load in a thread of its own where there are worker processes. Turn
            it off for a sampler that draws from a global random generator at every index.
            Defaults to True.

    Raises:
        TypeError: ``prefetch_depth`` is not a whole number.
        ValueError: ``prefetch_depth`` is negative, or the dataloader has no batches.
    """

    _split = 'train'

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict,
        max_epochs: int,
        val_begin: int = 1,
        val_interval: int = 1,
        dynamic_intervals: list[tuple[int, int]] | None = None,
        prefetch_depth: int = 2,
        loader_thread: bool = True,
    ) -> None:
        loader = _looking_ahead(self, runner, dataloader, prefetch_depth, loader_thread)
        super().__init__(runner, loader, max_epochs, val_begin, val_interval, dynamic_intervals)


@LOOPS.register_module()
class PrefetchIterBasedTrainLoop(_LookAheadLoop, IterBasedTrainLoop):
    """Iteration-based training that prepares batches ahead of the step.

    Args:
        runner (Runner): A reference of runner.
        dataloader (DataLoader or dict): A dataloader object or a dict to build one.
        max_iters (int): Total training iterations.
        val_begin (int): The iteration that begins validating. Defaults to 1.
        val_interval (int): Validation interval, in iterations. Defaults to 1000.
        dynamic_intervals (list, optional): ``(milestone, interval)`` tuples. Defaults to None.
        prefetch_depth (int): Batches in flight ahead of the one being trained; 0 turns look-ahead
            off. Defaults to 2.
        loader_thread (bool): Load in a thread of its own where there are worker processes. Turn
            it off for a sampler that draws from a global random generator at every index.
            Defaults to True.

    Raises:
        TypeError: ``prefetch_depth`` is not a whole number.
        ValueError: ``prefetch_depth`` is negative, or the dataloader has no batches.
    """

    _split = 'train'

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict,
        max_iters: int,
        val_begin: int = 1,
        val_interval: int = 1000,
        dynamic_intervals: list[tuple[int, int]] | None = None,
        prefetch_depth: int = 2,
        loader_thread: bool = True,
    ) -> None:
        loader = _looking_ahead(self, runner, dataloader, prefetch_depth, loader_thread)
        super().__init__(runner, loader, max_iters, val_begin, val_interval, dynamic_intervals)

    def run(self) -> Any:
        """Launch training. Batches that a resumed run passes over are not prepared."""
        self.dataloader.plan(skip=self._iter, limit=max(self._max_iters - self._iter, 0))
        return super().run()


@LOOPS.register_module()
class PrefetchValLoop(_LookAheadLoop, ValLoop):
    """Validation that prepares batches ahead of the model.

    Args:
        runner (Runner): A reference of runner.
        dataloader (DataLoader or dict): A dataloader object or a dict to build one.
        evaluator (Evaluator or dict or list): Used for computing metrics.
        fp16 (bool): Whether to enable fp16 validation. Defaults to False.
        prefetch_depth (int): Batches in flight ahead of the one being predicted; 0 turns
            look-ahead off. Defaults to 2.
        loader_thread (bool): Load in a thread of its own where there are worker processes.
            Defaults to True.

    Raises:
        TypeError: ``prefetch_depth`` is not a whole number.
        ValueError: ``prefetch_depth`` is negative, or the dataloader has no batches.
    """

    _split = 'val'

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict,
        evaluator: Evaluator | dict | list,
        fp16: bool = False,
        prefetch_depth: int = 2,
        loader_thread: bool = True,
    ) -> None:
        loader = _looking_ahead(self, runner, dataloader, prefetch_depth, loader_thread)
        super().__init__(runner, loader, evaluator, fp16)


@LOOPS.register_module()
class PrefetchTestLoop(_LookAheadLoop, TestLoop):
    """Testing that prepares batches ahead of the model.

    Args:
        runner (Runner): A reference of runner.
        dataloader (DataLoader or dict): A dataloader object or a dict to build one.
        evaluator (Evaluator or dict or list): Used for computing metrics.
        fp16 (bool): Whether to enable fp16 testing. Defaults to False.
        prefetch_depth (int): Batches in flight ahead of the one being predicted; 0 turns
            look-ahead off. Defaults to 2.
        loader_thread (bool): Load in a thread of its own where there are worker processes.
            Defaults to True.

    Raises:
        TypeError: ``prefetch_depth`` is not a whole number.
        ValueError: ``prefetch_depth`` is negative, or the dataloader has no batches.
    """

    _split = 'test'

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict,
        evaluator: Evaluator | dict | list,
        fp16: bool = False,
        prefetch_depth: int = 2,
        loader_thread: bool = True,
    ) -> None:
        loader = _looking_ahead(self, runner, dataloader, prefetch_depth, loader_thread)
        super().__init__(runner, loader, evaluator, fp16)


@LOOPS.register_module()
def PrefetchLoop(
    runner: Any, dataloader: DataLoader | dict, **kwargs: Any
) -> PrefetchEpochBasedTrainLoop | PrefetchIterBasedTrainLoop:
    """Build the training loop that the config asks for: by epochs or by iterations.

    Args:
        runner (Runner): A reference of runner.
        dataloader (DataLoader or dict): A dataloader object or a dict to build one.
        **kwargs: Arguments of :class:`PrefetchEpochBasedTrainLoop` (with ``max_epochs``) or of
            :class:`PrefetchIterBasedTrainLoop` (with ``max_iters``).

    Returns:
        PrefetchEpochBasedTrainLoop | PrefetchIterBasedTrainLoop: The loop.

    Raises:
        ValueError: Both or neither of ``max_epochs`` and ``max_iters`` are given.
        TypeError: An argument that the loop does not have.
    """
    given = [name for name in ('max_epochs', 'max_iters') if kwargs.get(name) is not None]
    if len(given) != 1:
        found = ', '.join(f'{name}={kwargs[name]}' for name in given) or 'neither'
        raise ValueError(
            'train_cfg of a PrefetchLoop takes either `max_epochs` (training by epochs) or '
            f'`max_iters` (training by iterations), got {found}. Write one of them and leave the '
            'other out.'
        )
    by_epoch = given == ['max_epochs']
    kwargs.pop('max_iters' if by_epoch else 'max_epochs', None)
    cls = PrefetchEpochBasedTrainLoop if by_epoch else PrefetchIterBasedTrainLoop
    return cls(runner=runner, dataloader=dataloader, **kwargs)


def _refuse_unknown(cls: type[_LookAheadLoop], kwargs: dict) -> None:
    parameters = inspect.signature(cls.__init__).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    valid = [name for name in parameters if name not in ('self', 'runner', 'dataloader')]
    for name in kwargs:
        if name not in parameters:
            raise TypeError(
                f'{cls._split}_cfg.{name} is not an argument of {cls.__name__}'
                f'{nearest(name, valid)}. Its arguments are: {", ".join(valid)}.'
            )
