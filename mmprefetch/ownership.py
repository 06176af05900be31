# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Give a batch memory of its own.

Without worker processes a dataset may hand out views of memory that its next item overwrites.
Under mmengine's loops the step is over by then; with look-ahead it is not, nor have the hooks and
metrics seen the batch. So each batch that is loaded early gets memory of its own.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from mmengine.structures import BaseDataElement

from .elements import is_ordinary, new_like
from .packing import copy_by_to


def own_memory(batch: Any) -> Any:
    """Copy a batch's tensors and arrays, and what holds them.

    Args:
        batch (Any): A batch as the collate function made it.

    Returns:
        Any: A batch of the same types and values that shares no tensor or array with it. Objects
        that hold neither stay the same objects.
    """
    if isinstance(batch, torch.Tensor):
        # Strides are kept, since they may decide which kernel works on the tensor.
        return batch.detach().clone().requires_grad_(batch.requires_grad)
    if isinstance(batch, np.ndarray):
        # An array of objects holds references, which may lead to such memory as well.
        return copy.deepcopy(batch) if batch.dtype == object else batch.copy(order='K')
    if isinstance(batch, MutableMapping):
        owned = copy.copy(batch)
        for key in batch:
            owned[key] = own_memory(batch[key])
        return owned
    if isinstance(batch, Mapping):
        return {key: own_memory(batch[key]) for key in batch}
    if isinstance(batch, list):
        owned = copy.copy(batch)
        owned[:] = map(own_memory, batch)
        return owned
    if isinstance(batch, tuple):
        items = map(own_memory, batch)
        return type(batch)(*items) if hasattr(batch, '_fields') else type(batch)(items)
    if isinstance(batch, BaseDataElement) and is_ordinary(type(batch)):
        owned, fields = new_like(batch)
        for name in batch._data_fields & fields.keys():
            fields[name] = own_memory(fields[name])
        return owned
    if hasattr(batch, 'to'):
        try:
            return copy.deepcopy(batch)
        except TypeError:  # it holds what cannot be copied, such as a lock
            return copy_by_to(batch)
    if isinstance(batch, Sequence) and not isinstance(batch, (str, bytes)):
        return type(batch)(map(own_memory, batch))
    if isinstance(batch, (set, frozenset)):
        return type(batch)(map(own_memory, batch))
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        owned = copy.copy(batch)
        for field in dataclasses.fields(batch):
            object.__setattr__(owned, field.name, own_memory(getattr(batch, field.name)))
        return owned
    return batch
