# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What the loader thread does with a batch: transfer it, and begin what depends on it alone."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from torch import nn

from ..families import Family, with_samples
from ..ops import prepare
from .mixed import SampleConstants
from .snapshot import BatchSnapshot, FieldSnapshot
from .ticket import Call, Ticket, Work
from .transfer import Transfer

_HOST = torch.device('cpu')


class Preparation:
    """Begins work on the batches of one pass. Made on the thread that trains.

    Args:
        preprocessor (PrefetchDataPreprocessor): Tells the effective preprocessor of the split.
        split (str): 'train', 'val' or 'test'.
    """

    def __init__(self, preprocessor: Any, split: str) -> None:
        self._preprocessor = preprocessor
        self._split = split
        self._device: torch.device = preprocessor.device
        self._side = preprocessor.runtime.stream(self._device)
        self._compute = self._side.current()
        self._fields = FieldSnapshot([])
        self._written: Collection[str] = ()
        self._follows = False

    def enter_thread(self) -> None:
        """Prepare the calling thread, which is new: what loading does on the device runs on the
        stream of the thread that trains, as under mmengine's loops."""
        self._side.enter_thread(self._compute)
        if self._side.on_host:
            prepare()  # the kernel of the usual images, before the first of them

    def begin(self, ticket: Ticket) -> None:
        """Transfer a batch and begin its preprocessing. What this raises is kept on the ticket.

        Args:
            ticket (Ticket): Of a batch that was just loaded.
        """
        try:
            self._preprocessor.look_up_samples(ticket)
            module, family = self._preprocessor.effective(self._split)
            call = self._preprocessor.runtime.calls.get(self._split, Call(self._split == 'train'))
            fields = self._fields_of(family, module)
            work = Work(family, call, self._side, BatchSnapshot(ticket.batch), fields)
        except BaseException as error:
            ticket.error = error
            return
        held: list = []
        try:
            work.begun = self._begin(ticket, module, work, held)
            work.memory = self._side.memory_of(work.begun)
            self._written = family.written(work.begun)
        except BaseException as error:  # raised again where the model asks for the batch
            work.error = error
        try:
            work.event = self._side.finish(held)
        except BaseException as error:
            ticket.error = error
        ticket.work = work

    def _fields_of(self, family: Family, module: nn.Module) -> FieldSnapshot:
        """A snapshot of the fields, the same as long as they are. Before work with other fields is
        begun the side stream waits for the stream on which they were written."""
        reads = family.reads(module)
        if (
            not self._follows
            or self._fields.modules != reads
            or self._fields.changed(self._written)
        ):
            self._fields, self._follows = FieldSnapshot(reads, mode_counts=family.needs_modes), True
            self._side.follow(self._compute)
        return self._fields

    def _begin(self, ticket: Ticket, module: nn.Module, work: Work, held: list) -> Any:
        family, call, samples = work.family, work.call, ticket.samples
        # A module that is no preprocessor of mmengine's kind may want its input on the host.
        on_host = self._side.on_host or not isinstance(module, BaseDataPreprocessor)
        if on_host and not family.works_in_place:
            module = with_samples(module, samples)
            return family.begin(module, family.receive(module, ticket.batch), call.training)
        constants = None if samples is None else samples.values
        device = _HOST if on_host else self._device
        transfer = Transfer((ticket.batch, constants), device, copies=not on_host)
        held += [transfer.buffer, transfer.on_device]
        if transfer.on_device:
            self._side.follow(self._compute)  # on which loading has made them
        with self._side.issue():
            moved, constants = transfer.issue()
            if samples is not None:
                samples = SampleConstants(constants, samples.reverse)
            module = with_samples(module, samples)
            with contextlib.nullcontext() if call.modes is None else call.modes.applied():
                return family.begin(module, moved, call.training)
