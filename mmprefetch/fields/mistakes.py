# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Find what looks like a mistake among the preprocessor fields of a config."""

from collections.abc import Iterator
from typing import Any

import numpy as np
from mmengine.config import Config

from .binding import REVERSAL, Binding, plain
from .datasets import DatasetPart, FieldSource
from .resolve import not_normalised
from .sources import dropped_top_level, is_prefetch_loop

# Mean and std of the channels R, G, B of ImageNet's images, in which most pretrained weights trust.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)

# The datasets of each split, each with the fields that it gets.
Found = dict[str, list[tuple[DatasetPart, Binding]]]


def likely_mistakes(cfg: Config, sources: list[FieldSource], found: Found) -> Iterator[str]:
    """Name the fields that nothing reads, that differ between splits, or that do not fit images.

    Args:
        cfg (Config): The config.
        sources (list[FieldSource]): The places that hold for every split, lowest first.
        found (dict): The datasets of each split, each with the fields that it gets.

    Yields:
        str: A warning.
    """
    yield from _unread(cfg, sources, found)
    yield from _differing_splits(found)
    for bound in found.values():
        raw = not_normalised([binding for _, binding in bound])
        if raw is not None:
            yield raw
        for part, binding in bound:
            yield from _wrong_values(cfg, part, binding)


def _unread(cfg: Config, sources: list[FieldSource], found: Found) -> Iterator[str]:
    dropped = dropped_top_level(cfg)
    if dropped:
        yield dropped
    any_loop = any(map(is_prefetch_loop, map(cfg.get, ('train_cfg', 'val_cfg', 'test_cfg'))))
    for split, bound in found.items():
        dataloader = cfg[f'{split}_dataloader']
        if isinstance(dataloader, dict) and 'data_preprocessor' in dataloader:
            yield (
                f'{split}_dataloader.data_preprocessor: nothing reads it there; move it to '
                f'{split}_dataloader.dataset.data_preprocessor'
            )
        if not any_loop:
            # The loops bring the top level and the datasets' fields to the preprocessor.
            for source in [*sources[1:], *(source for part, _ in bound for source in part.sources)]:
                yield (
                    f"{source.key}: nothing reads it, since no loop is one of mmprefetch's; write "
                    "train_cfg=dict(type='PrefetchLoop', ...), or use enable_prefetch"
                )


def _differing_splits(found: Found) -> Iterator[str]:
    first = {split: bound[0][1] for split, bound in found.items() if bound}
    train = first.pop('train', None)
    for split, other in first.items() if train else ():
        for name, values in train.differences(other).items():
            if name == REVERSAL:
                a, b = ('reversed' if on else 'left as it is' for on in values)
            else:
                a, b = map(repr, values)
            yield f'train and {split} differ in {name}: {a} and {b}'


def _wrong_values(cfg: Config, part: DatasetPart, binding: Binding) -> Iterator[str]:
    mean, std = (plain(binding.value(name)) for name in ('mean', 'std'))
    if not isinstance(mean, list) or not isinstance(std, list):
        return
    if all(0 <= value <= 1 for value in mean) and all(0 < value < 1 for value in std):
        yield (
            f'{part.key}: mean={mean} and std={std} are for values of 0 to 1, decoded '
            'images hold 0 to 255; multiply both by 255'
        )
    of_mean = _imagenet_order(mean, IMAGENET_MEAN, 1.0)
    of_std = _imagenet_order(std, IMAGENET_STD, 0.3)
    if of_mean is None:
        return
    if of_std not in (None, of_mean):
        yield (
            f"{part.key}: mean={mean} is ImageNet's in {of_mean} order, std={std} in {of_std} "
            'order; reverse one of them'
        )
    dataloader = cfg[f'{binding.split}_dataloader']
    loaded = _loaded_order(dataloader['dataset'] if isinstance(dataloader, dict) else None)
    if loaded is None:
        return
    reverses = binding.reverses_channels
    arriving = loaded[::-1] if reverses else loaded
    if arriving != of_mean:
        said, switch = ('reverses them', 'off') if reverses else ('does not reverse them', 'on')
        yield (
            f"{part.key}: mean={mean} is ImageNet's in {of_mean} order, but it is subtracted from "
            f'channels in {arriving} order: images are decoded as {loaded} and the preprocessor '
            f'{said}; switch the reversal (bgr_to_rgb) {switch}, or reverse mean and std'
        )


def _imagenet_order(values: list, reference: tuple, tolerance: float) -> str | None:
    scale = 255 if all(abs(value) <= 1 for value in values) else 1
    values = [value * scale for value in values]
    for order, expected in (('RGB', reference), ('BGR', reference[::-1])):
        if len(values) == 3 and np.allclose(values, expected, rtol=0, atol=tolerance):
            return order
    return None


def _loaded_order(dataset: Any) -> str | None:
    """The channel order of a dataset's images, None where the config does not tell."""
    transforms = list(_dicts(dataset))
    if not transforms or any('to_rgb' in each or 'to_bgr' in each for each in transforms):
        return None
    orders = {each.get('channel_order', 'bgr') for each in transforms} - {'bgr'}
    return 'BGR' if not orders else 'RGB' if orders == {'rgb'} else None


def _dicts(node: Any) -> Iterator[dict]:
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key not in ('data_preprocessor', 'metainfo'):
                yield from _dicts(value)
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _dicts(item)
