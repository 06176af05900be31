# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A class that pads images and labels in one place: it runs on images without channels."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .fused import FusedFamily, twin


class StandInFamily(FusedFamily):
    """Gives the class's own forward images of no channels instead of the fused pass's result.

    Such images have the sizes that labels are padded by and metainfo is made of, on the device
    that is right, but no pixels to copy.
    """

    def rest(self, preprocessor: nn.Module, data: dict, pixels: Tensor, training: bool) -> Any:
        attributes = dict(self.off)
        augments = getattr(preprocessor, self.augments) if self.augments else None
        if augments is not None:
            attributes[self.augments] = lambda _, *others: augments(pixels, *others)
        images = [self._without_pixels(image) for image in data['inputs']]
        result = twin(preprocessor, attributes).forward({**data, 'inputs': images}, training)
        if not result['inputs'].numel():  # nothing put the pixels in on the way
            result['inputs'] = pixels
        return result

    @staticmethod
    def _without_pixels(image: Tensor) -> Tensor:
        return image[:0].float()
