# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Sections of a staging buffer: where tensors lie, and how they are viewed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

ALIGNMENT = 64
"""Bytes. Every tensor starts at a multiple of it, so that any dtype can be viewed and vector
loads are aligned."""

Place = tuple[Any, Any]
"""A container (dict or list) and the key or index at which a tensor of the result belongs."""

Entry = tuple[torch.Tensor, Place]

_MANY = 4
"""Tensors of one shape from which on a call for all of them beats calls for each."""


class Section:
    """A stretch of the buffer that holds tensors of one dtype.

    Args:
        entries (list): The tensors, with the places they belong at.
        start (int): The byte where the stretch begins.
    """

    def __init__(self, entries: list[Entry], start: int) -> None:
        self.tensors = [tensor for tensor, _ in entries]
        self.places = [place for _, place in entries]
        self.dtype = self.tensors[0].dtype
        self.start = start
        self.stop = start

    def views(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        """View the tensors in a buffer.

        Args:
            buffer (torch.Tensor): uint8, the whole buffer or a copy of it.

        Returns:
            Sequence[torch.Tensor]: One view for each place.
        """
        raise NotImplementedError

    def _flat(self, buffer: torch.Tensor) -> torch.Tensor:
        return buffer[self.start : self.stop].view(self.dtype)


class UniformSection(Section):
    """Contiguous tensors of one shape, at one distance: one call makes all views."""

    def __init__(self, entries: list[Entry], start: int) -> None:
        super().__init__(entries, start)
        first = self.tensors[0]
        distance = first.numel() + _padding(first)
        self._shape = (len(entries), *first.shape)
        self._strides = (distance, *first.stride())
        self.stop = start + len(entries) * distance * first.itemsize

    def views(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._flat(buffer).as_strided(self._shape, self._strides).unbind()


class MixedSection(Section):
    """Tensors of any shapes, split off one by one."""

    def __init__(self, entries: list[Entry], start: int) -> None:
        super().__init__(entries, start)
        self._lengths: list[int] = []
        for tensor in self.tensors:
            self._lengths += [tensor.numel(), _padding(tensor)]
        self._layouts = [(tensor.shape, _kept_strides(tensor)) for tensor in self.tensors]
        self.stop = start + sum(self._lengths) * self.dtype.itemsize

    def views(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        pieces = self._flat(buffer).split_with_sizes(self._lengths)[::2]
        return [
            piece.view(shape) if strides is None else piece.as_strided(shape, strides)
            for piece, (shape, strides) in zip(pieces, self._layouts, strict=True)
        ]


def lay_out(entries: Iterable[Entry]) -> list[Section]:
    """Give each tensor its place in a buffer.

    Args:
        entries (Iterable): Strided CPU tensors, with the places they belong at.

    Returns:
        list[Section]: The sections, one behind the other from byte 0 on.
    """
    alike: dict[tuple, list[Entry]] = {}
    for entry in entries:
        tensor = entry[0]
        alike.setdefault((tensor.dtype, tensor.shape, tensor.stride()), []).append(entry)
    mixed: dict[torch.dtype, list[Entry]] = {}
    sections: list[Section] = []
    stop = 0
    for (dtype, *_), group in alike.items():
        if group[0][0].is_contiguous() and len(group) >= _MANY:
            sections.append(UniformSection(group, stop))
            stop = sections[-1].stop
        else:
            mixed.setdefault(dtype, []).extend(group)
    for group in mixed.values():
        sections.append(MixedSection(group, stop))
        stop = sections[-1].stop
    return sections


def _padding(tensor: torch.Tensor) -> int:
    """Elements to the next multiple of the alignment."""
    return -tensor.nbytes % ALIGNMENT // tensor.itemsize


def laid_out_as_usual(tensor: torch.Tensor) -> bool:
    """Whether a tensor has the strides that a new one of its shape has.

    Args:
        tensor (torch.Tensor): Any.

    Returns:
        bool: True if so. A dimension of a single element may have any without being called not
        contiguous.
    """
    if not tensor.is_contiguous():
        return False
    return 1 not in tensor.shape or (
        tensor.stride() == torch.empty(tensor.shape, device='meta').stride()
    )


def _kept_strides(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The strides that ``tensor.to(device)`` would give, which keeps those of dense memory; None
    for the usual ones of its shape."""
    return None if laid_out_as_usual(tensor) else torch.empty_like(tensor, device='meta').stride()
