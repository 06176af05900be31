# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Write measured statistics into the config files that they belong into."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..fields.binding import same
from ..fields.locate import ConfigFile
from .measure import DatasetStatistics


def write(results: Sequence[DatasetStatistics]) -> list[str]:
    """Write measured statistics over those in the config files that set them.

    Only the values are replaced; all else in the files stays, comments too.

    Args:
        results (Sequence[DatasetStatistics]): What :func:`measure_split` returned. All have
            moments.

    Returns:
        list[str]: Where values were replaced, as ``file:line``.

    Raises:
        ValueError: A dataset's mean or std is not written out as a list of numbers in a config
            file, or two datasets share it but were measured otherwise. No file is changed.
    """
    edits: dict[str, dict[tuple[int, int], tuple[ast.expr, str]]] = {}
    for result in results:
        for name, values in result.measured().items():
            path, node = _find_value(result, name)
            values = tuple(values) if isinstance(node, ast.Tuple) else values
            edit = (node, repr(values))
            known = edits.setdefault(path, {}).setdefault((node.lineno, node.col_offset), edit)
            if known[1] != edit[1]:
                raise ValueError(
                    f'{path}:{node.lineno}: this {name} holds for several datasets, of which '
                    f'{result.key} was measured as {edit[1]}, another as {known[1]}; write '
                    'data_preprocessor=dict(...) into the config of each'
                )
    for path, found in edits.items():
        _replace(Path(path), list(found.values()))
    return sorted({f'{path}:{line}' for path, found in edits.items() for line, _ in found})


def paste_place(result: DatasetStatistics, config: str) -> str:
    """Say where in a config the snippet of a dataset belongs.

    Args:
        result (DatasetStatistics): The measurement.
        config (str): The config's file.

    Returns:
        str: The config key, and the file and line that write its dataset out.
    """
    return f'{result.key} ({ConfigFile(config).locate(result.key)})'


def _find_value(result: DatasetStatistics, name: str) -> tuple[str, ast.expr]:
    """The file, and the expression in it, that sets a field of a dataset."""
    place = result.fields.get(name)
    if place is None or place['key'].split('.')[0] != result.key.split('.')[0]:
        raise ValueError(f'{result.key}: no {name} is bound to this dataset that could be replaced')
    path, _, line = str(place['file']).rpartition(':')
    node = ConfigFile(path).find(f'{place["key"]}.{name}') if line.isdigit() else None
    if node is None or not same(_literal(node), place['value']):
        raise ValueError(
            f'{result.key}: {name} comes from {place["key"]} ({place["file"]}), where it is not '
            'written out as a list of numbers that could be replaced'
        )
    return path, node


def _literal(node: ast.expr) -> Any:
    """The list of numbers that an expression writes out, None if it is something else."""
    try:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            return ast.literal_eval(node.left) * ast.literal_eval(node.right)
        return ast.literal_eval(node)
    except (TypeError, ValueError):
        return None


def _replace(path: Path, edits: list[tuple[ast.expr, str]]) -> None:
    # Bytes, since columns are counted in them, and to keep the file's line ends.
    lines = path.read_bytes().splitlines(keepends=True)
    for node, text in sorted(edits, key=lambda edit: (edit[0].lineno, edit[0].col_offset))[::-1]:
        before = lines[node.lineno - 1][: node.col_offset]
        after = lines[node.end_lineno - 1][node.end_col_offset :]
        lines[node.lineno - 1 : node.end_lineno] = [before + text.encode() + after]
    path.write_bytes(b''.join(lines))
