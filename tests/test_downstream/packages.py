# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Import OpenMMLab's packages, or skip the tests that need them."""

import importlib
import importlib.machinery
import importlib.util
import sys
import types

import pytest
import torch

_library = None


class _NoCompiledOps(types.ModuleType):
    """Stands for mmcv's compiled operators, of which no preprocessor calls any."""

    def __getattr__(self, name):
        if name.startswith('__'):
            raise AttributeError(name)

        def missing(*args, **kwargs):
            raise NotImplementedError(f'mmcv._ext.{name}')

        return missing


def _installed(name):
    return importlib.util.find_spec(name) is not None


def let_import():
    """Let the packages import beside a torch without CUDA, and without mmcv's operators."""
    global _library
    if _installed('mmcv') and 'mmcv._ext' not in sys.modules and not _installed('mmcv._ext'):
        module = _NoCompiledOps('mmcv._ext')
        module.__spec__ = importlib.machinery.ModuleSpec('mmcv._ext', None)
        sys.modules['mmcv._ext'] = module
    if _installed('torchvision') and 'torchvision' not in sys.modules and _library is None:
        # A torchvision built for CUDA looks for these while it is imported.
        _library = torch.library.Library('torchvision', 'DEF')
        for name in ('nms', 'qnms'):
            _library.define(f'{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor')


def load(name):
    """Import a module, or skip the tests that need it and say why."""
    package = name.split('.')[0]
    if not _installed(package):
        pytest.skip(f'{package} is not installed', allow_module_level=True)
    let_import()
    try:
        return importlib.import_module(name)
    except (ImportError, AssertionError, RuntimeError, AttributeError) as error:
        pytest.skip(f'{name}: {error}', allow_module_level=True)


def load_alone(name):
    """Import one module of a package without running the package's own ``__init__`` files,
    which import all of its models and what these need."""
    package, *parts = name.split('.')
    spec = importlib.util.find_spec(package)
    if spec is None:
        pytest.skip(f'{package} is not installed', allow_module_level=True)
    paths = list(spec.submodule_search_locations)
    let_import()
    for above in ('.'.join([package, *parts[:n]]) for n in range(len(parts))):
        if above not in sys.modules:
            bare = types.ModuleType(above)
            bare.__spec__ = importlib.machinery.ModuleSpec(above, None, is_package=True)
            bare.__path__ = [f'{path}/{"/".join(above.split(".")[1:])}' for path in paths]
            sys.modules[above] = bare
    return importlib.import_module(name)
