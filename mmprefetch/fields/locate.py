# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Find the file, among those that a config inherits from, that sets a key."""

import ast
import importlib.util
import os
from functools import cached_property
from pathlib import Path
from typing import Any

from mmengine.config import Config

from .binding import same

_MISSING = object()


class ConfigFile:
    """A config file and those that it inherits from, as ``_base_`` or through ``read_base``.

    Args:
        path (str or Path): The file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))

    def locate(self, key: str) -> str | None:
        """Find where a key gets its value.

        Args:
            key (str): The config key, such as ``train_dataloader.dataset.data_preprocessor.mean``.

        Returns:
            str: The file and, where it is written out there, the line (``file:line``); None if the
            config has no such key.
        """
        value = _look_up(self.config, key)
        if value is _MISSING:
            return None
        node = self.find(key)
        if node is not None:
            return f'{_short(self.path)}:{node.lineno}'
        for base in self.bases:
            if same(_look_up(base.config, key), value):
                return base.locate(key)
        return _short(self.path)

    def find(self, key: str) -> ast.expr | None:
        """Find the expression in this very file that a key is written out by.

        Args:
            key (str): The config key.

        Returns:
            ast.expr: That of the last assignment that writes it out, None if there is none.
        """
        names, found = key.split('.'), None
        for target, value in self._assignments:
            if names[: len(target)] == target:
                found = self._descend(value, names[len(target) :], set()) or found
        return found

    @cached_property
    def config(self) -> Config:
        """The config that the file, with those it inherits from, stands for."""
        return Config.fromfile(self.path, import_custom_modules=False)

    @cached_property
    def bases(self) -> list['ConfigFile']:
        """The files that it names as its bases."""
        if Config._is_lazy_import(self.path):
            found = [
                self._module_path(statement)
                for block in self._statements
                if isinstance(block, ast.With)
                for statement in block.body
            ]
        else:
            names = Config._get_base_files(self.path)
            found = [Config._get_cfg_path(name, self.path)[0] for name in names]
        return [ConfigFile(path) for path in found]

    @cached_property
    def _statements(self) -> list[ast.stmt]:
        if not self.path.endswith('.py'):
            return []
        return ast.parse(Path(self.path).read_text(encoding='utf-8')).body

    @cached_property
    def _assignments(self) -> list[tuple[list[str], ast.expr]]:
        return [
            (target, statement.value)
            for statement in self._statements
            if isinstance(statement, ast.Assign)
            for target in map(_dotted, statement.targets)
            if target
        ]

    def _module_path(self, statement: ast.ImportFrom) -> str:
        if statement.level:
            folder = Path(self.path).parents[statement.level - 1]
            return str(folder.joinpath(*statement.module.split('.')).with_suffix('.py'))
        return importlib.util.find_spec(statement.module).origin

    def _descend(self, node: ast.expr, names: list[str], seen: set[str]) -> ast.expr | None:
        """Follow variables, and the keys of what is written out, to the value of a key."""
        if isinstance(node, ast.Name) and node.id not in seen:
            values = [value for target, value in self._assignments if target == [node.id]]
            return self._descend(values[-1], names, seen | {node.id}) if values else None
        if not names:
            return node
        inner = _entries(node).get(names[0])
        return None if inner is None else self._descend(inner, names[1:], seen)


def _entries(node: ast.expr) -> dict[str, ast.expr]:
    """The keys that a dict or list written out in the source has."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == 'dict':
        return {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
    if isinstance(node, ast.Dict):
        return {
            key.value: value
            for key, value in zip(node.keys, node.values, strict=True)
            if isinstance(key, ast.Constant)
        }
    if isinstance(node, ast.List | ast.Tuple):
        return {str(index): value for index, value in enumerate(node.elts)}
    return {}


def _dotted(target: ast.expr) -> list[str]:
    """The names of an assignment's target such as ``model.data_preprocessor['mean']``, empty if it
    is of another form."""
    if isinstance(target, ast.Name):
        return [target.id]
    if isinstance(target, ast.Attribute):
        last = target.attr
    elif isinstance(target, ast.Subscript) and isinstance(target.slice, ast.Constant):
        last = str(target.slice.value)
    else:
        return []
    outer = _dotted(target.value)
    return [*outer, last] if outer else []


def _look_up(config: Any, key: str) -> Any:
    for name in key.split('.'):
        if isinstance(config, list | tuple) and name.isdigit() and int(name) < len(config):
            config = config[int(name)]
        elif isinstance(config, dict | Config) and name in config:
            config = config[name]
        else:
            return _MISSING
    return config


def _short(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
