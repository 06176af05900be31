# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessor that hands out what was begun on a batch when the model asks for it."""

from __future__ import annotations

import functools
from types import MethodType
from typing import Any

import torch
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from torch import nn

from .engine import Call, Preparation, Runtime, ThreadModes, Ticket
from .engine.mixed import PartConstants
from .families import (
    Family,
    announce,
    default_training,
    family_of,
    family_of_module,
    with_samples,
)
from .fields.classes import find_class, nearest, preprocessor_names
from .fields.datasets import FieldSource
from .fields.resolve import resolve
from .wrapping import WrappingPreprocessor

# What the classes call the constants and the channel order.
_VARY_BY_SAMPLE = frozenset({'mean', 'std', '_channel_conversion', 'channel_conversion', 'to_rgb'})


@MODELS.register_module()
class PrefetchDataPreprocessor(WrappingPreprocessor):
    """Wraps any data preprocessor; its work on a batch is begun ahead of the model's step.

    A loop that looks ahead begins the work in its loader thread. A call with the very object that
    the loop has handed out makes the compute stream wait for that work, and returns its result. A
    batch that nobody began is processed at once.

    Args:
        wraps (str): Registered name of the preprocessor to wrap. Defaults to
            'ImgDataPreprocessor'.
        prefetch_safe (bool): Declares that the forward of the wrapped preprocessor depends on its
            batch and fields alone (no random numbers, no collectives, no iteration), so that the
            whole of it may run ahead. Not needed for the classes that mmprefetch knows. Defaults
            to False.
        **fields: The wrapped preprocessor's own arguments.

    Raises:
        ValueError: ``wraps`` is not registered, or a field is not one of the wrapped class's, or
            fields do not fit each other.
    """

    _OWN = WrappingPreprocessor._OWN | {
        *('fields', 'opted_in', 'prefetch_safe', 'bindings', 'runtime', '_mixed', '_refused')
    }

    def __init__(
        self, wraps: str = 'ImgDataPreprocessor', prefetch_safe: bool = False, **fields: Any
    ) -> None:
        cls = find_wrapped(wraps)
        fields = resolve('model', cls, [FieldSource('model.data_preprocessor', fields)]).fields
        self._set_up(build(cls, fields), fields, prefetch_safe, opted_in=True)

    @classmethod
    def around(cls, module: nn.Module, fields: dict | None = None) -> PrefetchDataPreprocessor:
        """Wrap a preprocessor that exists already, and change nothing about it.

        Args:
            module (nn.Module): The preprocessor.
            fields (dict, optional): The arguments it was built from, where known.

        Returns:
            PrefetchDataPreprocessor: The wrapper.
        """
        self = cls.__new__(cls)
        self._set_up(module, dict(fields or {}), prefetch_safe=False, opted_in=False)
        return self

    def _set_up(
        self, wrapped: nn.Module, fields: dict, prefetch_safe: bool, opted_in: bool
    ) -> None:
        nn.Module.__init__(self)
        self.fields = fields
        self.opted_in = opted_in
        self.prefetch_safe = prefetch_safe
        self.bindings: dict[str, Any] = {}
        self.runtime = Runtime()
        self._mixed: dict[str, PartConstants] = {}
        self._refused: dict[str, str] = {}
        self._wrap(wrapped)
        if not prefetch_safe:
            announce(wrapped)

    def is_mixed(self, split: str) -> bool:
        """Whether the datasets of a split differ in what their samples are normalised with.

        Args:
            split (str): 'train', 'val' or 'test'.

        Returns:
            bool: Whether they do.
        """
        return split in self._mixed

    def mix(self, split: str, constants: PartConstants) -> None:
        """Let each sample of a split be normalised with what its own dataset says.

        Args:
            split (str): 'train', 'val' or 'test'.
            constants (PartConstants): What each of the split's datasets says.
        """
        self._mixed[split] = constants

    def refuse(self, split: str, reason: str) -> None:
        """Let a call while a split runs be an error.

        Args:
            split (str): 'train', 'val' or 'test'.
            reason (str): What the error says.
        """
        self._refused[split] = reason

    def effective(self, split: str | None) -> tuple[nn.Module, Family]:
        """The effective preprocessor of a split, and what is known of it.

        Args:
            split (str | None): 'train', 'val' or 'test'; None: outside of any loop.

        Returns:
            tuple: The preprocessor and its family.
        """
        module = self.of_split(split)
        return module, family_of_module(module, self.prefetch_safe)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name in PrefetchDataPreprocessor._OWN or self.split not in self._mixed:
            return value
        if name in _VARY_BY_SAMPLE:
            raise ValueError(
                f'data_preprocessor.{name} is read while {self.split} runs, whose datasets differ '
                'in mean, std or channel order, so there is no one value. Give them the same '
                'values, or let the model do without.'
            )
        # A method reads them as well.
        return MethodType(value.__func__, self) if isinstance(value, MethodType) else value

    # -- what a pass over a dataloader asks for ----------------------------------------------------

    def preparation(self, split: str) -> Preparation:
        """Make what begins work in the loader thread of a pass.

        Args:
            split (str): 'train', 'val' or 'test'.

        Returns:
            Preparation: For one pass. The calling thread's current stream is taken for the one
            that the model runs on.
        """
        return Preparation(self, split)

    def look_up_samples(self, ticket: Ticket) -> None:
        """Of a mixed dataset, look up what the samples of a batch are normalised with.

        Args:
            ticket (Ticket): Of the batch; those of other datasets stay as they are.
        """
        if ticket.parts is not None and ticket.split in self._mixed:
            ticket.samples = self._mixed[ticket.split].of(ticket.parts)

    def expect(self, ticket: Ticket) -> None:
        """Note that a batch is handed out, so that the model may ask for it.

        Args:
            ticket (Ticket): Of the batch.
        """
        if ticket.work is None:
            self.look_up_samples(ticket)
        self.runtime.due.append(ticket)

    def withdraw(self, ticket: Ticket) -> None:
        """Forget the ticket of a batch whose step was issued.

        Args:
            ticket (Ticket): Of the batch.
        """
        if ticket in self.runtime.due:
            self.runtime.due.remove(ticket)
        if ticket.release is not None:
            ticket.release()
        self.runtime.poll()

    # -- what the model asks for -------------------------------------------------------------------

    @torch.compiler.disable  # what was begun belongs to one batch, and is nothing to be traced
    def forward(self, data: Any, training: bool | None = None) -> Any:
        """Preprocess a batch, or hand out what was begun on it.

        Args:
            data (Any): A batch from the dataloader.
            training (bool, optional): Whether to preprocess for training. Defaults to what the
                wrapped class's own ``forward`` has as its default.

        Returns:
            Any: What the wrapped preprocessor returns.

        Raises:
            ValueError: The batch is of a mixed dataset, and did not come through a prefetch loop.
        """
        if training is None:
            training = default_training(type(self.wrapped))
        ticket = self.runtime.find(data)
        if ticket is not None:
            return self._collect(ticket, data, training)
        split = self._split_now(training)
        if split in self._refused:
            raise ValueError(self._refused[split])
        if split in self._mixed:
            raise ValueError(
                f'{split}_dataloader holds datasets that differ in mean, std or channel order, '
                'so its batches have to come through a prefetch loop: write '
                f"`{split}_cfg.type='Prefetch{split.capitalize()}Loop'` (for training "
                "'PrefetchLoop')."
            )
        module, family = self.effective(split)
        return family.run(module, data, training)

    def _collect(self, ticket: Ticket, data: Any, training: bool) -> Any:
        module, family = self.effective(ticket.split)
        if ticket.samples is not None and not family.by_sample:
            raise ValueError(
                f'The datasets of {ticket.split}_dataloader differ in mean, std or channel order, '
                f'but the forward of {type(module).__name__} has been replaced, or has hooks, and '
                'would give all samples the values of one of them. Remove the hooks, or give all '
                'datasets the same values.'
            )
        module = with_samples(module, ticket.samples)
        call = Call(training, ThreadModes.current(self.device) if family.needs_modes else None)
        self.runtime.calls[ticket.split] = call
        work = ticket.claim()
        if work is None or not work.is_current(family, call):
            return family.run(module, data, training)
        held = work.collect()
        if held:
            ticket.release = functools.partial(work.side.release, held)
        return family.finish(module, work.begun, data, training)

    def _split_now(self, training: bool) -> str | None:
        """The split that a batch belongs to which nobody began. Outside of any loop, for example
        when a trained model is tried by hand, the flag tells the most likely one."""
        if self.split is not None:
            return self.split
        likely = ('train',) if training else ('test', 'val', 'train')
        return next((split for split in likely if split in self.bindings), None)

    def extra_repr(self) -> str:
        return f'wraps={type(self.wrapped).__name__}, fields={self.fields}'


def find_wrapped(name: Any, scope: str | None = None) -> type[nn.Module]:
    """Look the class up that a preprocessor is to wrap.

    Args:
        name (str | type): Registered name, or the class itself.
        scope (str, optional): The registry scope to look in first.

    Returns:
        type: The class.

    Raises:
        ValueError: No such class is registered.
    """
    cls = find_class(MODELS, name, scope)
    if cls is None:
        known = [n for n in preprocessor_names(MODELS, scope) if not n.startswith('Prefetch')]
        raise ValueError(
            f"model.data_preprocessor.wraps='{name}' is not a registered preprocessor"
            f'{nearest(name, known)}. Registered are: {", ".join(known)}. If it belongs to a '
            "package, add that package to `custom_imports` or write `wraps='package.Name'`."
        )
    ours = PrefetchDataPreprocessor
    if not (isinstance(cls, type) and issubclass(cls, nn.Module)) or issubclass(
        cls, (BaseModel, ours)
    ):
        raise ValueError(
            f'model.data_preprocessor.wraps={name!r} is {cls!r}, which is no preprocessor that '
            "could be wrapped. Write the name of one, for example `wraps='ImgDataPreprocessor'`."
        )
    return cls


def build(cls: type[nn.Module], fields: dict) -> nn.Module:
    """Build a preprocessor from its class and fields.

    Args:
        cls (type): The preprocessor's class.
        fields (dict): Its arguments.

    Returns:
        nn.Module: The preprocessor.
    """
    return family_of(cls).make(cls, fields)
