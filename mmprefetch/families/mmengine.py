# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessors of mmengine, and classes that call their forward."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from torch import Tensor, nn

from .family import Family
from .fused import FusedFamily, twin
from .passes import fused, note_unscaled
from .registry import register_family
from .unfused import CastFamily


class AnyChannels(Family):
    """Builds classes that accept one or three values only, for any number of channels."""

    def make(self, cls: type[nn.Module], fields: dict) -> nn.Module:
        mean, std = fields.get('mean'), fields.get('std')
        if mean is None or std is None or {len(mean), len(std)} <= {1, 3}:
            made = super().make(cls, fields)
        else:
            made = cls(**{**fields, 'mean': None, 'std': None})
            made._enable_normalize = True
            made.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), False)
            made.register_buffer('std', torch.tensor(std).view(-1, 1, 1), False)
            note_unscaled(made, fields)
        made._any_channels = True
        return made


class ImgFamily(AnyChannels, FusedFamily):
    """:class:`ImgDataPreprocessor`."""

    trains_alike = True
    by_sample = True
    needs = ('_enable_normalize', '_channel_conversion', 'pad_size_divisor', 'pad_value')

    def pixels(self, preprocessor: nn.Module, data: dict, training: bool) -> Tensor | None:
        return fused(
            preprocessor,
            data['inputs'],
            reverse=preprocessor._channel_conversion,
            drops=True,
            size_divisor=preprocessor.pad_size_divisor,
            pad_value=preprocessor.pad_value,
        )

    def rest(self, preprocessor: nn.Module, data: dict, pixels: Tensor, training: bool) -> dict:
        return _with_pixels(data, pixels)


class SuperFamily(ImgFamily):
    """A class whose forward calls that of :class:`ImgDataPreprocessor`, and goes on from there.

    That one call answers with the fused pass's result. The class sees the images as they were, and
    may do with the result what it likes, which images without channels would not show.
    """

    trains_alike = False

    def rest(self, preprocessor: nn.Module, data: dict, pixels: Tensor, training: bool) -> Any:
        cls = _answering(type(preprocessor))
        return twin(preprocessor, {**self.off, '_pixels': pixels}, cls).forward(data, training)


class _Answer(ImgDataPreprocessor):
    def forward(self, data: dict, training: bool = False) -> dict:
        return _with_pixels(data, self._pixels)


@cache
def _answering(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass in which ``super().forward`` of the classes above ImgDataPreprocessor finds
    :class:`_Answer`."""
    return type(cls.__name__, (cls, _Answer), {})


def _with_pixels(data: dict, pixels: Tensor) -> dict:
    made = {**data, 'inputs': pixels}
    made.setdefault('data_samples', None)
    return made


def declare() -> None:
    """Declare the classes of mmengine."""
    register_family(BaseDataPreprocessor, CastFamily())
    register_family(ImgDataPreprocessor, ImgFamily())
