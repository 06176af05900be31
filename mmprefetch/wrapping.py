# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A module that stands where another stood."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor
from torch import nn

_TABLES = ('_parameters', '_buffers', '_non_persistent_buffers_set', '_modules')


class WrappingPreprocessor(BaseDataPreprocessor):
    """Stands where the preprocessor that it wraps stood.

    It shares that module's parameter, buffer and submodule tables, so state dicts, devices and
    optimizers see no difference. Any attribute or method that is not its own is that of the
    effective preprocessor of the split that runs, so that a model which reads ``mean`` finds what
    its images were normalised with; where no split runs, as after training, it is the wrapped
    module's. Writing one reaches the wrapped module and those of all splits.
    """

    #: Names of attributes that belong to the wrapper itself.
    _OWN = frozenset({'_wrapped', '_of_split', '_ready', 'split', 'forward'})

    def _wrap(self, module: nn.Module) -> None:
        self.split: str | None = None
        self._of_split: dict[str, nn.Module] = {}
        # In a dict, since a module held as an attribute would be registered as a submodule.
        self._wrapped = {'module': module}
        for table in _TABLES:
            self.__dict__[table] = module.__dict__[table]
        self.__dict__['training'] = module.training
        self._ready = True

    @property
    def wrapped(self) -> nn.Module:
        """nn.Module: The wrapped preprocessor, as the model's config describes it."""
        return self._wrapped['module']

    def of_split(self, split: str | None) -> nn.Module:
        """The effective preprocessor of a split.

        Args:
            split (str | None): 'train', 'val' or 'test'.

        Returns:
            nn.Module: The wrapped preprocessor where the split has none of its own.
        """
        return self._of_split.get(split, self.wrapped)

    def bind(self, split: str, module: nn.Module) -> None:
        """Give a split an effective preprocessor of its own.

        Args:
            split (str): 'train', 'val' or 'test'.
            module (nn.Module): The preprocessor.
        """
        if isinstance(module, BaseDataPreprocessor):
            module._device = self.device
        module.to(self.device)  # some classes return another module
        self._of_split[split] = module

    @property
    def device(self) -> torch.device:
        """torch.device: Where the wrapped module's tensors are; some model wrappers move these
        without telling the preprocessor. Without any tensor, the device it was told."""
        for tensor in self._buffers.values():
            if tensor is not None:
                return tensor.device
        return getattr(self.wrapped, '_device', torch.device('cpu'))

    def _modules_held(self) -> list[nn.Module]:
        held = {id(module): module for module in (self.wrapped, *self._of_split.values())}
        return list(held.values())

    def __getattr__(self, name: str) -> Any:
        if name in type(self)._OWN:  # not set yet, as while unpickling
            raise AttributeError(name)
        return getattr(self.of_split(self.split), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in type(self)._OWN or name in _TABLES or '_ready' not in vars(self):
            super().__setattr__(name, value)
            return
        for module in self._modules_held():
            setattr(module, name, value)
        if name == 'training':
            self.__dict__['training'] = value

    def __delattr__(self, name: str) -> None:
        if name in type(self)._OWN:
            super().__delattr__(name)
            return
        for module in self._modules_held():
            delattr(module, name)

    def _apply(self, fn: Any, recurse: bool = True) -> WrappingPreprocessor:
        super()._apply(fn, recurse)
        for module in self._modules_held():
            if module is not self.wrapped:
                module._apply(fn, recurse)
        return self

    def _save_to_state_dict(self, destination: dict, prefix: str, keep_vars: bool) -> None:
        self.wrapped._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.wrapped._load_from_state_dict(*args, **kwargs)

    @property
    def cast_data(self) -> Callable[[Any], Any]:
        """Callable: That of the effective preprocessor: moves a batch to the device."""
        return self.of_split(self.split).cast_data
