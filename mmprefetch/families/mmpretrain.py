# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessors of mmpretrain."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .fused import FusedFamily, unchanged
from .mmengine import AnyChannels
from .passes import fused, laid_out_as_usual
from .registry import register_family


class ClsFamily(FusedFamily):
    """``ClsDataPreprocessor``: label packing and one-hot scores; mixup and its like when due."""

    by_sample = True

    off = dict(to_rgb=False, _enable_normalize=False, pad_size_divisor=1)
    needs = ('pad_value',)
    augments = 'batch_augments'
    writes = True

    def pixels(self, preprocessor: nn.Module, data: dict, training: bool) -> Tensor | None:
        return padded(preprocessor, data['inputs'])


def padded(preprocessor: nn.Module, images: Any) -> Tensor | None:
    """Run the fused pass over images, and pad them.

    Args:
        preprocessor (nn.Module): Holds the fields.
        images (Any): Whatever a batch holds as ``inputs``.

    Returns:
        Tensor | None: The float32 batch; None if it is not one for the pass.
    """
    return fused(
        preprocessor,
        images,
        reverse=preprocessor.to_rgb,
        size_divisor=preprocessor.pad_size_divisor,
        pad_value=preprocessor.pad_value,
    )


class ViewsFamily(FusedFamily):
    """Views of images in a list, each worked on by itself, or a single one."""

    off = dict(_channel_conversion=False, _enable_normalize=False, cast_data=unchanged)
    trains_alike = True

    def pixels(self, preprocessor: nn.Module, data: dict, training: bool) -> Any:
        if next(iter(data)) != 'inputs':  # the classes take the values by position
            return None
        views = data['inputs']
        if type(views) is Tensor:
            return self.view(preprocessor, views, 0)
        if type(views) is not list or set(map(type, views)) != {Tensor}:
            return None
        made = [self.view(preprocessor, view, index) for index, view in enumerate(views)]
        return None if any(view is None for view in made) else made

    def view(self, preprocessor: nn.Module, view: Tensor, index: int) -> Tensor | None:
        """Run the fused pass over one view.

        Args:
            preprocessor (nn.Module): Holds the fields.
            view (Tensor): (N, C, H, W).
            index (int): Its place in the list.

        Returns:
            Tensor | None: The float32 view, None if it is not one for the pass.
        """
        raise NotImplementedError


class SelfSupFamily(AnyChannels, ViewsFamily):
    """``SelfSupDataPreprocessor``: all views with the same constants."""

    def view(self, preprocessor: nn.Module, view: Tensor, index: int) -> Tensor | None:
        return fused(preprocessor, view, reverse=preprocessor._channel_conversion, drops=True)


class TwoNormFamily(ViewsFamily):
    """``TwoNormDataPreprocessor``: the second view, the target, has constants of its own."""

    def pixels(self, preprocessor: nn.Module, data: dict, training: bool) -> Any:
        views = data['inputs']
        # Given a tensor, the class takes it apart.
        if type(views) is not list or (preprocessor._enable_normalize and len(views) != 2):
            return None
        return super().pixels(preprocessor, data, training)

    def view(self, preprocessor: nn.Module, view: Tensor, index: int) -> Tensor | None:
        return fused(
            preprocessor,
            view,
            reverse=preprocessor._channel_conversion,
            drops=True,
            names=('second_mean', 'second_std') if index else ('mean', 'std'),
        )


class VideoFamily(ViewsFamily):
    """``VideoDataPreprocessor``: clips of any leading dimensions, in a list or stacked."""

    off = dict(to_rgb=False, _enable_normalize=False, cast_data=unchanged)
    needs = ('format_shape',)

    def view(self, preprocessor: nn.Module, view: Tensor, index: int) -> Tensor | None:
        return clips(preprocessor, view)


def clips(preprocessor: nn.Module, video: Tensor) -> Tensor | None:
    """Run the fused pass over clips.

    Args:
        preprocessor (nn.Module): Holds ``format_shape``: 'NCHW' or 'NCTHW'.
        video (Tensor): (..., C, H, W) or (..., C, T, H, W) tensor.

    Returns:
        Tensor | None: The float32 clips in the same shape; None if they are none.
    """
    dims = {'NCHW': 3, 'NCTHW': 4}.get(preprocessor.format_shape)
    if dims is None or video.dim() < dims or not video.numel() or not laid_out_as_usual(video):
        return None
    made = fused(
        preprocessor,
        video.reshape(-1, *video.shape[-dims:]),
        reverse=preprocessor.to_rgb,
        drops=True,
        dims=dims,
    )
    return None if made is None else made.view(video.shape)


class MultiModalFamily(ViewsFamily):
    """``MultiModalDataPreprocessor``: images, or a list of frames that it stacks."""

    off = dict(to_rgb=False, _enable_normalize=False, pad_size_divisor=1, cast_data=unchanged)
    needs = ('pad_value',)

    def view(self, preprocessor: nn.Module, view: Tensor, index: int) -> Tensor | None:
        return padded(preprocessor, view)


def declare() -> None:
    """Declare the classes of mmpretrain."""
    for name, family in (
        ('ClsDataPreprocessor', ClsFamily()),
        ('SelfSupDataPreprocessor', SelfSupFamily()),
        ('TwoNormDataPreprocessor', TwoNormFamily()),
        ('VideoDataPreprocessor', VideoFamily()),
        ('MultiModalDataPreprocessor', MultiModalFamily()),
    ):
        register_family(name, family, package='mmpretrain')
