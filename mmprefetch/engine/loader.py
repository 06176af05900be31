# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Stands in for a dataloader: each ``iter`` of it by the loop is a pass that looks ahead.

What is yielded is the raw batch itself, in the dataloader's order.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from mmengine.logging import print_log

from .iteration import Pass, Preprocessor
from .mixed import TaggedLoader

UNCLAIMED_LIMIT = 3
"""Batches in a row that the model did not ask for as they came, before look-ahead ends."""


class LookAheadLoader:
    """A dataloader whose loop looks ahead. All else is the dataloader's own.

    Attributes are read from, and written to, the dataloader, and ``isinstance`` sees its class:
    hooks that change the sampler or restart the workers reach the real one.

    Args:
        dataloader (Iterable): Usually a :class:`torch.utils.data.DataLoader`.
        preprocessor (Preprocessor | None): Begins work on batches. None: it is given by
            :meth:`connect`; without any, batches are handed out as they come.
        split (str): 'train', 'val' or 'test', whose effective preprocessor is used.
        depth (int): Batches in flight ahead of the one handed out; 0 turns look-ahead off.
        loader_thread (bool | None): Whether to load in a thread. None: where the dataloader has
            worker processes.
        mixed (bool): Whether its datasets may differ in what their samples are normalised with.
    """

    _OWN = frozenset({'_dataloader', '_preprocessor', '_split', '_depth', '_tagged', '_leading',
                      '_passes', '_claimed', '_unclaimed', '_abandoned'})  # fmt: skip

    def __init__(
        self,
        dataloader: Iterable,
        preprocessor: Preprocessor | None,
        split: str,
        depth: int,
        loader_thread: bool | None = None,
        mixed: bool = False,
    ) -> None:
        self._dataloader = dataloader
        self._preprocessor = preprocessor
        self._split = split
        if loader_thread is None:
            loader_thread = getattr(dataloader, 'num_workers', 0) > 0
        self._depth = depth if loader_thread else 0
        self._tagged = TaggedLoader(dataloader, split) if mixed else None
        # Whoever iterates keeps the pass alive; when it is dropped, it ends by itself.
        self._leading: Callable[[], Pass | None] = _no_pass
        self._passes: weakref.WeakSet[Pass] = weakref.WeakSet()
        self._claimed = False
        self._unclaimed = 0
        self._abandoned: list[Iterator] = []

    @property
    def __class__(self) -> type:
        return self._dataloader.__class__

    def __getattr__(self, name: str) -> Any:
        if name in LookAheadLoader._OWN:  # not set yet, as while unpickling
            raise AttributeError(name)
        value = getattr(self._dataloader, name)
        return self._position if name == 'state_dict' else value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in LookAheadLoader._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._dataloader, name, value)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator:
        # Persistent workers serve one pass at a time: while one is open they are its own.
        workers = getattr(self._dataloader, '_iterator', None)
        if workers is not None and any(each.uses(workers) for each in self._passes):
            self._dataloader._iterator = None
        # Made here and now, as a plain loop would: it draws from the global random generator
        # and may start worker processes.
        iterator = iter(self._dataloader if self._tagged is None else self._tagged)
        # One that is made while the loop's own pass goes on is somebody else's, such as a hook's.
        leading = self._leading()
        leads = leading is None or leading.ended
        depth = self._depth if leads else 0
        if depth == 0 and self._tagged is None:
            return iterator
        made = Pass(self, iterator, depth)
        self._passes.add(made)
        if leads:
            self._leading = weakref.ref(made)
        return made

    def connect(self, preprocessor: Preprocessor | None) -> None:
        """Give the preprocessor that begins work.

        Args:
            preprocessor (Preprocessor | None): None: the model has none, nothing can be begun.
        """
        self._preprocessor = preprocessor

    @property
    def looks_ahead(self) -> bool:
        """bool: Whether batches are prepared ahead, as far as the model asks for them."""
        return self._depth > 0

    def _position(self) -> Any:
        """The position of a dataloader that has one: that of the batch in use."""
        leading = self._leading()
        position = None if leading is None else leading.position
        return self._dataloader.state_dict() if position is None else position

    def pause(self) -> None:
        """End the threads of a loop that may be run again: batches that were loaded ahead are kept,
        and handed out first then."""
        for each in list(self._passes):
            each.pause()
        self._check_claims()

    def close(self) -> None:
        """End the look-ahead: its threads, its workers, and work that nobody asked for."""
        for each in list(self._passes):
            each.close()
        self._check_claims()

    def note_claim(self, claimed: bool) -> bool:
        """Note whether the model asked for a batch that was handed out.

        Args:
            claimed (bool): Whether it did.

        Returns:
            bool: Whether look-ahead goes on.
        """
        self._claimed = self._claimed or claimed
        self._unclaimed = 0 if claimed else self._unclaimed + 1
        return self._unclaimed < UNCLAIMED_LIMIT

    def switch_off(self) -> None:
        """Look ahead no more, and say why."""
        if self._depth:
            self._depth = 0
            print_log(
                f'The model does not preprocess the batches of {self._split}_dataloader as they '
                f'come from it, so nothing can be done ahead: look-ahead is now off for '
                f'{self._split}. If the model splits its batches first, as for test-time '
                f'augmentation, set `{self._split}_cfg.prefetch_depth=0`.',
                logger='current',
                level=logging.WARNING,
            )

    def _check_claims(self) -> None:
        if not self._claimed and self._unclaimed >= UNCLAIMED_LIMIT:
            self.switch_off()

    def __reduce__(self) -> tuple:
        return (_plain, (self._dataloader,))


def _no_pass() -> None:
    return None


def _plain(dataloader: Iterable) -> Iterable:
    return dataloader
