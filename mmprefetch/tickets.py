# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Work begun on batches, found again by the identity of the batch."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .ambient import Ambient
from .families import Family
from .mixed import SampleConstants
from .ring import PinnedRing
from .staging import StagedBatch
from .streams import Stream, Work, stream_for
from .watch import FieldWatch, Watch


@dataclass
class Result:
    """What work on a batch has made.

    Args:
        value (Any): The batch, moved or preprocessed.
        blocks (list): One tensor for each block of device memory that is known to be behind it.
        made (Any): The part of the value that may hold other memory. Defaults to none.
    """

    value: Any
    blocks: list[torch.Tensor]
    made: Any = None

    def used(self) -> list[torch.Tensor]:
        """list: One tensor for each block of memory that whoever takes the value may read."""
        if self.made is None:
            return self.blocks
        known = {block.untyped_storage().data_ptr() for block in self.blocks}
        return [*self.blocks, *_new_blocks(self.made, known)]


def _new_blocks(value: Any, known: set[int]) -> Iterator[torch.Tensor]:
    """Find one tensor for each storage below a value that is not known yet."""
    if isinstance(value, torch.Tensor):
        if value.layout == torch.strided:
            pointer = value.untyped_storage().data_ptr()
            if pointer not in known:
                known.add(pointer)
                yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _new_blocks(item, known)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _new_blocks(item, known)
    elif hasattr(value, 'to'):
        for item in getattr(value, '__dict__', {}).values():
            yield from _new_blocks(item, known)


@dataclass
class Staged:
    """A batch that is ready for its transfer.

    Args:
        watch (Watch): Notices when someone changes the batch.
        packed (StagedBatch | None): Its tensors in a staging buffer; None where nothing has to be
            copied.
        samples (SampleConstants | None): Of a mixed dataset, what each sample is normalised with.
    """

    watch: Watch
    packed: StagedBatch | None = None
    samples: SampleConstants | None = None


@dataclass
class Ticket:
    """Work begun on one batch.

    Args:
        batch (Any): The raw batch; held so that its identity stays its own.
        watch (Watch): Notices when someone changes it, so that the work is out of date.
        split (str): Whose effective preprocessor was used.
        training (bool): The flag it was begun with.
        work (Work | None): The work; None: nothing was begun, but its samples are known.
        family (Family | None): What was known of the preprocessor.
        ambient (Ambient | None): The modes that a user's forward ran under.
        generation (int | None): The state of the preprocessor's fields that it was begun with;
            None: it does not depend on them.
        samples (SampleConstants | None): Of a mixed dataset, what each sample is normalised with.
    """

    batch: Any
    watch: Watch
    split: str
    training: bool = False
    work: Work[Result] | None = None
    family: Family | None = None
    ambient: Ambient | None = None
    generation: int | None = None
    samples: SampleConstants | None = None


class Runtime:
    """The part of a preprocessor that belongs to this process: tickets, streams, buffers.

    A copy or a pickle of its owner gets a new, empty one.
    """

    def __init__(self) -> None:
        self.generation = 0
        self._tickets: dict[int, deque[Ticket]] = {}
        # Work is begun by the loader thread where the step runs on the host. The collector may run
        # where it is held, and end a pass that nobody holds any more.
        self._lock = threading.RLock()
        self._watches: dict[nn.Module, FieldWatch] = {}
        self._stream: Stream | None = None
        self._device: torch.device | None = None
        self._followed = -1
        self._rings: dict[str, PinnedRing] = {}
        self._ambient: dict[str, Ambient] = {}

    def __deepcopy__(self, memo: dict) -> Runtime:
        return Runtime()

    def __reduce__(self) -> tuple:
        return (Runtime, ())

    def change(self) -> None:
        """Note that a field of the preprocessor changed: work begun before is out of date."""
        self.generation += 1

    def check(self, module: nn.Module, known: bool) -> int:
        """See whether a field of a preprocessor was changed, however that was done.

        Args:
            module (nn.Module): The preprocessor.
            known (bool): Whether its class is one that mmprefetch knows.

        Returns:
            int: The state of the fields: work begun with another is out of date.
        """
        with self._lock:
            watch = self._watches.get(module)
            if watch is None:
                self._watches[module] = FieldWatch(module, attributes=known)
            elif watch.changed():
                self.change()
            return self.generation

    def stream(self, device: torch.device) -> Stream:
        """The side stream; one for the preprocessor's life on a device."""
        if self._stream is None or self._device != device:
            self.close()
            self._stream, self._device = stream_for(device), device
        return self._stream

    def follow(self, stream: Stream) -> None:
        """Order the stream behind the compute stream once after each change of the fields, since
        it reads the constants that were written there."""
        if self._followed != self.generation:
            stream.follow_compute()
            self._followed = self.generation

    def ring(self, split: str, slots: int) -> PinnedRing:
        """The staging buffers of a split, made at the first call."""
        with self._lock:
            if split not in self._rings:
                self._rings[split] = PinnedRing(slots)
            ring = self._rings[split]
            ring.slots = max(ring.slots, slots)
            return ring

    def add(self, ticket: Ticket) -> None:
        """Keep a ticket until its batch comes back."""
        with self._lock:
            self._tickets.setdefault(id(ticket.batch), deque()).append(ticket)

    def take(self, batch: Any) -> Ticket | None:
        """Take the oldest ticket of a batch, if there is one."""
        with self._lock:
            tickets = self._tickets.get(id(batch))
            if not tickets:
                return None
            ticket = tickets.popleft()
            if not tickets:
                del self._tickets[id(batch)]
            return ticket

    def expected_ambient(self, split: str, device: torch.device) -> Ambient:
        """The modes under which the model asked for the split's last batch."""
        return self._ambient.get(split) or Ambient.current(device)

    def note_ambient(self, split: str, device: torch.device) -> Ambient:
        """Note and return the modes under which the model asks now."""
        self._ambient[split] = Ambient.current(device)
        return self._ambient[split]

    def close(self) -> None:
        """Give the stream's thread back."""
        if self._stream is not None:
            self._stream.close()
