# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What is known of preprocessor classes: which part of their work may run ahead.

A class that is not declared here is taken as impure: only its transfer runs ahead, and its own
``forward`` runs when the model asks for the batch.
"""

from __future__ import annotations

from typing import Any

import torch
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from torch import nn

from .ops import normalize_batch, reversal


class Family:
    """How a preprocessor class works on a batch that is on the device already.

    The result must be what the class's own ``forward`` returns, to the bit. It depends on the
    batch alone: no random numbers, no collectives, no host synchronisation, no iteration, and
    neither the ``training`` flag nor the thread's modes matter.
    """

    def make(self, cls: type[nn.Module], fields: dict) -> nn.Module:
        """Build the preprocessor.

        Args:
            cls (type): The preprocessor's class.
            fields (dict): Its arguments.

        Returns:
            nn.Module: The preprocessor.
        """
        return cls(**fields)

    def forward(self, preprocessor: nn.Module, data: dict) -> dict:
        """Preprocess a batch.

        Args:
            preprocessor (nn.Module): Holds the fields.
            data (dict): What ``cast_data`` returned.

        Returns:
            dict: What the preprocessor's ``forward`` returns.
        """
        raise NotImplementedError

    def made(self, data: Any) -> Any:
        """The part of a result that may hold memory of its own, beside what was transferred.

        Args:
            data (Any): What :meth:`forward` returned.

        Returns:
            Any: A part of it. The whole of it by default.
        """
        return data


class CastFamily(Family):
    """:class:`BaseDataPreprocessor` does nothing beyond the transfer."""

    def forward(self, preprocessor: nn.Module, data: dict) -> dict:
        return data

    def made(self, data: Any) -> Any:
        return None


class ImgFamily(Family):
    """:class:`ImgDataPreprocessor`, in one pass, and with any number of channels."""

    def make(self, cls: type[nn.Module], fields: dict) -> nn.Module:
        mean, std = fields.get('mean'), fields.get('std')
        if mean is None or std is None or len(mean) in (1, 3):
            made = cls(**fields)
        else:
            # The class accepts one or three values only; its attributes hold any number.
            made = cls(**{**fields, 'mean': None, 'std': None})
            made._enable_normalize = True
            made.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), False)
            made.register_buffer('std', torch.tensor(std).view(-1, 1, 1), False)
        made._any_channels = True
        return made

    def forward(self, preprocessor: nn.Module, data: dict) -> dict:
        images = data['inputs']
        if not self._takes(preprocessor, images):
            return preprocessor(data)
        normalize = preprocessor._enable_normalize
        data['inputs'] = normalize_batch(
            images,
            preprocessor.mean if normalize else None,
            preprocessor.std if normalize else None,
            channel_order=(
                reversal(images[0].shape[0]) if preprocessor._channel_conversion else None
            ),
            size_divisor=preprocessor.pad_size_divisor,
            pad_value=preprocessor.pad_value,
        )
        data.setdefault('data_samples', None)
        return data

    def made(self, data: Any) -> Any:
        return data['inputs']

    @staticmethod
    def _takes(preprocessor: nn.Module, images: Any) -> bool:
        """Whether the pass is for this input; else the class itself says what it makes of it."""
        if isinstance(images, torch.Tensor):
            return images.dim() == 4 and (
                getattr(preprocessor, '_any_channels', False) or images.shape[1] == 3
            )
        if not isinstance(images, list) or not images:
            return False
        first = images[0]
        return all(
            isinstance(image, torch.Tensor)
            and image.dim() == 3
            and image.dtype == first.dtype
            and image.shape[0] == first.shape[0]
            for image in images
        ) and (getattr(preprocessor, '_any_channels', False) or first.shape[0] == 3)


_FAMILIES: dict[type[nn.Module], Family] = {
    BaseDataPreprocessor: CastFamily(),
    ImgDataPreprocessor: ImgFamily(),
}


def family_of(cls: type[nn.Module]) -> Family | None:
    """Find what is declared of a preprocessor class.

    Args:
        cls (type): The class itself: a subclass may do anything, so it does not inherit the
            declaration.

    Returns:
        Family | None: The declaration, if there is one.
    """
    return _FAMILIES.get(cls)
