# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessor of mmaction2."""

from __future__ import annotations

from mmengine.model import stack_batch
from torch import Tensor, nn

from .fused import StandInFamily, unchanged
from .mmpretrain import clips
from .passes import becomes_float
from .registry import register_family


class ActionFamily(StandInFamily):
    """``ActionDataPreprocessor``: stacks the clips first, mixes them when due."""

    off = dict(to_rgb=False, _enable_normalize=False, cast_data=unchanged)
    needs = ('format_shape',)
    augments = 'blending'

    def pixels(self, preprocessor: nn.Module, data: dict, training: bool) -> Tensor | None:
        videos = data['inputs']
        if type(videos) is not list or set(map(type, videos)) != {Tensor}:
            return None
        if preprocessor._enable_normalize and not becomes_float(preprocessor, videos[0].dtype):
            return None
        return clips(preprocessor, stack_batch(videos))


def declare() -> None:
    """Declare the class of mmaction2."""
    register_family('ActionDataPreprocessor', ActionFamily(), package='mmaction')
