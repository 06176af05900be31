# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Measure the mean and std of a dataset's images, and write them into its config."""

from __future__ import annotations

import ast
import copy
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DATASETS, DefaultScope
from mmengine.utils import track_iter_progress
from torch.utils.data import DataLoader, Dataset

from ..fields.datasets import split_dataloader
from ..fields.explain import explain
from ..fields.locate import ConfigFile
from ..fields.resolve import CHANNEL_ORDER, same
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
        mean = [_rounded(value) for value in self._ordered(self.moments.mean)]
        std = [_rounded(value) or 1.0 for value in self._ordered(self.moments.std)]
        return dict(mean=mean, std=std)

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
    loader = DataLoader(
        _Images(dataset, indices), batch_size=None, num_workers=workers, collate_fn=_as_it_is
    )
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
        self.steps: list | None = None
        pipeline = getattr(dataset, 'pipeline', None)
        if pipeline is not None:
            steps = getattr(pipeline, 'transforms', pipeline)
            self.dataset = copy.copy(dataset)
            self.steps = [step for step in steps if _loads_images(step)]
            self.dataset.pipeline = Compose(self.steps)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[str, Moments | None, str]:
        index = self.indices[number]
        name = f'item {index}'
        # Whatever a reader raises, the image is named and the others are measured.
        try:
            if self.steps is not None and hasattr(self.dataset, 'get_data_info'):
                # Not the dataset's own item: it may put another in place of a broken one.
                item = self.dataset.get_data_info(index)
                name = str(item.get('img_path', name))
                item = self.dataset.pipeline(item)
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
    found = [item[key] for key in ('img', 'inputs') if key in item]
    if not found:
        raise ValueError(f"the item holds neither 'img' nor 'inputs', only {sorted(item)}")
    image = found[0]
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


def _as_it_is(item: Any) -> Any:
    return item


def _rounded(value: float) -> float:
    return float(f'{value:.{DIGITS}g}')


def write(results: Sequence[DatasetStatistics]) -> list[str]:
    """Write measured statistics over those in the config files that set them.

    Only the values are replaced; all else in the files stays, comments too.

    Args:
        results (Sequence[DatasetStatistics]): What :func:`measure_split` returned. All have
            moments.

    Returns:
        list[str]: Where values were replaced, as ``file:line``.

    Raises:
        ValueError: A dataset's mean or std is not written out as a list of numbers in a config
            file, or two datasets share it but were measured otherwise. No file is changed.
    """
    edits: dict[str, dict[tuple[int, int], tuple[ast.expr, str]]] = {}
    for result in results:
        for name, values in result.measured().items():
            path, node = _find_value(result, name)
            values = tuple(values) if isinstance(node, ast.Tuple) else values
            edit = (node, repr(values))
            known = edits.setdefault(path, {}).setdefault((node.lineno, node.col_offset), edit)
            if known[1] != edit[1]:
                raise ValueError(
                    f'{path}:{node.lineno}: this {name} holds for several datasets, of which '
                    f'{result.key} was measured as {edit[1]}, another as {known[1]}; write '
                    'data_preprocessor=dict(...) into the config of each'
                )
    for path, found in edits.items():
        _replace(Path(path), list(found.values()))
    return sorted({f'{path}:{line}' for path, found in edits.items() for line, _ in found})


def paste_place(result: DatasetStatistics, config: str) -> str:
    """Say where in a config the snippet of a dataset belongs.

    Args:
        result (DatasetStatistics): The measurement.
        config (str): The config's file.

    Returns:
        str: The config key, and the file and line that write its dataset out.
    """
    return f'{result.key} ({ConfigFile(config).locate(result.key)})'


def _find_value(result: DatasetStatistics, name: str) -> tuple[str, ast.expr]:
    """The file, and the expression in it, that sets a field of a dataset."""
    place = result.fields.get(name)
    if place is None or place['key'].split('.')[0] != result.key.split('.')[0]:
        raise ValueError(f'{result.key}: no {name} is bound to this dataset that could be replaced')
    path, _, line = str(place['file']).rpartition(':')
    nodes = []
    if path.endswith('.py') and line.isdigit():
        tree = ast.parse(Path(path).read_text(encoding='utf-8'))
        matches = partial(_sets, name=name, line=int(line), value=place['value'])
        nodes = [node for parent in ast.walk(tree) for node in _named(parent) if matches(*node)]
    if len(nodes) != 1:
        raise ValueError(
            f'{result.key}: {name} comes from {place["key"]} ({place["file"]}), where it is not '
            'written out as a list of numbers that could be replaced'
        )
    return path, nodes[0][1]


def _named(node: ast.AST) -> list[tuple[str | None, ast.expr]]:
    """The expressions that get a name at a node; None stands for any name."""
    if isinstance(node, ast.keyword):
        return [(node.arg, node.value)]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [(getattr(key, 'value', ''), value) for key, value in pairs]
    if isinstance(node, ast.Assign):
        # A variable that the field is set from may have any name.
        return [(None, node.value)]
    return []


def _sets(named: str | None, node: ast.expr, *, name: str, line: int, value: Any) -> bool:
    return named in (name, None) and node.lineno == line and same(_literal(node), value)


def _literal(node: ast.expr) -> Any:
    """The list of numbers that an expression writes out, None if it is something else."""
    repeated = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    try:
        if repeated:
            return ast.literal_eval(node.left) * ast.literal_eval(node.right)
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        return None


def _replace(path: Path, edits: list[tuple[ast.expr, str]]) -> None:
    # Bytes, since columns are counted in them, and to keep the file's line ends.
    lines = path.read_bytes().splitlines(keepends=True)
    for node, text in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset))[::-1]:
        before = lines[node.lineno - 1][: node.col_offset]
        after = lines[node.end_lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1 : node.end_lineno] = [before + text.encode() + after]
    path.write_bytes(b''.join(lines))
