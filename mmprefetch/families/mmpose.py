# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessor of mmpose."""

from .mmengine import SuperFamily
from .registry import register_family


class PoseFamily(SuperFamily):
    """``PoseDataPreprocessor``: metainfo; batch augmentations when due."""

    augments = 'batch_augments'


def declare() -> None:
    """Declare the class of mmpose."""
    register_family('PoseDataPreprocessor', PoseFamily(), package='mmpose')
