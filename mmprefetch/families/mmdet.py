# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The preprocessors of mmdet."""

from __future__ import annotations

from typing import Any

from torch import nn

from .family import Family
from .fused import twin
from .mmengine import SuperFamily
from .registry import family_of, register_family


class DetFamily(SuperFamily):
    """``DetDataPreprocessor``: metainfo, box types, padded masks; random resizing when due."""

    augments = 'batch_augments'
    # Batch augmentations that depend on the batch alone, and change nothing of it in place.
    pure_augments = frozenset({'BatchFixedSizePad'})

    def is_pure(self, preprocessor: nn.Module, training: bool) -> bool:
        return super().is_pure(preprocessor, training) or all(
            type(augment).__name__ in self.pure_augments
            and type(augment).__module__.startswith('mmdet.')
            for augment in preprocessor.batch_augments
        )


class MultiBranchFamily(Family):
    """``MultiBranchDataPreprocessor``: gives each branch to the preprocessor inside.

    The class's own code runs twice, on the copy of the batch to see what it gives to the inner
    one, which is begun then, and on the raw batch when that is due.
    """

    inner_field = 'data_preprocessor'

    def begin(self, preprocessor: nn.Module, data: Any, training: bool) -> list:
        inner = preprocessor.data_preprocessor
        family = family_of(type(inner))
        begun = []

        def begin(branch: dict, training: bool = False) -> dict:
            made = branch if family is None else family.begin(inner, branch, training)
            begun.append((family, made))
            return {}

        twin(preprocessor, {self.inner_field: begin}).forward(data, training)
        return begun

    def finish(self, preprocessor: nn.Module, begun: list, batch: Any, training: bool) -> Any:
        inner = preprocessor.data_preprocessor
        branches = iter(begun)

        def finish(branch: dict, training: bool = False) -> Any:
            family, made = next(branches)
            if family is None:
                return inner(made, training)
            return family.finish(inner, made, branch, training)

        return twin(preprocessor, {self.inner_field: finish}).forward(batch, training)

    def made(self, begun: list) -> Any:
        return [made if family is None else family.made(made) for family, made in begun]


def declare() -> None:
    """Declare the classes of mmdet."""
    register_family('DetDataPreprocessor', DetFamily(), package='mmdet')
    register_family('MultiBranchDataPreprocessor', MultiBranchFamily(), package='mmdet')
