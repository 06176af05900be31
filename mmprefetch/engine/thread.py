# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The loader thread: load, transfer, begin, hand over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from .ticket import Ticket


class Begins(Protocol):
    """What the thread asks to begin work, see :class:`.preparation.Preparation`."""

    def enter_thread(self) -> None:
        """Called once, in the new thread."""

    def begin(self, ticket: Ticket) -> None:
        """Transfer a batch and begin its preprocessing. What it raises is kept on the ticket."""


class LoaderThread:
    """Takes batches through load, transfer and begin, at most ``depth`` ahead of :meth:`take`.

    Leads back to neither the pass nor its dataloader, so that it keeps neither alive.

    Ctrl-C can break off whatever the main thread does here, also while it ends the thread. So the
    two talk through queues only: locks of Python's own making would stay locked, and a join that
    is broken off takes the thread for ended.

    Args:
        load (Callable): Loads the next batch.
        iterator (Iterator): The dataloader's iterator behind it.
        preparation (Begins): Begins work on a batch.
        depth (int): Batches that may be in flight.
        timeout (float): The dataloader's own, seconds to wait for a batch; 0: for ever.
    """

    def __init__(
        self,
        load: Callable[[], Ticket],
        iterator: Iterator,
        preparation: Begins,
        depth: int,
        timeout: float,
    ) -> None:
        self._load = load
        self._iterator = iterator
        self._preparation = preparation
        self._timeout: float = 0
        if timeout and hasattr(iterator, '_timeout'):  # torch's own
            # The thread begins to wait before the batch is asked for: the time counts in `take`.
            self._timeout, iterator._timeout = timeout, 0
        self._permits: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for _ in range(depth):
            self._permits.put(None)
        self._ready: queue.SimpleQueue[Ticket] = queue.SimpleQueue()
        self._stopped = self._woken = False
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name='mmprefetch-loader', daemon=True)

    def start(self) -> None:
        """Start the thread, which whoever calls this can already :meth:`stop`."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._preparation.enter_thread()
            while True:
                self._permits.get()
                if self._stopped:
                    break
                ticket = self._load()
                if self._woken:
                    break
                if ticket.error is None and not self._stopped:
                    self._preparation.begin(ticket)
                failed = ticket.error is not None
                self._ready.put(ticket)
                del ticket
                if failed:
                    break
        except BaseException as error:  # raised again where the batch is due
            self._ready.put(Ticket(None, '', error=error))
        finally:
            if self._timeout:
                self._iterator._timeout = self._timeout
            self._over.put(None)

    def take(self, spent: Any = None) -> Ticket:
        """Wait for the next batch.

        Args:
            spent (Any): What is to be freed by the thread, since that takes time as well.

        Returns:
            Ticket: Of a batch, or of the error that came in its place (StopIteration at the end);
            the thread ends with an error.

        Raises:
            RuntimeError: It was waited for longer than the dataloader's ``timeout``. A further
                call goes on waiting.
        """
        try:
            ticket = self._ready.get(timeout=self._timeout or None)
        except queue.Empty:
            raise RuntimeError(f'DataLoader timed out after {self._timeout} seconds') from None
        self._permits.put(spent)
        return ticket

    def stop(self, within: float) -> bool:
        """Tell the thread to end after the batch that it is loading.

        Args:
            within (float): Seconds to wait for that.

        Returns:
            bool: Whether it has ended. May be called again.
        """
        self._stopped = True
        self._permits.put(None)
        if self._thread.ident is None:
            return True  # it was never started
        if threading.current_thread() is self._thread:
            return False  # it has found a pass that nobody holds any more: its own
        try:
            self._over.get(timeout=within)
        except queue.Empty:
            return False
        self._over.put(None)  # for the next who asks
        self._thread.join(within)  # it has nothing left to do
        return True

    def wake(self) -> None:
        """Let the thread's waiting for a worker process end. The iterator is of no use then."""
        self._woken = True
        results = getattr(self._iterator, '_data_queue', None)
        if results is None:
            return
        if hasattr(results, 'cancel_join_thread'):  # a pipe that workers write to
            # One that was killed as it wrote keeps it locked for ever: the process would wait at
            # its exit for what is put there.
            results.cancel_join_thread()
        # No task has this number, so `next` fails at once in the thread, which has been told to
        # stop.
        results.put((-1, None))

    def left(self) -> list[Ticket]:
        """Take what lies ready.

        Returns:
            list[Ticket]: In order.
        """
        tickets = []
        while not self._ready.empty():
            tickets.append(self._ready.get())
        return tickets

    def release(self) -> None:
        """Let another thread that waits in :meth:`take` end."""
        self._ready.put(Ticket(None, '', error=StopIteration()))


def explain_worker_death(error: BaseException, iterator: Any) -> BaseException:
    """Name a dead worker process where its death is why a batch could not be read.

    Args:
        error (BaseException): What reading the batch raised.
        iterator (Any): The dataloader's iterator.

    Returns:
        BaseException: An error that says so, or the same.
    """
    if isinstance(error, (OSError, EOFError)):
        for worker in getattr(iterator, '_workers', ()):
            worker.join(timeout=0.1)  # its connection is lost before its end is known
            if worker.exitcode:
                named = RuntimeError(
                    f'A dataloader worker (pid {worker.pid}) ended with exit code '
                    f'{worker.exitcode}; a negative one is the signal that killed it, and -9 '
                    'usually means that memory ran out. Use fewer `num_workers` or a smaller '
                    '`batch_size`.'
                )
                named.__cause__ = error
                return named
    return error
