# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The loops: mmengine's own, on a dataloader that looks ahead."""

from __future__ import annotations

import inspect
from typing import Any

from mmengine.logging import print_log
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, TestLoop, ValLoop
from mmengine.runner.base_loop import BaseLoop
from torch.utils.data import DataLoader

from .attach import attachment_of
from .config import check_depth
from .engine import LookAheadLoader
from .fields.classes import nearest
from .hooks import put_first


class _LookAheadLoop:
    """What the loops share: their own arguments, a dataloader that looks ahead, a clean end.

    Args:
        runner (Runner): A reference of runner.
        dataloader (DataLoader or dict): A dataloader object or a dict to build one.
        *args: Arguments of mmengine's loop.
        prefetch_depth (int): Batches in flight ahead of the one in use; 0 turns look-ahead off.
            Defaults to 2.
        loader_thread (bool, optional): Whether to load in a thread of its own, which look-ahead
            needs. None: where there are worker processes. False: never, for a sampler that draws
            from a global random generator at every index. True: always; without workers the
            dataset's code then runs in that thread. Defaults to None.
        **kwargs: Arguments of mmengine's loop.

    Raises:
        TypeError: ``prefetch_depth`` is not a whole number, ``loader_thread`` is not a bool, or an
            argument is not one of the loop's.
        ValueError: ``prefetch_depth`` is negative, or the dataloader has no batches.
    """

    _split: str

    def __init__(
        self,
        runner: Any,
        dataloader: DataLoader | dict,
        *args: Any,
        prefetch_depth: int = 2,
        loader_thread: bool | None = None,
        **kwargs: Any,
    ) -> None:
        self._refuse_unknown(kwargs)
        check_depth(f'{self._split}_cfg.prefetch_depth', prefetch_depth)
        if loader_thread is not None and not isinstance(loader_thread, bool):
            raise TypeError(
                f'{self._split}_cfg.loader_thread must be True, False or None, got '
                f'{loader_thread!r}.'
            )
        attachment = attachment_of(runner)
        BaseLoop.__init__(self, runner, attachment.take_fields(self._split, dataloader))
        self._refuse_empty()
        put_first(runner)
        preprocessor, mixed = None, attachment.may_be_mixed(self._split)
        if attachment.model_is_built:
            preprocessor = attachment.bind()
            mixed = preprocessor is not None and preprocessor.is_mixed(self._split)
        loader = LookAheadLoader(
            self.dataloader, preprocessor, self._split, prefetch_depth, loader_thread, mixed
        )
        if prefetch_depth and loader_thread is None and not loader.looks_ahead:
            print_log(
                f'{self._split}_dataloader has no worker processes, so there is no look-ahead: '
                f'write `num_workers=1` or more, or `{self._split}_cfg.loader_thread=True` for a '
                'dataset whose code may run in a thread beside the training.',
                logger='current',
            )
        super().__init__(runner, loader, *args, **kwargs)

    def run(self) -> Any:
        """Run the loop of mmengine; end the look-ahead for whatever reason it ends."""
        put_first(self.runner)
        # Some runners build their model after their loops, or wrap it anew.
        self.dataloader.connect(attachment_of(self.runner).bind())
        try:
            return super().run()
        finally:
            self._end()

    def _end(self) -> None:
        self.dataloader.close()

    def _refuse_unknown(self, kwargs: dict) -> None:
        stock = next(base for base in type(self).__mro__ if base in _STOCK)
        known = list(inspect.signature(stock.__init__).parameters)[3:]
        known += ['prefetch_depth', 'loader_thread']
        for name in kwargs:
            if name not in known and type(self).__init__ is _LookAheadLoop.__init__:
                raise TypeError(
                    f'{self._split}_cfg.{name} is not an argument of {type(self).__name__}'
                    f'{nearest(name, known)}. Its arguments are: {", ".join(known)}.'
                )

    def _refuse_empty(self) -> None:
        dataloader, split = self.dataloader, self._split
        try:
            batches = len(dataloader)
        except TypeError:
            return  # an iterable dataset has no length
        if batches == 0:
            raise ValueError(
                f'{split}_dataloader has no batches: its dataset has {len(dataloader.dataset)} '
                f'samples, batch_size={dataloader.batch_size}, drop_last={dataloader.drop_last}. '
                f'Check the paths in `{split}_dataloader.dataset`, or write a smaller '
                '`batch_size`.'
            )


_STOCK = (EpochBasedTrainLoop, IterBasedTrainLoop, ValLoop, TestLoop)


@LOOPS.register_module()
class PrefetchEpochBasedTrainLoop(_LookAheadLoop, EpochBasedTrainLoop):
    """Epoch-based training that prepares batches ahead of the step.

    Takes the arguments of :class:`mmengine.runner.EpochBasedTrainLoop` (``max_epochs``,
    ``val_begin``, ``val_interval``, ``dynamic_intervals``), ``prefetch_depth`` and
    ``loader_thread``.
    """

    _split = 'train'


@LOOPS.register_module()
class PrefetchIterBasedTrainLoop(_LookAheadLoop, IterBasedTrainLoop):
    """Iteration-based training that prepares batches ahead of the step.

    Takes the arguments of :class:`mmengine.runner.IterBasedTrainLoop` (``max_iters``,
    ``val_begin``, ``val_interval``, ``dynamic_intervals``), ``prefetch_depth`` and
    ``loader_thread``.
    """

    _split = 'train'

    def _end(self) -> None:
        # It may be run on, as mmengine's own, whose iterator outlives a run.
        self.dataloader.pause()


@LOOPS.register_module()
class PrefetchValLoop(_LookAheadLoop, ValLoop):
    """Validation that prepares batches ahead of the model.

    Takes the arguments of :class:`mmengine.runner.ValLoop` (``evaluator``, ``fp16``),
    ``prefetch_depth`` and ``loader_thread``.
    """

    _split = 'val'


@LOOPS.register_module()
class PrefetchTestLoop(_LookAheadLoop, TestLoop):
    """Testing that prepares batches ahead of the model.

    Takes the arguments of :class:`mmengine.runner.TestLoop` (``evaluator``, ``fp16``),
    ``prefetch_depth`` and ``loader_thread``.
    """

    _split = 'test'


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
