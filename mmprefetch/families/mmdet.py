# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessors of mmdet."""

from __future__ import annotations

from typing import Any

from torch import nn

from .family import Family
from .fused import twin
from .mmengine import SuperFamily
from .registry import family_of_module, register_family


class DetFamily(SuperFamily):
    """``DetDataPreprocessor``: metainfo, box types, padded masks; random resizing when due."""

    augments = 'batch_augments'
    # Batch augmentations that depend on the batch alone, and change nothing of it in place.
    pure_augments = frozenset({'BatchFixedSizePad'})

    def is_pure(self, preprocessor: nn.Module, training: bool) -> bool:
        return super().is_pure(preprocessor, training) or all(
            map(self._is_pure, preprocessor.batch_augments)
        )

    def reads(self, preprocessor: nn.Module) -> list[nn.Module]:
        # The others are called when the batch is due, and may keep books in themselves.
        augments = getattr(preprocessor, self.augments, None)
        if augments is None:
            return [preprocessor]
        return [preprocessor, augments, *filter(self._is_pure, augments)]

    def _is_pure(self, augment: Any) -> bool:
        kind = type(augment)
        return kind.__name__ in self.pure_augments and kind.__module__.startswith('mmdet.')


class MultiBranchFamily(Family):
    """``MultiBranchDataPreprocessor``: gives each branch to the preprocessor inside.

    The class's own code runs twice, on the copy of the batch to see what it gives to the inner
    one, which is begun then, and on the raw batch when that is due.
    """

    inner_field = 'data_preprocessor'

    def reads(self, preprocessor: nn.Module) -> list[nn.Module]:
        inner = preprocessor.data_preprocessor
        return [preprocessor, *family_of_module(inner).reads(inner)]

    def begin(self, preprocessor: nn.Module, data: Any, training: bool) -> list:
        inner = preprocessor.data_preprocessor
        family = family_of_module(inner)
        begun = []

        def begin(branch: dict, training: bool = False) -> dict:
            begun.append(family.begin(inner, branch, training))
            return {}

        twin(preprocessor, {self.inner_field: begin}).forward(data, training)
        return begun

    def finish(self, preprocessor: nn.Module, begun: list, batch: Any, training: bool) -> Any:
        inner = preprocessor.data_preprocessor
        family = family_of_module(inner)
        branches = iter(begun)

        def finish(branch: dict, training: bool = False) -> Any:
            return family.finish(inner, next(branches), branch, training)

        return twin(preprocessor, {self.inner_field: finish}).forward(batch, training)


def declare() -> None:
    """Declare the classes of mmdet."""
    register_family('DetDataPreprocessor', DetFamily(), package='mmdet')
    register_family('MultiBranchDataPreprocessor', MultiBranchFamily(), package='mmdet')
