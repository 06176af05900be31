# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The first run: an image folder, a small classifier and its accuracy. This part needs mmcv."""

try:
    import mmcv  # noqa: F401
except ImportError as error:
    raise ImportError(
        'mmprefetch.demo reads images through mmcv, which is not installed. Install it with '
        '`pip install mmcv-lite`, or the mmcv package that belongs to your mmengine.'
    ) from error

from mmprefetch.demo.accuracy import TopOneAccuracy
from mmprefetch.demo.classifier import SimpleClassifier
from mmprefetch.demo.image_folder import ImageFolderDataset
from mmprefetch.demo.pack_inputs import PackImageInputs

__all__ = ['ImageFolderDataset', 'PackImageInputs', 'SimpleClassifier', 'TopOneAccuracy']
