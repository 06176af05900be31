# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Side streams: where the loader thread's work runs, and how the compute stream waits for it.

On an accelerator the loader thread issues transfers and kernels on a side stream
(:class:`SideStream`). On the host the loader thread itself is the side stream, and its work is
done when it hands a batch over: there is nothing to wait for (:class:`NoSideStream`).
"""

from __future__ import annotations

import contextlib
from collections import deque
from contextlib import AbstractContextManager
from typing import Any

import torch

from .transfer import memory_of


class NoSideStream:
    """The host, or a device that has one stream only: work is in order as it is issued.

    Args:
        on_host (bool): Whether it is the host, to which nothing has to be transferred.
    """

    def __init__(self, on_host: bool) -> None:
        self.on_host = on_host

    def current(self) -> Any:
        """Any: The calling thread's current stream."""
        return None

    def enter_thread(self, stream: Any) -> None:
        """Make a stream and its device the calling thread's, which is new.

        Args:
            stream (Any): From :meth:`current`.
        """

    def issue(self) -> AbstractContextManager:
        """A context in which the calling thread issues work on the side stream."""
        return contextlib.nullcontext()

    def follow(self, stream: Any) -> None:
        """Let work issued from now on start only after what ``stream`` was given so far.

        Args:
            stream (Any): From :meth:`current`.
        """

    def memory_of(self, value: Any) -> list[torch.Tensor]:
        """Find the memory that :meth:`collect` has to protect.

        Args:
            value (Any): Tensors, or containers and data elements of such.

        Returns:
            list[torch.Tensor]: One tensor for each block.
        """
        return []

    def finish(self, held: Any) -> Any:
        """Make the event that marks the end of what was issued so far.

        Args:
            held (Any): Memory of others that the side stream reads until then.

        Returns:
            Any: To be given to :meth:`collect`.
        """
        return None

    def collect(self, event: Any, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        """Make the calling thread's current stream wait for an event. Never blocks the host.

        Args:
            event (Any): From :meth:`finish`.
            memory (list): From :meth:`memory_of`; the current stream is going to read it.

        Returns:
            list[torch.Tensor]: What has to be held, and given to :meth:`release` when the current
            stream has been given what reads it.
        """
        return []

    def release(self, memory: list[torch.Tensor]) -> None:
        """Hold memory until the current stream is done with what it has been given so far.

        Args:
            memory (list): From :meth:`collect`.
        """

    def poll(self) -> None:
        """Let go of what was held and is read no more."""


class SideStream(NoSideStream):
    """A side stream of an accelerator.

    Memory that one stream allocated and another reads is protected both ways: torch's allocator
    is told of the reader (``record_stream``). Where a device cannot be told, the memory is held
    until an event of the reader.

    Args:
        api (StreamAPI): The device's stream functions.
    """

    def __init__(self, api: StreamAPI) -> None:
        super().__init__(on_host=False)
        self.api = api
        self.stream = api.new_stream()
        self._held: deque[tuple[Any, Any]] = deque()

    def current(self) -> Any:
        return self.api.current_stream()

    def enter_thread(self, stream: Any) -> None:
        self.api.set_stream(stream)

    def issue(self) -> AbstractContextManager:
        return self.api.use(self.stream)

    def follow(self, stream: Any) -> None:
        self.stream.wait_stream(stream)

    def memory_of(self, value: Any) -> list[torch.Tensor]:
        return memory_of(value)

    def finish(self, held: Any) -> Any:
        event = self._event(self.stream)
        self._held.append((event, held))
        self.poll()
        return event

    def collect(self, event: Any, memory: list[torch.Tensor]) -> list[torch.Tensor]:
        current = self.current()
        current.wait_event(event)
        try:
            for tensor in memory:
                # Else the allocator could hand the memory out again on the side stream, while the
                # compute stream still reads it.
                self.api.record_use(tensor, current)
        except NotImplementedError:  # torch has it for some kinds of device only
            return memory
        return []

    def release(self, memory: list[torch.Tensor]) -> None:
        if memory:
            self._held.append((self._event(self.current()), memory))

    def poll(self) -> None:
        # Several threads come here, and a lock could stay locked after Ctrl-C: who takes an entry
        # out has it alone.
        while self._held:
            try:
                entry = self._held.popleft()
            except IndexError:
                return
            if not entry[0].query():
                self._held.appendleft(entry)
                return

    def _event(self, stream: Any) -> Any:
        event = self.api.new_event()
        event.record(stream)
        return event


class StreamAPI:
    """The stream functions of one accelerator device, from its own module (``torch.cuda``, ...).

    Args:
        device (torch.device): The device.

    Raises:
        ValueError: Torch has no module for this kind of device.
    """

    def __init__(self, device: torch.device) -> None:
        module = getattr(torch, device.type, None)
        if module is None or not hasattr(module, 'current_device'):
            raise ValueError(
                f'The model is on a device of the kind {device.type!r}, of which torch has no '
                f'module `torch.{device.type}` with streams. Import the package that brings it, '
                'or write `prefetch_depth=0` for each loop.'
            )
        self.device = device
        self._module = module

    def new_stream(self) -> Any:
        """A new stream of the device."""
        return self._module.Stream(self.device)

    def new_event(self) -> Any:
        """A new event of the device."""
        return self._module.Event()

    def current_stream(self) -> Any:
        """The calling thread's current stream."""
        return self._module.current_stream(self.device)

    def set_stream(self, stream: Any) -> None:
        """Make a stream, and the device, the calling thread's."""
        if self.device.index is not None:
            self._module.set_device(self.device)
        self._module.set_stream(stream)

    def use(self, stream: Any) -> AbstractContextManager:
        """A context in which ``stream`` is current; one for each call, since a context object
        keeps the stream that was current before, and several threads come here."""
        return self._module.stream(stream)

    def record_use(self, tensor: torch.Tensor, stream: Any) -> None:
        """Keep a tensor's memory from being handed out again before what ``stream`` has been
        given by the time it is freed is done."""
        tensor.record_stream(stream)


def stream_for(device: torch.device) -> NoSideStream:
    """Make the side stream for a device.

    Args:
        device (torch.device): Where the model's inputs go.

    Returns:
        NoSideStream: A :class:`SideStream` for a device with streams.

    Raises:
        ValueError: Torch has no module for this kind of device.
    """
    if device.type in ('cpu', 'meta'):
        return NoSideStream(on_host=True)
    if device.type == 'mps':  # it has a single stream, on which all threads issue
        return NoSideStream(on_host=False)
    return SideStream(StreamAPI(device))
