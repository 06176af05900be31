# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Load and stage batches: on the calling thread, or in a thread of its own."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .mixed import next_noted
from .ownership import own_memory


@dataclass
class Loaded:
    """A batch that was loaded, or the error that came in its place."""

    batch: Any = None
    staged: Any = None
    begun: bool = False
    error: BaseException | None = None


class Preparation:
    """What a batch goes through between the dataloader and the model.

    Leads back to neither the pass nor its dataloader, so that a loader thread that holds it keeps
    neither alive.

    Args:
        preprocessor (Preprocessor): Stages batches and begins work on them.
        split (str): 'train', 'val' or 'test'.
        depth (int): Batches that may be in flight at a time.
        own (bool): Give each batch memory of its own.
        early (bool): Begin work as soon as a batch is loaded, on the thread that loaded it.
        parts (deque, optional): Of a mixed dataset, the parts of each batch's samples.
    """

    def __init__(
        self,
        preprocessor: Any,
        split: str,
        depth: int,
        own: bool,
        early: bool,
        parts: deque[list[int]] | None = None,
    ) -> None:
        self._preprocessor = preprocessor
        self._split = split
        self._depth = depth
        self._own = own
        self.early = early
        self._parts = parts
        self.active = depth > 0

    def next_of(self, iterator: Iterator) -> Any:
        """Take the next batch of the dataloader's iterator.

        Args:
            iterator (Iterator): The iterator.

        Returns:
            Any: The batch.
        """
        return next_noted(iterator, self._parts)

    def load(self, batch: Any) -> Loaded:
        """Make a batch ready for its transfer.

        Args:
            batch (Any): A batch as it came from the dataloader.

        Returns:
            Loaded: What is going to be handed out.
        """
        if self._own:
            batch = own_memory(batch)
        parts = None if self._parts is None else self._parts.popleft()
        loaded = Loaded(batch, self._preprocessor.stage(batch, self._split, self._depth, parts))
        if self.early:
            self.begin(loaded)
        return loaded

    def begin(self, loaded: Loaded) -> None:
        """Begin work on a batch, unless that was done, or look-ahead has been switched off: of
        a mixed dataset's batch the preprocessor is then only told what its samples are.

        Args:
            loaded (Loaded): From :meth:`load`.
        """
        if loaded.begun or loaded.error is not None:
            return
        if not self.active and self._parts is not None:
            self._preprocessor.remember(loaded.batch, self._split, loaded.staged)
        elif self.active:
            self._preprocessor.prefetch(
                loaded.batch, self._split == 'train', self._split, loaded.staged
            )
            loaded.begun = True
            loaded.staged = None  # it holds what is delivered, which is the model's from now on

    def drop(self, loaded: Loaded) -> None:
        """Drop the work begun on a batch.

        Args:
            loaded (Loaded): From :meth:`load`.
        """
        if loaded.begun:
            self._preprocessor.discard(loaded.batch)


class InlineSource:
    """Loads and stages on the calling thread: without worker processes, dataset code runs here
    and may draw from the global random generators.

    Args:
        iterator (Iterator): The dataloader's iterator.
        preparation (Preparation): Makes batches ready.
    """

    def __init__(self, iterator: Iterator, preparation: Preparation) -> None:
        self._iterator = iterator
        self._preparation = preparation

    def start(self) -> None:
        """There is nothing that would run beside the calling thread."""

    def take(self, wait: bool) -> Loaded:
        """Load the next batch.

        Args:
            wait (bool): Makes no difference here.

        Returns:
            Loaded: A batch or an error; StopIteration at the end.
        """
        try:
            return self._preparation.load(self._preparation.next_of(self._iterator))
        except Exception as error:  # raised again where the batch is due
            return Loaded(error=error)

    def close(self) -> list[Loaded]:
        """list: Nothing runs beside the calling thread, nothing lies ready."""
        return []


class LoaderThread:
    """Loads and stages in a thread, at most ``depth`` batches ahead of :meth:`take`.

    Ctrl-C can break off whatever the main thread does here, also while it ends the thread. So the
    two talk through queues only: locks of Python's own making would stay locked, and a join that
    is broken off takes the thread for ended.

    Args:
        iterator (Iterator): The dataloader's iterator.
        preparation (Preparation): Makes batches ready.
        depth (int): Loaded batches that may lie ready.
        limit (int | None): Batches to load in all.
        timeout (float): The dataloader's own, seconds to wait for a batch; 0: for ever.
    """

    def __init__(
        self,
        iterator: Iterator,
        preparation: Preparation,
        depth: int,
        limit: int | None,
        timeout: float,
    ) -> None:
        self._iterator = iterator
        self._preparation = preparation
        self._limit = limit
        self._timeout: float = 0
        if timeout and hasattr(iterator, '_timeout'):  # torch's own
            # The thread begins to wait before the batch is asked for: the time counts in `take`.
            self._timeout, iterator._timeout = timeout, 0
        self._device_index = _current_device_index()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._ready: queue.SimpleQueue[Loaded] = queue.SimpleQueue()
        self._stopped = False
        self._over: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name='mmprefetch-loader', daemon=True)

    def start(self) -> None:
        """Start the thread, which whoever calls this can already :meth:`close`."""
        self._thread.start()

    def _run(self) -> None:
        try:
            self._load_all()
        except BaseException as error:  # raised again where the batch is due
            if not self._stopped:
                self._ready.put(Loaded(error=error))
        finally:
            self._over.put(None)

    def _load_all(self) -> None:
        if self._device_index is not None:
            # A new thread is on device 0, and pinning memory there would take up memory of it.
            torch.accelerator.set_device_index(self._device_index)
        loaded = 0
        while loaded != self._limit:
            self._room.get()
            if self._stopped:
                break
            batch = self._preparation.next_of(self._iterator)
            if self._stopped:
                break
            ready = self._preparation.load(batch)
            if self._stopped:
                self._preparation.drop(ready)
                break
            self._ready.put(ready)
            del batch, ready
            loaded += 1

    def take(self, wait: bool) -> Loaded | None:
        """Take the next batch.

        Args:
            wait (bool): Wait until it is loaded.

        Returns:
            Loaded | None: A batch or an error (StopIteration at the end); None when it is not
            loaded yet and ``wait`` is False.

        Raises:
            RuntimeError: It was waited for longer than the dataloader's ``timeout``. A further
                call goes on waiting.
        """
        try:
            loaded = self._ready.get(block=wait, timeout=self._timeout or None)
        except queue.Empty:
            if wait:
                raise RuntimeError(f'DataLoader timed out after {self._timeout} seconds') from None
            return None
        self._room.put(None)
        return loaded

    def close(self) -> list[Loaded]:
        """End the thread. It may be waiting for a worker process: wake it. May be called again.

        Returns:
            list: What lay ready.
        """
        self._stopped = True
        self._room.put(None)
        if not self._has_ended(within=0.2):
            self._wake()
            # Where that cannot be read, it fails at torch's next look for dead workers (5 s).
            self._has_ended(within=6.0)
        ready = []
        while not self._ready.empty():
            ready.append(self._ready.get())
        # For a thread that waits in `take`, if it is another one that closes.
        self._ready.put(Loaded(error=StopIteration()))
        return ready

    def _has_ended(self, within: float) -> bool:
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

    def _wake(self) -> None:
        """Let the thread's waiting for a worker process end."""
        results = getattr(self._iterator, '_data_queue', None)
        if results is None:
            return
        if hasattr(results, 'cancel_join_thread'):  # a pipe that workers write to
            # One that was killed as it wrote keeps it locked for ever: the process would wait at
            # its exit for what is put there.
            results.cancel_join_thread()
        # No task has this number, so `next` fails at once in the thread, which has been told to
        # stop and drops the error.
        results.put((-1, None))


def _current_device_index() -> int | None:
    if not torch.accelerator.is_available():
        return None
    return torch.accelerator.current_device_index()


def told_by_workers(error: BaseException, iterator: Any) -> BaseException:
    """Name a dead worker process where its death is why a batch could not be read."""
    if isinstance(error, (OSError, EOFError)):
        for worker in getattr(iterator, '_workers', ()):
            worker.join(timeout=0.1)  # its connection is lost before its end is known
            if worker.exitcode:
                made = RuntimeError(
                    f'A dataloader worker (pid {worker.pid}) ended with exit code '
                    f'{worker.exitcode}; a negative one is the signal that killed it, and -9 '
                    'usually means that memory ran out. Use fewer `num_workers` or a smaller '
                    '`batch_size`.'
                )
                made.__cause__ = error
                return made
    return error


def shut_workers(dataloader: Any, iterator: Any) -> None:
    """End the worker processes of a pass that is left before its end."""
    shutdown = getattr(iterator, '_shutdown_workers', None)
    if shutdown is None:
        return
    shutdown()
    if getattr(dataloader, '_iterator', None) is iterator:
        dataloader._iterator = None  # persistent workers: the next pass starts new ones
