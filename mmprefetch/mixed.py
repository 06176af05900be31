# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Mixed datasets: from which part each sample comes, and the constants of that part.

The parts of a concatenation may differ in mean, std and channel order. Which part a sample is
from follows from its index, and the indices of a batch are known where the sampler gives them
out, in the main process: datasets, pipelines and collate functions stay as they are.
"""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from .parts import inner_datasets, read_parts


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


class PartRecorder:
    """Stands in for a dataloader's batch sampler, and notes the parts of each batch's samples.

    Args:
        dataloader (DataLoader): The dataloader.
        split (str): 'train', 'val' or 'test', for errors.

    Raises:
        ValueError: The dataloader's batches do not follow from indices.
    """

    def __init__(self, dataloader: DataLoader, split: str) -> None:
        key = f'{split}_dataloader'
        sampler = getattr(dataloader, 'batch_sampler', None)
        if sampler is None or not getattr(dataloader, 'in_order', True):
            raise ValueError(
                f'{key}: its datasets differ in mean, std or channel order, which needs batches of '
                'a map-style dataset in the order of a batch sampler. Write a `batch_size` and '
                'leave `in_order=False` out, or give the datasets the same values.'
            )
        self._sampler = sampler
        self._find = part_finder(dataloader.dataset, f'{key}.dataset')
        self.latest: deque[list[int]] = deque()

    def __iter__(self) -> Iterator:
        notes = self.latest = deque()
        return self._noting(iter(self._sampler), notes)

    def _noting(self, batches: Iterator, notes: deque[list[int]]) -> Iterator:
        for indices in batches:
            notes.append([self._find(index) for index in indices])
            yield indices

    def __len__(self) -> int:
        return len(self._sampler)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampler, name)

    def iterate(self, dataloader: DataLoader) -> tuple[Iterator, deque[list[int]]]:
        """Begin a pass over the dataloader.

        Args:
            dataloader (DataLoader): The dataloader.

        Returns:
            tuple: Its iterator, and the parts of the batches to come, filled as they are asked
            for.
        """
        held = vars(dataloader)  # DataLoader refuses to have its sampler set
        before, held['batch_sampler'] = held['batch_sampler'], self
        try:
            iterator = iter(dataloader)
        finally:
            held['batch_sampler'] = before
        return iterator, self.latest


def next_noted(iterator: Iterator, notes: deque[list[int]] | None) -> Any:
    """Take a batch of a pass whose parts may be noted.

    Args:
        iterator (Iterator): The dataloader's, or from :meth:`PartRecorder.iterate`.
        notes (deque | None): The notes of that pass, None without any. Where an error comes in
            place of a batch, its note is taken away: whoever catches the error may go on.

    Returns:
        Any: The batch; its note is the first.
    """
    if notes is None:
        return next(iterator)
    received, noted = getattr(iterator, '_rcvd_idx', None), len(notes)
    try:
        return next(iterator)
    except BaseException:
        if received is None:  # its indices were drawn just now
            while len(notes) > noted:
                notes.pop()
        else:  # earlier, for a worker process
            for _ in range(iterator._rcvd_idx - received):
                notes.popleft()
        raise
