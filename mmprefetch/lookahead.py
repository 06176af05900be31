# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Look-ahead: pull batches from a dataloader early, begin work on each, yield the batches.

:class:`LookAheadLoader` stands in for a dataloader; each ``iter`` of it is one
:class:`LookAhead`. What is yielded is the raw batch itself, in the dataloader's order.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from mmengine.logging import print_log

from .loading import (
    InlineSource,
    Loaded,
    LoaderThread,
    Preparation,
    shut_workers,
    told_by_workers,
)
from .mixed import PartRecorder, next_noted

UNREDEEMED_LIMIT = 3
"""Batches in a row whose begun work the model did not ask for, before look-ahead ends."""


class Preprocessor(Protocol):
    """What the look-ahead asks of a preprocessor."""

    def stage(self, batch: Any, split: str, depth: int, parts: list[int] | None) -> Any:
        """Make a batch ready for its transfer, on the thread that loaded it."""

    def remember(self, batch: Any, split: str, staged: Any) -> None:
        """Keep what was noted of a batch on which no work is begun."""

    def prefetch(self, batch: Any, training: bool, split: str, staged: Any) -> None:
        """Begin work on a batch. Must neither block nor raise what the batch is to blame for."""

    def discard(self, batch: Any) -> bool:
        """Drop the work begun on a batch, if it was not asked for; whether there was any."""

    def close(self) -> None:
        """Give threads back. It may be used again."""

    @property
    def compute_on_host(self) -> bool:
        """Whether the model's step runs on the calling thread."""


class LookAheadLoader:
    """A dataloader whose iterators look ahead. All else is the dataloader's own.

    Attributes are read from, and written to, the dataloader, and ``isinstance`` sees its class:
    hooks that change the sampler or restart the workers reach the real one.

    Args:
        dataloader (Iterable): Usually a :class:`torch.utils.data.DataLoader`.
        preprocessor (Preprocessor | None): Begins work on batches. None: nothing to begin.
        split (str): 'train', 'val' or 'test', whose effective preprocessor is used.
        depth (int): Batches in flight ahead of the one handed out; 0 turns look-ahead off.
        loader_thread (bool): Load in a thread of its own where the dataloader has worker
            processes. Turn it off for a sampler that draws from a global random generator at
            every index.
        recorder (PartRecorder, optional): Of a mixed dataset, tells the parts of each batch.
    """

    _OWN = frozenset({'_dataloader', '_preprocessor', '_split', '_depth', '_threaded', '_recorder',
                      '_plan', '_leading', '_current', '_passes', '_drawn_from'})  # fmt: skip

    def __init__(
        self,
        dataloader: Iterable,
        preprocessor: Preprocessor | None,
        split: str,
        depth: int,
        loader_thread: bool = True,
        recorder: PartRecorder | None = None,
    ) -> None:
        self._dataloader = dataloader
        self._preprocessor = preprocessor
        self._split = split
        self._depth = depth if preprocessor is not None else 0
        self._threaded = loader_thread and getattr(dataloader, 'num_workers', 0) > 0
        self._recorder = recorder
        self._plan = Plan()
        self._leading: Callable[[], LookAhead | None] = _no_pass
        # Whoever iterates keeps the pass alive; when it is dropped, it ends by itself.
        self._current: Callable[[], LookAhead | None] = _no_pass
        self._passes: weakref.WeakSet[LookAhead] = weakref.WeakSet()
        self._drawn_from: list[Iterator] = []

    @property
    def __class__(self) -> type:
        return self._dataloader.__class__

    def __getattr__(self, name: str) -> Any:
        if name in LookAheadLoader._OWN:  # not set yet, as while unpickling
            raise AttributeError(name)
        return getattr(self._dataloader, name)

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
        if workers is not None and any(current.uses(workers) for current in self._passes):
            self._dataloader._iterator = None
        # Made here and now, as a plain loop would: it draws from the global random generator
        # and may start worker processes.
        if self._recorder is not None:
            iterator, parts = self._recorder.iterate(self._dataloader)
        else:
            iterator, parts = iter(self._dataloader), None
        if self._depth == 0 and parts is None:
            return iterator
        # One that is made while the loop's own pass goes on is somebody else's, such as a hook's.
        leading = self._leading()
        leads = leading is None or leading.ended
        current = LookAhead(self, iterator, self._plan if leads else Plan(), leads, parts)
        self._passes.add(current)
        self._current = weakref.ref(current)
        if leads:
            self._leading = self._current
        return current

    def plan(self, skip: int = 0, limit: int | None = None) -> None:
        """Say how many batches the loop is going to ask for, in this pass and those that follow it.

        Args:
            skip (int): Batches, from the next one on, that the loop passes over: they are handed
                out without any work begun on them.
            limit (int, optional): Batches wanted after those. None: until the dataloader ends.
        """
        self._plan.skip, self._plan.left = skip, limit

    def fill(self) -> None:
        """Begin work on batches that are loaded, up to the depth. Never waits for a worker."""
        current = self._current()
        if current is not None:
            current.fill()

    def close(self) -> None:
        """End the look-ahead: its threads, its workers, and work that nobody asked for."""
        for current in list(self._passes):
            current.close()
        if self._preprocessor is not None:
            self._preprocessor.close()

    def __reduce__(self) -> tuple:
        return (_plain, (self._dataloader,))


def _no_pass() -> None:
    return None


def _plain(dataloader: Iterable) -> Iterable:
    return dataloader


@dataclass
class Plan:
    """What a loop is going to ask for.

    Args:
        skip (int): Batches that are passed over first.
        left (int | None): Batches wanted after those. None: until the dataloader ends.
    """

    skip: int = 0
    left: int | None = None


class LookAhead:
    """One pass over a dataloader that looks ahead.

    Args:
        loader (LookAheadLoader): Holds the settings, which outlive the pass.
        iterator (Iterator): The dataloader's own iterator.
        plan (Plan): What is going to be asked for; one object for all passes of a loop.
        leads (bool): Whether it is the loop's own pass, which speaks for those that follow.
        parts (deque, optional): Of a mixed dataset, the parts of each batch's samples.
    """

    def __init__(
        self,
        loader: LookAheadLoader,
        iterator: Iterator,
        plan: Plan,
        leads: bool,
        parts: deque[list[int]] | None = None,
    ) -> None:
        self._loader = loader
        self._plan = plan
        self._leads = leads
        self._depth = loader._depth
        self._preprocessor = loader._preprocessor
        self._iterator = iterator
        self._parts = parts
        self._source: InlineSource | LoaderThread | None = None
        self._preparation: Preparation | None = None
        self._begun: deque[Loaded] = deque()
        self._handed: Any = None
        self._ended = False
        self._exhausted = False
        self._unredeemed = 0
        # A thread that runs on while the interpreter is taken down is ended by force, which aborts
        # the process where torch's C++ code is on its stack. Registered once the dataloader's
        # iterator is made, so that this comes before torch ends the workers.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    @property
    def ended(self) -> bool:
        """bool: Whether all batches were handed out, or the pass was closed."""
        return self._ended and not self._begun

    def uses(self, iterator: Iterator) -> bool:
        """bool: Whether batches of this iterator of the dataloader are still to come here."""
        return self._iterator is iterator and not self._exhausted

    def __iter__(self) -> LookAhead:
        return self

    def __next__(self) -> Any:
        loader = self._loader
        if self._plan.skip > 0:
            skipped = next_noted(self._iterator, self._parts)
            self._plan.skip -= 1
            if self._parts is not None:
                self._parts.popleft()
            return skipped
        self._retire()
        if not self._begun and self._plan.left == 0 and not self._ended:
            # More is asked for than was planned, as when a hook lets the training go on.
            self._plan.left = None
            self._source = None
        if not self._begun:
            self._begin(wait=True)
        if not self._begun:
            raise StopIteration
        loader._current = weakref.ref(self)
        due = self._begun.popleft()
        if due.error is not None:
            # Whoever catches it may go on, as with any dataloader.
            self._source, self._ended = None, False
            raise told_by_workers(due.error, self._iterator)
        self._handed = due.batch
        if self._preprocessor.compute_on_host:
            # The step is over when it returns, so work that shall run beside it begins now.
            self.fill()
        return due.batch

    def fill(self) -> None:
        """Begin work on batches that are loaded, up to the depth."""
        if self._plan.skip > 0:
            return  # the next batches are passed over
        if self._preparation is not None and self._preparation.early:
            return  # the loader thread does, whose own bound is the depth
        while len(self._begun) < self._depth and self._begin(wait=False):
            pass

    def _begin(self, wait: bool) -> bool:
        """Begin work on the next batch; whether there was one."""
        if self._ended or self._plan.left == 0:
            return False
        loaded = (self._source or self._open()).take(wait)
        if loaded is None:
            return False
        if isinstance(loaded.error, StopIteration):
            self._ended = self._exhausted = True
            return False
        if self._plan.left is not None:
            self._plan.left -= 1
        if loaded.error is not None:
            self._ended = True
        self._preparation.begin(loaded)
        if not self._preparation.active:
            self._preparation.drop(loaded)
        self._begun.append(loaded)
        return True

    def _open(self) -> InlineSource | LoaderThread:
        loader = self._loader
        self._preparation = Preparation(
            self._preprocessor,
            loader._split,
            self._depth,
            # Without workers the dataset may hand out views of memory that its next item
            # overwrites.
            own=getattr(loader._dataloader, 'num_workers', 0) == 0,
            # Where the step runs on this thread it is not here to begin work while that runs.
            early=loader._threaded and self._preprocessor.compute_on_host,
            parts=self._parts,
        )
        source: InlineSource | LoaderThread
        if loader._threaded:
            source = LoaderThread(
                self._iterator,
                self._preparation,
                max(self._depth, 1),
                self._plan.left,
                getattr(loader._dataloader, 'timeout', 0),
            )
        else:
            source = InlineSource(self._iterator, self._preparation)
        self._source = source
        source.start()
        return source

    def _retire(self) -> None:
        """See whether the work begun on the batch handed out last was asked for."""
        handed, self._handed = self._handed, None
        if handed is None:
            return
        unredeemed = self._preprocessor.discard(handed)
        if not self._depth:
            return  # nothing was begun, but its samples may have been remembered
        if not unredeemed:
            self._unredeemed = 0
            return
        self._unredeemed += 1
        if self._unredeemed == UNREDEEMED_LIMIT:
            self._depth = 0
            if self._leads:
                self._loader._depth = 0
            self._preparation.active = False
            for loaded in self._begun:
                self._preparation.drop(loaded)
            print_log(
                f'The model did not preprocess the last {UNREDEEMED_LIMIT} batches of '
                f'{self._loader._split}_dataloader as they came from it, so work done on them '
                f'ahead was lost: look-ahead is now off for {self._loader._split}. If the model '
                f'splits its batches first, as for test-time augmentation, set '
                f'`{self._loader._split}_cfg.prefetch_depth=0`.',
                logger='current',
                level=logging.WARNING,
            )

    def close(self) -> None:
        """End the pass. Asking for a further batch then raises StopIteration.

        Ctrl-C may break it off: it can then be called again, and is at the exit of the process.
        """
        self._ended = True
        exhausted = self._exhausted
        handed, self._handed = self._handed, None
        if handed is not None:
            self._preprocessor.discard(handed)
        if self._source is not None:
            self._begun.extend(self._source.close())
            for loaded in self._begun:
                self._preparation.drop(loaded)
            self._source = None
        self._begun.clear()
        if not exhausted:
            shut_workers(self._loader._dataloader, self._iterator)
            drawn_from = getattr(self._iterator, '_sampler_iter', None)
            if self._leads and self._plan.left is not None and drawn_from is not None:
                # An endless sampler has one generator for all its life, which ends with the
                # first pass that is dropped; the loop may be run again.
                self._loader._drawn_from.append(drawn_from)
        self._iterator = iter(())
        atexit.unregister(self._at_exit)

    def __del__(self) -> None:
        self.close()


def _close_at_exit(current: Callable[[], LookAhead | None], process: int) -> None:
    left = current()
    # The workers of a pass belong to the process that began it, not to its forks.
    if left is not None and os.getpid() == process:
        left.close()
