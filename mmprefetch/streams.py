# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Streams: in-order queues of work that run beside the compute stream.

The engine knows two operations only. :meth:`Stream.submit` puts work on the side stream and
returns at once; :meth:`Work.wait` makes the *caller's* current stream wait for it. On an
accelerator neither blocks the host. On the host the current stream is the calling thread itself,
so there the thread waits.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import Any, Generic, TypeVar

import torch

T = TypeVar('T')


class Work(ABC, Generic[T]):
    """Work that was submitted to a :class:`Stream`."""

    @abstractmethod
    def wait(self, used: Callable[[T], Iterable[torch.Tensor]]) -> T:
        """Make the caller's current stream wait for the work, and hand over its result.

        Args:
            used (Callable): Names the tensors of the result whose memory the current stream is
                going to read. Each storage needs to appear only once.

        Returns:
            T: What the work returned.

        Raises:
            BaseException: What the work raised, with its own traceback.
        """

    @abstractmethod
    def done(self) -> bool:
        """bool: Whether the work has finished on its stream. Never blocks."""

    @abstractmethod
    def barrier(self) -> Callable[[], Any]:
        """Make a function that blocks its caller until the work has finished on its stream.

        Returns:
            Callable: The function. It does not keep alive what the work has made.
        """


class Stream(ABC):
    """An in-order queue of work beside the compute stream."""

    #: Whether the compute stream is the calling thread: work has then to be begun before the
    #: step is run, since nothing of the step is left when the call returns.
    compute_on_host: bool

    @abstractmethod
    def submit(self, work: Callable[[], T]) -> Work[T]:
        """Queue work behind all that was submitted before. Never blocks on earlier work.

        Args:
            work (Callable): Takes nothing, returns the result. What it raises is kept for
                :meth:`Work.wait`.

        Returns:
            Work: The handle of the work.
        """

    @abstractmethod
    def follow_compute(self) -> None:
        """Let work submitted from now on start only after what the caller's current stream has
        been given so far (the other direction of the order)."""

    @abstractmethod
    def close(self) -> None:
        """Let queued work finish and give threads back. The stream may be used again."""


class HostWork(Work[T]):
    """Work on the host stream; its event is a future."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def wait(self, used: Callable[[T], Iterable[torch.Tensor]]) -> T:
        return self._future.result()

    def done(self) -> bool:
        return self._future.done()

    def barrier(self) -> Callable[[], Any]:
        finished = threading.Event()
        self._future.add_done_callback(lambda _: finished.set())
        return finished.wait


class HostStream(Stream):
    """A stream of the host: one worker thread that serves an in-order queue."""

    compute_on_host = True

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._latest: Future | None = None
        self._lock = threading.RLock()

    def submit(self, work: Callable[[], T]) -> HostWork[T]:
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix='mmprefetch-stream')
            self._latest = self._executor.submit(work)
            return HostWork(self._latest)

    def follow_compute(self) -> None:
        """The calling thread has finished what it did before it submits: nothing to wait for."""

    def close(self) -> None:
        with self._lock:  # else work that another thread submits could begin before all is done
            if self._executor is None:
                return
            # Before the thread is joined: a join that Ctrl-C breaks off takes it for ended, and
            # then nothing would wait for it at the exit of the process.
            futures.wait([self._latest])
            self._executor.shutdown(wait=True)
            self._executor = self._latest = None


class AcceleratorWork(Work[T]):
    """Work on the side stream of an accelerator."""

    def __init__(self, stream: AcceleratorStream, event: Any) -> None:
        self._stream = stream
        self._event = event
        self.value: T
        self.error: BaseException | None = None

    def wait(self, used: Callable[[T], Iterable[torch.Tensor]]) -> T:
        if self.error is not None:
            raise self.error
        current = self._stream.api.current_stream()
        current.wait_event(self._event)
        for tensor in used(self.value):
            if tensor.device.type != self._stream.api.device.type:
                continue
            # The memory belongs to the side stream's pool: without this mark it could be handed
            # out again there, while the compute stream still reads it.
            self._stream.api.record_use(tensor, current)
        return self.value

    def done(self) -> bool:
        return self._event.query()

    def barrier(self) -> Callable[[], Any]:
        return self._event.synchronize


class AcceleratorStream(Stream):
    """A side stream of an accelerator. Work is issued by the calling thread.

    Args:
        api (AcceleratorAPI): The device's stream functions.
    """

    compute_on_host = False

    def __init__(self, api: AcceleratorAPI) -> None:
        self.api = api
        self._side = api.new_stream()

    def submit(self, work: Callable[[], T]) -> AcceleratorWork[T]:
        handle: AcceleratorWork[T] = AcceleratorWork(self, self.api.new_event())
        with self.api.use(self._side):
            try:
                handle.value = work()
            except Exception as error:  # raised by `wait`, where the batch is due
                handle.error = error
            handle._event.record(self._side)
        return handle

    def follow_compute(self) -> None:
        self._side.wait_stream(self.api.current_stream())

    def close(self) -> None:
        """An accelerator's stream holds no thread, and its memory pool is worth keeping."""


class AcceleratorAPI:
    """The few device functions that the engine uses, for one device.

    They are taken from torch's device-generic interface (``torch.accelerator``, ``torch.Stream``,
    ``torch.Event``) where that serves the device, else from the device's own module
    (``torch.cuda`` and its like).

    Args:
        device (torch.device): An accelerator device.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        accelerator = getattr(torch, 'accelerator', None)
        current = accelerator.current_accelerator() if accelerator is not None else None
        self._generic = current is not None and current.type == device.type
        self._module: ModuleType = getattr(torch, device.type, torch.cuda)

    def new_stream(self) -> Any:
        return torch.Stream(self.device) if self._generic else self._module.Stream(self.device)

    def new_event(self) -> Any:
        return torch.Event(self.device) if self._generic else self._module.Event()

    def current_stream(self) -> Any:
        if self._generic:
            return torch.accelerator.current_stream(self.device)
        return self._module.current_stream(self.device)

    def use(self, stream: Any) -> Any:
        """A context in which ``stream`` is the current stream."""
        return stream if self._generic else self._module.stream(stream)

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being handed out again before what ``stream`` has been
        given so far is done."""
        tensor.record_stream(stream)


def stream_for(device: torch.device) -> Stream:
    """Make the side stream for a device.

    Args:
        device (torch.device): Where the model's inputs go.

    Returns:
        Stream: A :class:`HostStream` for the CPU, else an :class:`AcceleratorStream`.
    """
    if device.type == 'cpu':
        return HostStream()
    return AcceleratorStream(AcceleratorAPI(device))
