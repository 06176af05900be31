# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessor of mmsegmentation."""

from __future__ import annotations

from torch import Tensor, nn

from .fused import StandInFamily, unchanged
from .passes import fused
from .registry import register_family


class SegFamily(StandInFamily):
    """``SegDataPreProcessor``: pads the label maps with the images, writes the metainfo."""

    by_sample = True

    off = dict(channel_conversion=False, _enable_normalize=False, cast_data=unchanged)
    needs = ('size', 'size_divisor', 'pad_val', 'test_cfg')
    augments = 'batch_augments'

    def pixels(self, preprocessor: nn.Module, data: dict, training: bool) -> Tensor | None:
        padding = vars(preprocessor) if training else preprocessor.test_cfg or {}
        size, divisor = padding.get('size'), padding.get('size_divisor')
        if (training or preprocessor.test_cfg) and (size is None) == (divisor is None):
            return None  # an error of the class's own
        return fused(
            preprocessor,
            data['inputs'],
            reverse=preprocessor.channel_conversion,
            size=None if size is None else (size[-2], size[-1]),
            size_divisor=max(divisor or 1, 1),
            pad_value=preprocessor.pad_val,
        )


def declare() -> None:
    """Declare the class of mmsegmentation."""
    register_family('SegDataPreProcessor', SegFamily(), package='mmseg')
