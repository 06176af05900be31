# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Look-ahead for loops of one's own: another package's, or a plain PyTorch loop."""

from __future__ import annotations

from collections.abc import Iterable

from .config import check_depth
from .data_preprocessor import PrefetchDataPreprocessor
from .engine import LookAheadLoader


def look_ahead(
    dataloader: Iterable,
    preprocessor: PrefetchDataPreprocessor,
    split: str = 'train',
    depth: int = 2,
    loader_thread: bool | None = None,
) -> LookAheadLoader:
    """Give any loop look-ahead: iterate over what this returns instead of over the dataloader.

    A plain PyTorch loop:

        >>> preprocessor = PrefetchDataPreprocessor(mean=mean, std=std).to(device)
        >>> for batch in look_ahead(dataloader, preprocessor):
        ...     data = preprocessor(batch, True)

    A loop of mmengine's kind, in its ``__init__``, with a model whose config has
    ``data_preprocessor=dict(type='PrefetchDataPreprocessor', ...)``:

        >>> self.dataloader = look_ahead(self.dataloader, runner.model.data_preprocessor)

    Threads and workers of a pass end when it is over, or when whoever iterates drops it.

    Args:
        dataloader (Iterable): Usually a :class:`torch.utils.data.DataLoader`. Its batches are
            handed out as they are, in its order.
        preprocessor (PrefetchDataPreprocessor): The one that the loop, or its model, calls with
            each batch.
        split (str): 'train', 'val' or 'test', whose fields are used. Defaults to 'train'.
        depth (int): Batches in flight ahead of the one in use; 0 turns look-ahead off. Defaults
            to 2.
        loader_thread (bool, optional): Whether to load in a thread of its own, which look-ahead
            needs. None: where the dataloader has worker processes. True: always; without workers
            the dataset's code then runs in that thread. Defaults to None.

    Returns:
        LookAheadLoader: Stands in for the dataloader; all of its attributes are the dataloader's.
        ``close()`` ends what it has running.

    Raises:
        TypeError: ``preprocessor`` is not a PrefetchDataPreprocessor, or ``depth`` not an int.
        ValueError: ``depth`` is negative.
    """
    if not isinstance(preprocessor, PrefetchDataPreprocessor):
        name = type(preprocessor).__name__
        raise TypeError(
            f'look_ahead: preprocessor is a {name}; wrap it once, where the model holds it: '
            'model.data_preprocessor = '
            'PrefetchDataPreprocessor.around(model.data_preprocessor)'
        )
    check_depth('depth', depth)
    return LookAheadLoader(
        dataloader, preprocessor, split, depth, loader_thread, preprocessor.is_mixed(split)
    )
