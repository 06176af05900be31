# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Measure the mean and std of a dataset's images."""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DATASETS, DefaultScope
from mmengine.utils import track_iter_progress
from torch.utils.data import DataLoader, Dataset

from ..fields.binding import CHANNEL_ORDER
from ..fields.datasets import split_dataloader
from ..fields.explain import explain
from ..ops import reversal
from .moments import Moments

DIGITS = 6
# Annotations are not needed, and may be larger than the images.
LOADING, NOT_LOADING = 'Load', ('Annotation', 'Proposal')


@dataclass
class DatasetStatistics:
    """What was measured of one dataset.

    Attributes:
        key (str): The config key of the dataset.
        type_name (str): The name of its class.
        moments (Moments, optional): Of its images' channels, in the order in which the images are
            decoded; None if no image could be read.
        images (int): How many images that is of.
        dtypes (list[str]): The types of their pixels.
        failures (list[tuple[str, str]]): The file and the reason, for each image that could not
            be read.
        fields (dict[str, dict]): The preprocessor fields that the config binds to the dataset, as
            :func:`~mmprefetch.fields.explain.explain` gives them.
    """

    key: str
    type_name: str
    moments: Moments | None = None
    images: int = 0
    dtypes: list[str] = field(default_factory=list)
    failures: list[tuple[str, str]] = field(default_factory=list)
    fields: dict[str, dict] = field(default_factory=dict)

    @property
    def reversed_by(self) -> str | None:
        """str | None: The field that makes the preprocessor reverse the channels, if one does."""
        on = (name for name in CHANNEL_ORDER if self.fields.get(name, {}).get('value'))
        return next(on, None)

    @property
    def constant(self) -> list[int]:
        """list[int]: The channels, in the preprocessor's order, that hold one value only."""
        return [index for index, std in enumerate(self._ordered(self.moments.std)) if std == 0]

    def measured(self) -> dict[str, list[float]]:
        """Round the statistics, in the order that the preprocessor brings the channels to.

        Returns:
            dict[str, list[float]]: ``mean`` and ``std``, one value for each channel. The std of a
            channel that holds one value only is given as 1, since images are divided by it.
        """
        mean, std = (
            [float(f'{value:.{DIGITS}g}') for value in self._ordered(values)]
            for values in (self.moments.mean, self.moments.std)
        )
        return dict(mean=mean, std=[value or 1.0 for value in std])

    def snippet(self) -> str:
        """Write the statistics as they go into the dataset's config.

        Returns:
            str: One line of Python, without line end.
        """
        fields = [f'{name}={values!r}' for name, values in self.measured().items()]
        # That channels stay as they are is said too: the model may reverse them.
        order = self.reversed_by or next(
            (name for name in CHANNEL_ORDER if name in self.fields), ''
        )
        if order:
            fields.append(f'{order}={bool(self.reversed_by)}')
        return f'data_preprocessor=dict({", ".join(fields)})'

    def _ordered(self, values: Sequence) -> list[float]:
        order = reversal(len(values)) if self.reversed_by else None
        return [float(values[index]) for index in order or range(len(values))]


def measure_split(
    cfg: Config,
    split: str = 'train',
    max_images: int | None = None,
    workers: int | None = None,
    options: Iterable[str] = (),
) -> list[DatasetStatistics]:
    """Measure each dataset of a split over the images that it decodes.

    Of the datasets' pipelines only the steps that load images are run. What wrappers do (repeating
    a dataset, or drawing more of some classes) is left out: each dataset is measured on its own.

    Args:
        cfg (Config): The config.
        split (str): 'train', 'val' or 'test'. Defaults to 'train'.
        max_images (int, optional): Measure at most so many images of each dataset, evenly spread
            over it. Defaults to None, for all.
        workers (int, optional): Worker processes. Defaults to the dataloader's ``num_workers``.
        options (Iterable[str]): The config keys that were set on the command line.

    Returns:
        list[DatasetStatistics]: One for each dataset that is not a wrapper of others.

    Raises:
        ValueError: The config has no dataloader for the split, or its preprocessor fields do not
            fit each other.
    """
    name = f'{split}_dataloader'
    if cfg.get(name) is None:
        found = [key for key in cfg if key.endswith('_dataloader') and cfg[key] is not None]
        raise ValueError(f'the config has no {name}; it has: {", ".join(found) or "none"}')
    dataloader, _ = split_dataloader(cfg[name], name)
    if workers is None:
        built = not isinstance(dataloader, Mapping)
        workers = dataloader.num_workers if built else dataloader.get('num_workers', 0)
    results = []
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
        for group in explain(cfg, options)['splits'][split]:
            for part in group['datasets']:
                dataset = _build(dataloader, part['key'].split('.')[1:])
                result = measure(dataset, max_images, workers)
                result.key, result.type_name = part['key'], part['type']
                result.fields = group['fields']
                results.append(result)
    return results


def measure(dataset: Any, max_images: int | None = None, workers: int = 0) -> DatasetStatistics:
    """Measure a dataset over the images that it decodes.

    Args:
        dataset (Dataset): A dataset. Of its ``pipeline``, if it has one, only the steps that load
            images are run. Its items are dicts that hold the image as ``img``, an array of shape
            (H, W) or (H, W, C), or as ``inputs``, a (C, H, W) tensor, of integers or floats.
        max_images (int, optional): Measure at most so many images, evenly spread over the dataset.
            Defaults to None, for all.
        workers (int): Worker processes; the result is the same to the bit with any number of them.
            Defaults to 0.

    Returns:
        DatasetStatistics: The measurement.
    """
    if hasattr(dataset, 'full_init'):
        dataset.full_init()
    length = len(dataset)
    count = length if max_images is None else min(max_images, length)
    indices = [number * length // count for number in range(count)]
    # One image at a time, and in order: what is merged doesn't depend on the number of workers.
    loader = DataLoader(_Images(dataset, indices), batch_size=None, num_workers=workers)
    result = DatasetStatistics('dataset', type(dataset).__name__)
    for name, moments, said in track_iter_progress((loader, count), file=sys.stderr):
        if moments is None:
            result.failures.append((name, said))
        elif result.moments is not None and len(moments.mean) != len(result.moments.mean):
            found = f'{len(moments.mean)} channels, those before it have {len(result.moments.mean)}'
            result.failures.append((name, found))
        else:
            result.moments = moments if result.moments is None else result.moments.merge(moments)
            result.images += 1
            if said not in result.dtypes:
                result.dtypes.append(said)
    return result


class _Images(Dataset):
    """The measured images of a dataset: (name, moments, dtype), or (name, None, reason)."""

    def __init__(self, dataset: Any, indices: Sequence[int]) -> None:
        self.indices = indices
        self.dataset = dataset
        self.pipeline = getattr(dataset, 'pipeline', None)
        if self.pipeline is not None:
            steps = getattr(self.pipeline, 'transforms', self.pipeline)
            self.pipeline = Compose([step for step in steps if _loads_images(step)])
            self.dataset = copy.copy(dataset)
            self.dataset.pipeline = self.pipeline

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[str, Moments | None, str]:
        index = self.indices[number]
        name = f'item {index}'
        # Whatever a reader raises, the image is named and the others are measured.
        try:
            if self.pipeline is not None and hasattr(self.dataset, 'get_data_info'):
                # Not the dataset's own item: it may put another in place of a broken one.
                item = self.dataset.get_data_info(index)
                name = str(item.get('img_path', name))
                item = self.pipeline(item)
            else:
                item = self.dataset[index]
            image = _image(item)
            return name, Moments.of(image), str(image.dtype)
        except Exception as error:
            return name, None, f'{type(error).__name__}: {error}'


def _loads_images(step: Any) -> bool:
    name = type(step).__name__
    return name.startswith(LOADING) and not any(word in name for word in NOT_LOADING)


def _image(item: Any) -> np.ndarray:
    """The image of an item, channels first."""
    if item is None:
        raise ValueError('the loading steps of the pipeline gave nothing')
    key = next((key for key in ('img', 'inputs') if key in item), None)
    if key is None:
        raise ValueError(f"the item holds neither 'img' nor 'inputs', only {sorted(item)}")
    image = item[key]
    if isinstance(image, torch.Tensor):
        return image.numpy()
    image = np.asarray(image)
    return image[None] if image.ndim == 2 else np.moveaxis(image, -1, 0)


def _build(dataloader: Any, names: Sequence[str]) -> Any:
    """Build the dataset at a key below a dataloader's config, without the wrappers around it."""
    node, scope = dataloader, None
    for name in names:
        if isinstance(node, Mapping):
            scope = node.get('_scope_', scope)
            node = node[name]
        else:
            node = node[int(name)] if name.isdigit() else getattr(node, name)
    if not isinstance(node, Mapping):
        return node
    scoped = node if scope is None else {'_scope_': scope, **node}
    return DATASETS.build(scoped)
