# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A device prefetcher and input preprocessor for mmengine. Importing it registers everything."""

try:
    import mmengine  # noqa: F401
except ImportError as error:
    raise ImportError(
        'mmprefetch needs mmengine, which is not installed. Install it with '
        '`pip install "mmengine>=0.10.7,<1.0.0"`, or `mim install mmengine`.'
    ) from error

from .checkpoints.restore import load_preprocessor
from .checkpoints.safe_loading import allow_checkpoint_types
from .config import enable_prefetch
from .data_preprocessor import PrefetchDataPreprocessor
from .deploy_config import deploy_config
from .hooks import PrefetchHook
from .loops import (
    PrefetchEpochBasedTrainLoop,
    PrefetchIterBasedTrainLoop,
    PrefetchLoop,
    PrefetchTestLoop,
    PrefetchValLoop,
)
from .own_loops import look_ahead
from .version import __version__

allow_checkpoint_types()

__all__ = [
    'PrefetchDataPreprocessor',
    'PrefetchEpochBasedTrainLoop',
    'PrefetchHook',
    'PrefetchIterBasedTrainLoop',
    'PrefetchLoop',
    'PrefetchTestLoop',
    'PrefetchValLoop',
    '__version__',
    'deploy_config',
    'enable_prefetch',
    'load_preprocessor',
    'look_ahead',
]
