# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Find a registered class, and what its constructor takes."""

import difflib
import inspect
from collections.abc import Callable, Iterable
from typing import Any

from mmengine.registry import Registry
from torch import nn


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Suggest the candidate that looks most like a misspelt name.

    Args:
        name (str): The name as it was written.
        candidates (Iterable[str]): The names that would have been right.

    Returns:
        str: ``" (did you mean 'x'?)"``, or an empty string if none is near.
    """
    by_lower_case = {candidate.lower(): candidate for candidate in candidates}
    matches = difflib.get_close_matches(str(name).lower(), list(by_lower_case), n=1)
    return f' (did you mean {by_lower_case[matches[0]]!r}?)' if matches else ''


def find_class(registry: Registry, type_: Any, scope: str | None = None) -> Any | None:
    """Look up what the ``type`` of a config stands for.

    Args:
        registry (Registry): The root registry to search, under the current default scope.
        type_ (Any): A registered name, with or without scope, or the class itself.
        scope (str, optional): The config's own ``_scope_``.

    Returns:
        Any: The class or function, None if nothing of that name is registered.
    """
    if not isinstance(type_, str):
        return type_
    with registry.switch_scope_and_registry(scope) as scoped:
        try:
            return scoped.get(type_)
        except RuntimeError as error:
            # Registry.get answers a dotted name that it cannot import with this error and any
            # other unknown name with None.
            if str(error) != f'Failed to get {type_}':
                raise
            return None


def preprocessor_names(registry: Registry, scope: str | None = None) -> list[str]:
    """List the registered names that belong to data preprocessors.

    Args:
        registry (Registry): The root registry to search, under the current default scope.
        scope (str, optional): The scope to search as well.

    Returns:
        list[str]: The names, sorted.
    """
    with registry.switch_scope_and_registry(scope) as scoped:
        names = {*registry.module_dict, *scoped.module_dict}
    return sorted(name for name in names if 'preprocessor' in name.lower())


def valid_fields(cls: Callable) -> list[str]:
    """Name the fields of a class's constructor, following ``**kwargs`` up its bases.

    Args:
        cls (Callable): A class, or a function that builds an object.

    Returns:
        list[str]: The names in the order of the signatures, the class's own first.
    """
    return list(_parameters(cls)[0])


def accepts_any(cls: Callable) -> bool:
    """Whether the last constructor up the bases still takes ``**kwargs``.

    Args:
        cls (Callable): A class, or a function that builds an object.

    Returns:
        bool: True if a field that :func:`valid_fields` does not name may be valid too.
    """
    return _parameters(cls)[1]


def field_default(cls: Callable, name: str) -> Any:
    """Give the value that a constructor uses for a field that nobody sets.

    Args:
        cls (Callable): A class, or a function that builds an object.
        name (str): The field.

    Returns:
        Any: The default, None if the field has none.
    """
    parameter = _parameters(cls)[0].get(name)
    if parameter is None or parameter.default is inspect.Parameter.empty:
        return None
    return parameter.default


def _parameters(cls: Callable) -> tuple[dict[str, inspect.Parameter], bool]:
    if inspect.isclass(cls):
        # The signatures of these two say **kwargs, yet they refuse any.
        bases = [base for base in cls.__mro__ if base not in (object, nn.Module)]
        constructors = [vars(base)['__init__'] for base in bases if '__init__' in vars(base)]
        skipped = 1
    else:
        constructors, skipped = [cls], 0
    named: dict[str, inspect.Parameter] = {}
    for constructor in constructors:
        parameters = list(inspect.signature(constructor).parameters.values())[skipped:]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                named.setdefault(parameter.name, parameter)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return named, False
    return named, bool(constructors)
