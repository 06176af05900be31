# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Look-ahead over a dataloader: one thread prepares batches while the main thread trains.

:class:`LookAheadLoader` stands in for a dataloader; each ``iter`` of it by the loop is one
:class:`Pass`. What is yielded is the raw batch itself, in the dataloader's order.
"""

from __future__ import annotations

import atexit
import functools
import logging
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from mmengine.logging import print_log

from .mixed import TaggedLoader
from .thread import Begins, LoaderThread, explain_worker_death
from .ticket import Ticket

UNCLAIMED_LIMIT = 3
"""Batches in a row that the model did not ask for as they came, before look-ahead ends."""


class Preprocessor(Protocol):
    """What the look-ahead asks of a preprocessor."""

    def preparation(self, split: str) -> Begins:
        """Make what begins work in the loader thread."""

    def samples_of(self, split: str, parts: list[int]) -> Any:
        """Of a mixed dataset, look up what the samples of a batch are normalised with."""

    def expect(self, ticket: Ticket) -> None:
        """Note that a batch is handed out, so that the model may ask for it."""

    def withdraw(self, ticket: Ticket) -> None:
        """Forget a ticket: the model is done with its batch."""


class LookAheadLoader:
    """A dataloader whose loop looks ahead. All else is the dataloader's own.

    Attributes are read from, and written to, the dataloader, and ``isinstance`` sees its class:
    hooks that change the sampler or restart the workers reach the real one.

    Args:
        dataloader (Iterable): Usually a :class:`torch.utils.data.DataLoader`.
        preprocessor (Preprocessor | None): Begins work on batches. None: nothing to begin.
        split (str): 'train', 'val' or 'test', whose effective preprocessor is used.
        depth (int): Batches in flight ahead of the one handed out; 0 turns look-ahead off.
        loader_thread (bool | None): Whether to load in a thread. None: where the dataloader has
            worker processes.
        mixed (bool): Whether its datasets differ in what their samples are normalised with.
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
        self._depth = depth if loader_thread and preprocessor is not None else 0
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

    @property
    def looks_ahead(self) -> bool:
        """bool: Whether batches are prepared ahead."""
        return self._depth > 0

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


class Pass:
    """One pass over a dataloader.

    The first batch is handed out as it comes. When the model asks for it, a :class:`LoaderThread`
    is started that takes those behind it through load, transfer and begin. So batches that nobody
    wants preprocessed, such as those that a resumed run passes over, are only loaded.

    Args:
        loader (LookAheadLoader): Holds the settings, which outlive the pass.
        iterator (Iterator): The dataloader's own iterator.
        depth (int): Batches in flight ahead; 0: no thread is started.
    """

    def __init__(self, loader: LookAheadLoader, iterator: Iterator, depth: int) -> None:
        self._loader = loader
        self._iterator = iterator
        self._depth = depth
        self._preprocessor = loader._preprocessor
        self._load = functools.partial(
            _load, iterator, loader._split, loader._preprocessor, loader._tagged is not None
        )
        self._thread: LoaderThread | None = None
        self._left: deque[Ticket] = deque()
        self._due: Ticket | None = None
        self.ended = False
        self._exhausted = False
        # A thread that runs on while the interpreter is taken down is ended by force, which aborts
        # the process where torch's C++ code is on its stack. Registered once the dataloader's
        # iterator is made, so that this comes before torch ends the workers.
        self._at_exit = functools.partial(_close_at_exit, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)

    def uses(self, iterator: Iterator) -> bool:
        """bool: Whether batches of this iterator of the dataloader are still to come here."""
        return self._iterator is iterator and not self.ended

    def __iter__(self) -> Pass:
        return self

    def __next__(self) -> Any:
        spent = self._withdraw()
        if self.ended:
            raise StopIteration
        if self._left:
            ticket = self._left.popleft()
        elif self._thread is not None:
            ticket = self._thread.take(spent)
        else:
            ticket = self._load()
        if ticket.error is not None:
            # Whoever catches it may go on, as with any dataloader.
            self._thread = None
            self.ended = self._exhausted = isinstance(ticket.error, StopIteration)
            raise explain_worker_death(ticket.error, self._iterator)
        # Weak, since the preprocessor holds the ticket: a pass ends when nobody iterates over it.
        ticket.on_claim = functools.partial(_start, weakref.ref(self))
        self._preprocessor.expect(ticket)
        self._due = ticket
        return ticket.batch

    def start(self) -> None:
        """Start to look ahead: the model asks for the batches of this pass."""
        if self._thread is None and self._depth and not self._left and not self.ended:
            self._thread = LoaderThread(
                self._load,
                self._iterator,
                self._preprocessor.preparation(self._loader._split),
                self._depth,
                getattr(self._loader._dataloader, 'timeout', 0),
            )
            self._thread.start()

    def _withdraw(self) -> Any:
        """Forget the batch handed out last; see whether the model has asked for it. Returns what
        is left of it to be freed."""
        ticket, self._due = self._due, None
        if ticket is None:
            return None
        self._preprocessor.withdraw(ticket)
        if self._depth and not self._loader.note_claim(ticket.claimed) and self._thread is not None:
            self._depth = 0
            self._loader.switch_off()
            while not self._thread.stop(within=5.0):
                pass  # the batch that is being loaded is the next one
            self._keep()
        return ticket.spent

    def pause(self) -> None:
        """End the thread, and keep what it has loaded for whoever goes on."""
        self._withdraw()
        if self._thread is None:
            return
        if self._thread.stop(within=5.0):
            self._keep()
        else:
            # An endless sampler has one generator for all its life, which ends with the first
            # iterator that is dropped; the loop may be run again.
            self._loader._abandoned.append(getattr(self._iterator, '_sampler_iter', None))
            self.close()

    def _keep(self) -> None:
        """Keep what a thread that has ended had loaded."""
        self._left += self._thread.left()
        for ticket in self._left:
            ticket.work = None  # it holds memory of the device
        self._thread = None

    def close(self) -> None:
        """End the pass. Asking for a further batch then raises StopIteration.

        Ctrl-C may break it off: it can then be called again, and is at the exit of the process.
        """
        self.ended = True
        self._withdraw()
        thread = self._thread
        if thread is not None:
            if not thread.stop(within=0.2):
                thread.wake()
                # Where that cannot be read, it fails at torch's next look for dead workers (5 s).
                thread.stop(within=6.0)
            thread.left()
            thread.release()
            self._thread = None
        self._left.clear()
        if not self._exhausted:
            _shut_workers(self._loader._dataloader, self._iterator)
        self._iterator = iter(())
        atexit.unregister(self._at_exit)

    def __del__(self) -> None:
        self.close()


def _start(current: Callable[[], Pass | None]) -> None:
    left = current()
    if left is not None:
        left.start()


def _load(iterator: Iterator, split: str, preprocessor: Preprocessor, tagged: bool) -> Ticket:
    """Load the next batch.

    Returns:
        Ticket: Of the batch, or of the error that came in its place.
    """
    try:
        batch = next(iterator)
    except BaseException as error:
        return Ticket(None, split, error=error)
    if not tagged:
        return Ticket(batch, split)
    return Ticket(batch.batch, split, preprocessor.samples_of(split, batch.parts))


def _shut_workers(dataloader: Any, iterator: Any) -> None:
    """End the worker processes of a pass that is left before its end."""
    shutdown = getattr(iterator, '_shutdown_workers', None)
    if shutdown is None:
        return
    shutdown()
    if getattr(dataloader, '_iterator', None) is iterator:
        dataloader._iterator = None  # persistent workers: the next pass starts new ones


def _close_at_exit(current: Callable[[], Pass | None], process: int) -> None:
    left = current()
    # The workers of a pass belong to the process that began it, not to its forks.
    if left is not None and os.getpid() == process:
        left.close()
