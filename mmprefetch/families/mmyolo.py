# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessor of mmyolo that takes batches whose boxes are packed into one tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .fused import FusedFamily
from .mmdet import DetFamily
from .passes import becomes_float, fused
from .registry import register_family


class PackedDetFamily(DetFamily):
    """``YOLOv5DetDataPreprocessor``: a pass of its own in training, mmdet's otherwise."""

    off = dict(_channel_conversion=False, _enable_normalize=False)

    def pixels(self, preprocessor: nn.Module, data: dict, training: bool) -> Tensor | None:
        if not training:
            return super().pixels(preprocessor, data, training)
        images = data['inputs']
        # It leaves the dtype as it is where nothing is to be normalised, and does not pad.
        if (
            type(images) is not Tensor
            or not preprocessor._enable_normalize
            or not becomes_float(preprocessor, images.dtype)
        ):
            return None
        return fused(preprocessor, images, reverse=preprocessor._channel_conversion)

    def rest(self, preprocessor: nn.Module, data: dict, pixels: Tensor, training: bool) -> Any:
        kind = FusedFamily if training else DetFamily
        return kind.rest(self, preprocessor, data, pixels, training)


def declare() -> None:
    """Declare the class of mmyolo."""
    register_family('YOLOv5DetDataPreprocessor', PackedDetFamily(), package='mmyolo')
