# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The ticket of a batch: what was begun on it, found again when the model asks for the batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..families import Family
from .mixed import SampleConstants
from .snapshot import BatchSnapshot, FieldSnapshot
from .streams import NoSideStream, stream_for
from .thread_modes import ThreadModes


class Call(NamedTuple):
    """How the model calls its preprocessor.

    Attributes:
        training (bool): The flag that it passes.
        modes (ThreadModes | None): The modes of torch that it calls under, where they count.
    """

    training: bool
    modes: ThreadModes | None = None


@dataclass
class Work:
    """Work begun on a batch, and what has to hold for it to count.

    Args:
        family (Family): What was known of the preprocessor.
        call (Call): How the model was expected to call its preprocessor.
        side (NoSideStream): The stream that it was issued on.
        batch (BatchSnapshot): The batch as it was begun.
        fields (FieldSnapshot): The fields that were used.
        begun (Any): What :meth:`Family.begin` returned.
        error (BaseException | None): What it raised.
        event (Any): The end of the work on the side stream.
        memory (list): The memory of the side stream that was begun into.
    """

    family: Family
    call: Call
    side: NoSideStream
    batch: BatchSnapshot
    fields: FieldSnapshot
    begun: Any = None
    error: BaseException | None = None
    event: Any = None
    memory: list[torch.Tensor] = field(default_factory=list)

    def is_current(self, family: Family, call: Call) -> bool:
        """Whether the same would be begun now.

        Args:
            family (Family): What is known of the preprocessor now.
            call (Call): How the model calls its preprocessor.

        Returns:
            bool: False if the work has to be done again.
        """
        return (
            self.family is family
            and (self.call.training == call.training or family.trains_alike)
            and self.call.modes == call.modes
            and not self.batch.changed()
            and not self.fields.changed(but=family.written(self.begun))
        )

    def collect(self) -> list[torch.Tensor]:
        """Make the current stream wait for the work.

        Returns:
            list[torch.Tensor]: Memory to be held until the step was issued.

        Raises:
            BaseException: What the work raised, with its own traceback.
        """
        if self.error is not None:
            raise self.error
        return self.side.collect(self.event, self.memory)


@dataclass(eq=False)
class Ticket:
    """A batch on its road from the dataloader to the model.

    Args:
        batch (Any): The raw batch; its identity is how it is found again.
        split (str): 'train', 'val' or 'test', whose effective preprocessor is used.
        parts (list[int] | None): Of a mixed dataset, the part that each sample is from.
        samples (SampleConstants | None): What each sample is normalised with, looked up by it.
        error (BaseException | None): What loading raised in place of a batch.
        work (Work | None): What was begun; None for a batch that is processed when it is due.
        claimed (bool): Whether the model has asked for the batch.
        on_claim (Callable | None): Called when the model asks for the batch.
        release (Callable | None): Called when the step of the batch was issued.
        position (Any): The dataloader's ``state_dict`` after it was loaded, where it has one.
        spent (Any): The snapshots, to be freed off the thread that trains.
    """

    batch: Any
    split: str
    parts: list[int] | None = None
    samples: SampleConstants | None = None
    error: BaseException | None = None
    work: Work | None = None
    claimed: bool = False
    on_claim: Callable[[], Any] | None = None
    release: Callable[[], Any] | None = None
    position: Any = None
    spent: Any = None

    def claim(self) -> Work | None:
        """Work | None: What was begun, for the first who asks."""
        self.claimed = True
        if self.on_claim is not None:
            self.on_claim()
        work, self.work = self.work, None
        self.spent = work and (work.batch, work.fields)
        return work


class Runtime:
    """The part of a preprocessor that belongs to this process: tickets, streams, calls.

    A copy or a pickle of its owner gets a new, empty one.
    """

    def __init__(self) -> None:
        # The tickets of the batches that were handed out last, one for each pass that goes on.
        self.due: list[Ticket] = []
        # How the model asked for the last batch of each split.
        self.calls: dict[str, Call] = {}
        self._streams: dict[torch.device, NoSideStream] = {}

    def __deepcopy__(self, memo: dict) -> Runtime:
        return Runtime()

    def __reduce__(self) -> tuple:
        return (Runtime, ())

    def stream(self, device: torch.device) -> NoSideStream:
        """The side stream of a device; one for the preprocessor's life, since torch keeps a pool
        of memory for each."""
        if device not in self._streams:
            self._streams[device] = stream_for(device)
        return self._streams[device]

    def poll(self) -> None:
        """Let go of memory that was held for a stream, and is read no more."""
        for stream in list(self._streams.values()):
            stream.poll()

    def find(self, batch: Any) -> Ticket | None:
        """The ticket of a batch that was handed out, if there is one; the newest first."""
        return next((ticket for ticket in reversed(self.due) if ticket.batch is batch), None)
