# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""How a preprocessor class works on a batch: what runs ahead, what when the batch is due."""

from __future__ import annotations

from collections.abc import Collection
from operator import attrgetter
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement
from torch import nn

from ..elements import moved
from .passes import note_unscaled

_device = attrgetter('device')


class Family:
    """How a preprocessor class works on a batch that is on the device already.

    The result of :meth:`begin` and :meth:`finish` together must be what the class's own
    ``forward`` returns, to the bit.
    """

    #: Whether the fused pass can normalise each sample of a batch with constants of its own.
    by_sample = False
    #: Whether ``begin`` makes the same of a batch whatever ``training`` says.
    trains_alike = False
    #: Whether what ``begin`` returns depends on the thread's modes of torch, such as autocast.
    needs_modes = False
    #: Whether ``begin`` may write into the memory of the batch it is given.
    works_in_place = False
    #: The field that holds the config of the preprocessor of the images where the class has one
    #: inside; fields bound to a dataset are for that one. The module has it as an attribute of
    #: the same name.
    inner_field: str | None = None

    def make(self, cls: type[nn.Module], fields: dict) -> nn.Module:
        """Build the preprocessor.

        Args:
            cls (type): The preprocessor's class.
            fields (dict): Its arguments.

        Returns:
            nn.Module: The preprocessor.
        """
        made = cls(**fields)
        note_unscaled(made, fields)
        return made

    def receive(self, preprocessor: nn.Module, batch: Any) -> Any:
        """Make what :meth:`begin` is given of a batch that was not transferred.

        Args:
            preprocessor (nn.Module): Holds the device.
            batch (Any): The raw batch.

        Returns:
            Any: What ``cast_data`` returns: containers of its own, on the device.
        """
        return cast(preprocessor, batch)

    def reads(self, preprocessor: nn.Module) -> list[nn.Module]:
        """The modules whose fields :meth:`begin` depends on.

        Args:
            preprocessor (nn.Module): The preprocessor.

        Returns:
            list[nn.Module]: By default the preprocessor alone.
        """
        return [preprocessor]

    def written(self, begun: Any) -> Collection[str]:
        """The attributes that :meth:`finish` is going to set on the preprocessor.

        Args:
            begun (Any): What :meth:`begin` returned; None where it failed.

        Returns:
            Collection[str]: By default none.
        """
        return ()

    def begin(self, preprocessor: nn.Module, data: Any, training: bool) -> Any:
        """Do what may run ahead: what depends on the batch alone.

        No random numbers, no collectives, no host synchronisation, no iteration; the thread's
        modes do not matter either.

        Args:
            preprocessor (nn.Module): Holds the fields.
            data (Any): What ``cast_data`` returned; its containers may be changed.
            training (bool): What the model is going to pass as ``training``.

        Returns:
            Any: Whatever :meth:`finish` needs.
        """
        raise NotImplementedError

    def finish(self, preprocessor: nn.Module, begun: Any, batch: Any, training: bool) -> Any:
        """Do the rest, where and when the class's own forward would be called.

        Args:
            preprocessor (nn.Module): Holds the fields.
            begun (Any): What :meth:`begin` returned.
            batch (Any): The raw batch: what the class changes in it has to be changed.
            training (bool): The same as at :meth:`begin`.

        Returns:
            Any: What the class's own forward returns. By default what was begun.
        """
        return begun

    def run(self, preprocessor: nn.Module, batch: Any, training: bool) -> Any:
        """Preprocess a batch at once.

        Args:
            preprocessor (nn.Module): Holds the fields.
            batch (Any): The raw batch.
            training (bool): Whether to preprocess for training.

        Returns:
            Any: What the class's own forward returns.
        """
        begun = self.begin(preprocessor, self.receive(preprocessor, batch), training)
        return self.finish(preprocessor, begun, batch, training)


def cast(preprocessor: BaseDataPreprocessor, batch: Any) -> Any:
    """Do what ``cast_data`` does, in fewer steps for images that are on the device already and
    for data samples.

    Args:
        preprocessor (BaseDataPreprocessor): Knows the device.
        batch (Any): A batch.

    Returns:
        Any: The batch on the device, in containers of its own.
    """
    if type(batch) is not dict:
        return preprocessor.cast_data(batch)
    # In the batch's own order: some classes take its values by position.
    return {key: _cast(preprocessor, value) for key, value in batch.items()}


def _cast(preprocessor: BaseDataPreprocessor, value: Any) -> Any:
    device = preprocessor.device
    if value is None or (type(value) is torch.Tensor and value.device == device):
        return value
    kinds = set(map(type, value)) if type(value) is list else set()
    if kinds == {torch.Tensor} and set(map(_device, value)) == {device}:
        return list(value)
    if kinds and all(issubclass(kind, BaseDataElement) for kind in kinds):
        return [moved(sample, device, preprocessor._non_blocking) for sample in value]
    return preprocessor.cast_data(value)
