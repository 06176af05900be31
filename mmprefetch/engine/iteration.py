# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""One pass over a dataloader, with a thread that prepares the batches to come."""

from __future__ import annotations

import atexit
import functools
import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .thread import Begins, LoaderThread, explain_worker_death
from .ticket import Ticket


class Preprocessor(Protocol):
    """What the look-ahead asks of a preprocessor."""

    def preparation(self, split: str) -> Begins:
        """Make what begins work in the loader thread."""

    def expect(self, ticket: Ticket) -> None:
        """Note that a batch is handed out, so that the model may ask for it."""

    def withdraw(self, ticket: Ticket) -> None:
        """Forget a ticket: the model is done with its batch."""


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

    def __init__(self, loader: Any, iterator: Iterator, depth: int) -> None:
        self._loader = loader
        self._iterator = iterator
        self._depth = depth
        self._load = functools.partial(
            _load,
            iterator,
            loader._split,
            loader._tagged is not None,
            getattr(loader._dataloader, 'state_dict', None),
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

    @property
    def position(self) -> Any:
        """Any: What the dataloader's ``state_dict`` was when the batch in use had been loaded."""
        return None if self._due is None else self._due.position

    def __getattr__(self, name: str) -> Any:
        if name.startswith('__') or '_iterator' not in vars(self):
            raise AttributeError(name)
        return getattr(self._iterator, name)  # some loops skip samples through it

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
        if self._preprocessor is not None:
            # Weak, since the preprocessor holds the ticket: a pass ends when nobody iterates over
            # it any more.
            ticket.on_claim = functools.partial(_start, weakref.ref(self))
            self._preprocessor.expect(ticket)
        self._due = ticket
        return ticket.batch

    @property
    def _preprocessor(self) -> Preprocessor | None:
        return self._loader._preprocessor

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
        if ticket is None or ticket.on_claim is None:
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


def _load(
    iterator: Iterator, split: str, tagged: bool, position: Callable[[], Any] | None
) -> Ticket:
    """Load the next batch.

    Args:
        iterator (Iterator): The dataloader's own.
        split (str): 'train', 'val' or 'test'.
        tagged (bool): Whether the parts of a mixed dataset come with each batch.
        position (Callable | None): Tells the position of a dataloader that has one.

    Returns:
        Ticket: Of the batch, or of the error that came in its place.
    """
    try:
        batch = next(iterator)
    except BaseException as error:
        return Ticket(None, split, error=error)
    ticket = Ticket(batch.batch, split, batch.parts) if tagged else Ticket(batch, split)
    if position is not None:
        ticket.position = position()
    return ticket


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
