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


def type_name_of(type_: Any) -> str:
    """The name at the end of a config's ``type``.

    Args:
        type_ (Any): A registered name, with or without scope, or a class.

    Returns:
        str: The name without scope.
    """
    return getattr(type_, '__name__', str(type_)).rpartition('.')[2]


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


def constructor_fields(cls: Callable) -> tuple[dict[str, Any], bool]:
    """Name the fields of a class's constructor, following ``**kwargs`` up its bases.

    Args:
        cls (Callable): A class, or a function that builds an object.

    Returns:
        tuple: The default of each field (None if it has none), in the order of the signatures, the
        class's own first; and whether the last constructor still takes ``**kwargs``, so that other
        fields may be valid too.
    """
    constructors, skipped = [cls], 0
    if inspect.isclass(cls):
        # The signatures of these two say **kwargs, yet they refuse any.
        bases = [base for base in cls.__mro__ if base not in (object, nn.Module)]
        constructors = [vars(base)['__init__'] for base in bases if '__init__' in vars(base)]
        skipped = 1
    defaults: dict[str, Any] = {}
    for constructor in constructors:
        parameters = list(inspect.signature(constructor).parameters.values())[skipped:]
        for parameter in parameters:
            if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
                default = None if parameter.default is parameter.empty else parameter.default
                defaults.setdefault(parameter.name, default)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
            return defaults, False
    return defaults, bool(constructors)
