# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Mean and standard deviation of the channels of many images, one image at a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

# Integers of these types are counted, one bin for each value.
COUNTED = (np.dtype(np.uint8), np.dtype(np.uint16))


@dataclass(frozen=True)
class Moments:
    """The first two moments of each channel's pixels.

    Of uint8 and uint16 images they are exact, so that the order of merging makes no difference.
    Of others they are float64, merged by Chan's formula, which loses nothing to cancellation.

    Attributes:
        count (int): Pixels of each channel.
        mean (tuple[Fraction | float, ...]): Their mean, one value for each channel.
        squares (tuple[Fraction | float, ...]): Sum of their squared distances from that mean.
    """

    count: int
    mean: tuple[Fraction | float, ...]
    squares: tuple[Fraction | float, ...]

    @classmethod
    def of(cls, image: np.ndarray) -> Moments:
        """Measure one image.

        Args:
            image (np.ndarray): Shape (C, H, W), of integers or floats.

        Returns:
            Moments: Its moments.

        Raises:
            ValueError: The image has another number of axes, holds no pixels, or holds values that
                are no finite numbers.
        """
        if image.ndim != 3 or not image.size:
            raise ValueError(f'an image of shape (C, H, W) is expected, found {image.shape}')
        if image.dtype.kind not in 'iuf':
            raise ValueError(f'an image of integers or floats is expected, found {image.dtype}')
        pixels = image.reshape(len(image), -1)
        count = pixels.shape[1]
        if image.dtype in COUNTED:
            mean, squares = zip(*map(_counted, pixels), strict=True)
            return cls(count, mean, squares)
        pixels = pixels.astype(np.float64)
        if not np.isfinite(pixels).all():
            raise ValueError('the image holds values that are not finite')
        mean = pixels.mean(axis=1)
        squares = np.square(pixels - mean[:, None]).sum(axis=1)
        return cls(count, tuple(mean.tolist()), tuple(squares.tolist()))

    def merge(self, other: Moments) -> Moments:
        """Take the pixels of two sets of images together.

        Args:
            other (Moments): Of as many channels.

        Returns:
            Moments: Of both.
        """
        count = self.count + other.count
        part = Fraction(other.count, count)
        moved = [b - a for a, b in zip(self.mean, other.mean, strict=True)]
        return Moments(
            count,
            tuple(mean + by * part for mean, by in zip(self.mean, moved, strict=True)),
            tuple(
                a + b + by * by * (self.count * part)
                for a, b, by in zip(self.squares, other.squares, moved, strict=True)
            ),
        )

    @property
    def std(self) -> tuple[float, ...]:
        """tuple[float, ...]: The population standard deviation of each channel."""
        return tuple(math.sqrt(squares / self.count) for squares in self.squares)


def _counted(pixels: np.ndarray) -> tuple[Fraction, Fraction]:
    """The exact mean, and sum of squared distances from it, of a channel's histogram."""
    values = np.arange(np.iinfo(pixels.dtype).max + 1)
    histogram = np.bincount(pixels, minlength=len(values))
    total = int(histogram @ values)
    squares = int(histogram @ values**2)
    return Fraction(total, pixels.size), squares - Fraction(total * total, pixels.size)
