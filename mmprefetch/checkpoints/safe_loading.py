# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Let torch's safe checkpoint loader read the checkpoints that mmengine writes."""

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any

import numpy as np
import torch
from mmengine.config import ConfigDict
from mmengine.logging import HistoryBuffer
from mmengine.optim.scheduler.param_scheduler import OneCycleParamScheduler
from numpy._core import multiarray

# Pickle writes a method as a call of ``getattr``. These are the methods that mmengine's objects
# carry into a checkpoint: statistics of logged scalars, annealing of the one-cycle schedule.
_METHODS = {
    HistoryBuffer: ('min', 'max', 'current', 'mean'),
    OneCycleParamScheduler: ('_annealing_cos', '_annealing_linear'),
}

# Arrays and scalars that hold plain values: numbers, truth values and text. Object arrays are left
# out on purpose, since they can hold anything.
_VALUE_DTYPES = (
    *('bool', 'uint8', 'uint16', 'uint32', 'uint64', 'int8', 'int16', 'int32', 'int64'),
    *('float16', 'float32', 'float64', 'str'),
)


def _known_method(owner: Any, name: str) -> Callable:
    """Stand in for ``getattr`` while a checkpoint is read: with the real one, a crafted file could
    reach any attribute of any allowed object. This gives out the methods above and nothing else."""
    for known, names in _METHODS.items():
        if owner is known and name in names:
            return getattr(known, name)
    raise UnpicklingError(
        f'the checkpoint asks for attribute {name!r} of {owner!r}, which no checkpoint of mmengine '
        'does; it is not loaded'
    )


def checkpoint_types() -> list[Any]:
    """List what an mmengine checkpoint holds beyond what torch allows by itself.

    Returns:
        list: Classes, functions, and ``(object, pickled name)`` pairs, in the form that
        ``torch.serialization.add_safe_globals`` takes.
    """
    numpy_globals = [
        (function, f'{module}.{function.__name__}')
        for function in (multiarray._reconstruct, multiarray.scalar)
        # numpy < 2 wrote the second name, and checkpoints outlive it.
        for module in ('numpy._core.multiarray', 'numpy.core.multiarray')
    ]
    return [
        HistoryBuffer,
        OneCycleParamScheduler,
        (_known_method, 'builtins.getattr'),
        # A dict inside the dataset's metainfo comes from the config.
        ConfigDict,
        *numpy_globals,
        np.ndarray,
        np.dtype,
        *(type(np.dtype(name)) for name in _VALUE_DTYPES),
    ]


def allow_checkpoint_types() -> None:
    """Allow-list the types of an mmengine checkpoint for ``torch.load``.

    Since torch 2.6 ``torch.load`` refuses every class that it was not told of, and mmengine 0.10.7
    tells it of none, so that ``resume`` and ``load_from`` fail. The loader stays the safe one: a
    file that holds anything else is still refused. Statistics that were added through
    ``HistoryBuffer.register_statistics`` are functions of your own, which you allow-list yourself
    by ``torch.serialization.add_safe_globals``.
    """
    torch.serialization.add_safe_globals(checkpoint_types())
