# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The package stays a house that one can find one's way in."""

import ast
from pathlib import Path

import mmprefetch

ROOT = Path(mmprefetch.__file__).parent
LAYERS = ['version', 'elements', 'ops', 'fields', 'config', 'deploy_config', 'families', 'engine',
          'wrapping', 'data_preprocessor', 'own_loops', 'attach', 'checkpoints', 'statistics',
          'hooks', 'loops', '__init__', 'demo']  # fmt: skip


def imported(path):
    """The modules and folders of the package that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            above = path.parents[node.level - 1].relative_to(ROOT).parts
            names = [node.module] if node.module else [alias.name for alias in node.names]
            yield from ((*above, *name.split('.'))[0] for name in names)


def test_imports_run_downward():
    for path in ROOT.rglob('*.py'):
        own = LAYERS.index(path.relative_to(ROOT).parts[0].removesuffix('.py'))
        for name in imported(path):
            assert LAYERS.index(name) <= own, f'{path.relative_to(ROOT)} imports {name}'


def test_modules_are_short_and_say_what_they_are_for():
    for path in ROOT.rglob('*.py'):
        text = path.read_text()
        assert len(text.splitlines()) < 400, path
        assert path.name == 'version.py' or ast.get_docstring(ast.parse(text)), path
