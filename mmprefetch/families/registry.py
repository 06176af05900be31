# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Which family a preprocessor class belongs to."""

from __future__ import annotations

from functools import cache

from mmengine.logging import print_log
from torch import nn

from .family import Family
from .unfused import SAFE, TRANSFER

# What a subclass may define without changing what a declaration says of its base.
_HARMLESS = frozenset(
    {'__init__', '__module__', '__qualname__', '__doc__', '__annotations__', '__dict__',
     '__weakref__', '__orig_bases__', '__parameters__', '__firstlineno__',
     '__static_attributes__', '__repr__', 'extra_repr'}
)  # fmt: skip

_declared: dict[type | tuple[str, str], Family] = {}


def register_family(
    target: type[nn.Module] | str, family: Family, package: str | None = None
) -> None:
    """Declare how a preprocessor class works. A later declaration replaces an earlier one.

    Args:
        target (type | str): The class, or its name where it is not to be imported.
        family (Family): The declaration.
        package (str, optional): With a name, the top-level package that the class is defined in.

    Raises:
        ValueError: A name comes without a package.
    """
    if isinstance(target, str):
        if package is None:
            raise ValueError(
                f'register_family: {target!r} is a name; give its top-level package as well, as '
                f"in register_family({target!r}, family, package='mmdet')"
            )
        _declared[package, target] = family
    else:
        _declared[target] = family
    family_of.cache_clear()


@cache
def family_of(cls: type[nn.Module]) -> Family:
    """Find what is declared of a preprocessor class.

    Args:
        cls (type): The class. It inherits a declaration only if it overrides nothing of the class
            that was declared, but for ``__init__``.

    Returns:
        Family: The declaration; without one, that only its transfer runs ahead.
    """
    for base in cls.__mro__:
        family = _declared.get(base) or _declared.get(
            (base.__module__.split('.')[0], base.__name__)
        )
        if family is not None:
            return TRANSFER if _overrides(cls, base) else family
    return TRANSFER


def family_of_module(module: nn.Module, safe: bool = False) -> Family:
    """Find what is known of a preprocessor.

    Args:
        module (nn.Module): The preprocessor. One that somebody has put hands on, by hooks or by
            methods of its own, is called as it is.
        safe (bool): Whether the user says that its forward depends on batch and fields alone.

    Returns:
        Family: How it works on a batch.
    """
    cls = type(module)
    if module._forward_hooks or module._forward_pre_hooks or vars(module).keys() & _methods(cls):
        return TRANSFER
    family = family_of(cls)
    # Optimizers may write parameters in a way that torch does not count.
    if safe and family is TRANSFER and not any(p.requires_grad for p in module.parameters()):
        return SAFE
    return family


@cache
def _methods(cls: type) -> frozenset[str]:
    return frozenset(name for name in dir(cls) if callable(getattr(cls, name, None)))


def _overrides(cls: type, base: type) -> bool:
    others = [other for other in cls.__mro__ if other not in base.__mro__]
    return any(
        name not in _HARMLESS and hasattr(base, name) for other in others for name in vars(other)
    )


def announce(module: nn.Module) -> None:
    """Say once of a class that it is not fused.

    Args:
        module (nn.Module): A preprocessor that is wrapped.
    """
    family = family_of(type(module))
    if family is TRANSFER:
        _not_fused(type(module))
    elif family.inner_field is not None:
        announce(getattr(module, family.inner_field))


@cache
def _not_fused(cls: type) -> None:
    print_log(
        f'{cls.__module__}.{cls.__name__} is not fused: mmprefetch does not know what its '
        '`forward` does, so the class is run as it is. See `mmprefetch.families` for how to '
        'declare it.',
        logger='current',
    )
