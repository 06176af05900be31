# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What is known of preprocessor classes: what the fused pass replaces, and what may run ahead.

A class that is not declared here is taken as impure: only its transfer runs ahead, and its own
``forward`` runs when the model asks for the batch.

Declaring a class takes a few lines. One that calls the forward of :class:`ImgDataPreprocessor`
and goes on from there, with an attribute ``mix`` that draws random numbers in training:

    >>> from mmprefetch.families import SuperFamily, register_family
    >>>
    >>> class MyFamily(SuperFamily):
    ...     augments = 'mix'
    >>>
    >>> register_family(MyDataPreprocessor, MyFamily())

One that normalises by itself says how, and which of its attributes switch its own pass off:

    >>> from mmprefetch.families import FusedFamily, fused
    >>>
    >>> class OtherFamily(FusedFamily):
    ...     off = dict(to_rgb=False, _enable_normalize=False)
    ...
    ...     def pixels(self, preprocessor, data, training):
    ...         return fused(preprocessor, data['inputs'], reverse=preprocessor.to_rgb)
    >>>
    >>> register_family('OtherDataPreprocessor', OtherFamily(), package='theirs')
"""

from . import mmaction, mmdet, mmengine, mmpose, mmpretrain, mmseg, mmyolo
from .family import Family, cast
from .fused import FusedFamily, StandInFamily, with_samples
from .mmengine import ImgFamily, SuperFamily
from .passes import fused
from .registry import announce, family_of, family_of_module, register_family
from .unfused import CastFamily, default_training

__all__ = [
    'CastFamily',
    'Family',
    'FusedFamily',
    'ImgFamily',
    'StandInFamily',
    'SuperFamily',
    'announce',
    'cast',
    'default_training',
    'family_of',
    'family_of_module',
    'fused',
    'register_family',
    'with_samples',
]

for _package in (mmengine, mmpretrain, mmseg, mmdet, mmpose, mmaction, mmyolo):
    _package.declare()
