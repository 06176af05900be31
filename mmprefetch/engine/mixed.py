# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Mixed datasets: from which part each sample comes, and the constants of that part.

The parts of a concatenation may differ in mean, std and channel order. Which part a sample is
from follows from its index. It travels with the sample: while a dataloader's iterator is made,
its dataset and collate function are wrapped.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader

from ..fields.datasets import inner_datasets, read_parts


@dataclass
class SampleConstants:
    """What each sample of a batch is normalised with.

    Args:
        values (torch.Tensor): float32, (2, N, C): means and standard deviations.
        reverse (list): N bools, whether the sample's channels are reversed.
    """

    values: torch.Tensor
    reverse: list[bool]

    def __len__(self) -> int:
        return len(self.reverse)


class PartConstants:
    """What the samples of each part are normalised with.

    Args:
        means (Sequence): For each part its mean; None: it is not normalised.
        stds (Sequence): For each part its std.
        reverse (Sequence): For each part whether its channels are reversed.
    """

    def __init__(
        self,
        means: Sequence[Sequence[float] | None],
        stds: Sequence[Sequence[float] | None],
        reverse: Sequence[bool],
    ) -> None:
        rows = [torch.tensor(row or [0.0], dtype=torch.float32) for row in means]
        scales = [torch.tensor(row or [1.0], dtype=torch.float32) for row in stds]
        channels = max(len(row) for row in (*rows, *scales))
        self._values = torch.stack(
            [torch.stack([row.expand(channels) for row in kind]) for kind in (rows, scales)]
        )
        self._reverse = list(reverse)

    def of(self, parts: Sequence[int]) -> SampleConstants:
        """Look the constants of a batch up.

        Args:
            parts (Sequence[int]): The part that each sample is from.

        Returns:
            SampleConstants: In the order of the samples, on the CPU.
        """
        chosen = self._values.index_select(1, torch.tensor(parts))
        return SampleConstants(chosen, [self._reverse[part] for part in parts])


def part_finder(dataset: Any, key: str) -> Callable[[int], int]:
    """Make a function that tells the part of a sample by its index.

    Args:
        dataset (Dataset): A built dataset with parts inside, at any depth.
        key (str): Its config key, for errors.

    Returns:
        Callable: Takes an index of ``dataset``, returns the number of the part, counted as
        :func:`read_parts` lists them.

    Raises:
        ValueError: A wrapper does not say which of its samples is which.
    """
    inner = [item for _, item in inner_datasets(dataset)]
    if not inner or len(read_parts(dataset)) == 1:
        return lambda index: 0
    finders = [part_finder(item, f'{key}.{n}') for n, item in enumerate(inner)]
    if hasattr(dataset, 'cumulative_sizes') and len(inner) == len(dataset.cumulative_sizes):
        ends = [0, *dataset.cumulative_sizes]
        counts = [0]
        for item in inner:
            counts.append(counts[-1] + len(read_parts(item)))

        def in_concatenation(index: int) -> int:
            place = bisect.bisect_right(ends, index) - 1
            return counts[place] + finders[place](index - ends[place])

        return in_concatenation
    if len(inner) == 1:
        if hasattr(dataset, '_get_ori_dataset_idx'):
            return lambda index: finders[0](dataset._get_ori_dataset_idx(index))
        if isinstance(getattr(dataset, 'indices', None), Sequence):
            return lambda index: finders[0](dataset.indices[index])
        if type(dataset).__name__ == '_SlicedDataset':
            return finders[0]
    raise ValueError(
        f'{key}: {type(dataset).__name__} does not say from which of the datasets inside a sample '
        'comes, and these differ in mean, std or channel order. Give the wrapper a method '
        '`_get_ori_dataset_idx(idx)` that returns the index in its dataset, as those of mmengine '
        'have, or give its datasets the same values.'
    )


class TaggedBatch(NamedTuple):
    """A batch, and the part of the mixed dataset that each of its samples is from."""

    batch: Any
    parts: list[int]


class _TaggedDataset:
    """Gives out each item with its part. All else is the dataset's own.

    Args:
        dataset (Dataset): A map-style dataset with parts inside.
        key (str): Its config key, for errors.
    """

    def __init__(self, dataset: Any, key: str) -> None:
        self._dataset = dataset
        self._key = key
        self._find = part_finder(dataset, key)

    def __reduce__(self) -> tuple:
        return (_TaggedDataset, (self._dataset, self._key))

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        return self._dataset[index], self._find(index)

    def __getattr__(self, name: str) -> Any:
        if name == '_dataset':  # not set yet, as while unpickling
            raise AttributeError(name)
        value = getattr(self._dataset, name)
        if name == '__getitems__' and value:
            return lambda indices: list(zip(value(indices), map(self._find, indices)))  # noqa: B905
        return value


class _TaggedCollate:
    """Collates the items as the dataloader's own function does, and passes the parts on.

    Args:
        collate (Callable): The dataloader's own.
    """

    def __init__(self, collate: Callable) -> None:
        self._collate = collate

    def __call__(self, tagged: list[tuple[Any, int]]) -> TaggedBatch:
        return TaggedBatch(
            self._collate([item for item, _ in tagged]), [part for _, part in tagged]
        )


class TaggedLoader:
    """Iterates over a dataloader in a way that the parts of its samples travel with each batch.

    Args:
        dataloader (DataLoader): The dataloader.
        split (str): 'train', 'val' or 'test', for errors.

    Raises:
        ValueError: The dataloader's batches do not follow from indices.
    """

    def __init__(self, dataloader: DataLoader, split: str) -> None:
        if getattr(dataloader, 'batch_sampler', None) is None:
            raise ValueError(
                f'{split}_dataloader: its datasets differ in mean, std or channel order, which '
                'needs batches of a map-style dataset. Write a `batch_size`, or give the datasets '
                'the same values.'
            )
        self._dataloader = dataloader
        self._dataset = _TaggedDataset(dataloader.dataset, f'{split}_dataloader.dataset')

    def __iter__(self) -> Iterator[TaggedBatch]:
        held = vars(self._dataloader)  # DataLoader refuses to have its dataset set
        before = {name: held[name] for name in ('dataset', 'collate_fn')}
        held.update(dataset=self._dataset, collate_fn=_TaggedCollate(held['collate_fn']))
        try:
            return iter(self._dataloader)
        finally:
            held.update(before)
