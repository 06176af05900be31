# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Classes without a fused pass: what may run ahead is nothing, or all of their forward."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

from torch import nn

from .family import Family
from .fused import twin

_MISSING = object()
_TABLES = ('_parameters', '_buffers', '_modules')


class CastFamily(Family):
    """:class:`BaseDataPreprocessor` does nothing beyond the transfer."""

    trains_alike = True

    def reads(self, preprocessor: nn.Module) -> list[nn.Module]:
        return []

    def begin(self, preprocessor: nn.Module, data: Any, training: bool) -> Any:
        return data


class TransferFamily(CastFamily):
    """A class of which nothing is known: only the transfer of its batch runs ahead."""

    def receive(self, preprocessor: nn.Module, batch: Any) -> Any:
        return batch

    def finish(self, preprocessor: nn.Module, begun: Any, batch: Any, training: bool) -> Any:
        return _called(preprocessor, begun, training)


class SafeResult(NamedTuple):
    """What a safe forward has made.

    Args:
        value (Any): What it returned.
        written (dict): The attributes and buffers that it set on the preprocessor.
    """

    value: Any
    written: dict[str, Any]


class SafeFamily(TransferFamily):
    """A class whose forward the user has declared to depend on its batch and fields alone.

    The whole of it runs ahead, under the modes of torch that the model is expected to call it
    under. Attributes that it sets, for the model to read, are set when the batch is due.
    """

    trains_alike = False
    needs_modes = True
    works_in_place = True

    def reads(self, preprocessor: nn.Module) -> list[nn.Module]:
        return list(preprocessor.modules())

    def written(self, begun: SafeResult | None) -> Collection[str]:
        return begun.written if begun is not None else ()

    def begin(self, preprocessor: nn.Module, data: Any, training: bool) -> SafeResult:
        tables = {name: dict(vars(preprocessor)[name]) for name in _TABLES}
        shadow = twin(preprocessor, tables)
        value = _called(shadow, data, training)
        written = {}
        for after, before in (
            (vars(shadow), vars(preprocessor)),
            (shadow._buffers, preprocessor._buffers),
        ):
            for name, each in after.items():
                if name not in _TABLES and before.get(name, _MISSING) is not each:
                    written[name] = each
        return SafeResult(value, written)

    def finish(self, preprocessor: nn.Module, begun: SafeResult, batch: Any, training: bool) -> Any:
        for name, value in begun.written.items():
            setattr(preprocessor, name, value)
        return begun.value

    def run(self, preprocessor: nn.Module, batch: Any, training: bool) -> Any:
        return _called(preprocessor, batch, training)  # it may work in place


def _called(preprocessor: nn.Module, data: Any, training: bool) -> Any:
    if _default_training(type(preprocessor)) is _MISSING:
        return preprocessor(data)  # a class of its own kind, which knows no training
    return preprocessor(data, training)


@cache
def _default_training(cls: type[nn.Module]) -> Any:
    """The default of ``training`` in a class's forward; missing where it takes the batch alone."""
    parameters = list(inspect.signature(cls.forward).parameters.values())[2:]
    for parameter in parameters:
        if parameter.name == 'training' and parameter.default is not parameter.empty:
            return parameter.default
    return False if parameters else _MISSING


def default_training(cls: type[nn.Module]) -> bool:
    """Tell what a call of a preprocessor without ``training`` means.

    Args:
        cls (type): The preprocessor's class.

    Returns:
        bool: The default in its ``forward``, False where it has none.
    """
    return _default_training(cls) is not _MISSING and bool(_default_training(cls))


TRANSFER, SAFE = TransferFamily(), SafeFamily()
