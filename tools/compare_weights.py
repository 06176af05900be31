# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Compare the weights and the optimizer state of two checkpoints, bit for bit."""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

import torch

from mmprefetch.checkpoints.safe_loading import allow_checkpoint_types

SECTIONS = ('state_dict', 'optimizer')


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('first', help='path of a checkpoint')
    parser.add_argument('second', help='path of another checkpoint')
    return parser.parse_args()


def leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Walk a nested state.

    Args:
        value (Any): Dicts, lists and tuples of tensors and plain values.
        path (str): Where ``value`` stands.

    Yields:
        tuple[str, Any]: The dotted path and the value of each leaf.
    """
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from leaves(item, f'{path}.{key}')
    elif isinstance(value, list | tuple) and value:
        for index, item in enumerate(value):
            yield from leaves(item, f'{path}.{index}')
    else:
        yield path, value


def equal(first: Any, second: Any) -> bool:
    """Tell whether two leaves are equal: tensors by dtype, shape and every bit.

    Args:
        first (Any): A tensor or a plain value.
        second (Any): Another one.

    Returns:
        bool: Whether they are equal.
    """
    if not (isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor)):
        return type(first) is type(second) and first == second
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    # Bytes, since 0.0 equals -0.0 and NaN differs from itself.
    first, second = (item.contiguous().reshape(-1).view(torch.uint8) for item in (first, second))
    return torch.equal(first, second)


def compare(first: dict, second: dict) -> list[str]:
    """Find what differs between two checkpoints.

    Args:
        first (dict): A loaded checkpoint.
        second (dict): Another one.

    Returns:
        list[str]: Dotted paths of the leaves that differ or that only one checkpoint has.
    """
    one, two = (
        {
            path: leaf
            for section in SECTIONS
            if section in checkpoint
            for path, leaf in leaves(checkpoint[section], section)
        }
        for checkpoint in (first, second)
    )
    only = [f'{path} (only in the first)' for path in one if path not in two]
    only += [f'{path} (only in the second)' for path in two if path not in one]
    return only + [path for path in one if path in two and not equal(one[path], two[path])]


def main() -> int:
    args = parse_args()
    allow_checkpoint_types()
    first, second = (torch.load(path, map_location='cpu') for path in (args.first, args.second))
    for path, checkpoint in ((args.first, first), (args.second, second)):
        if 'state_dict' not in checkpoint:
            raise SystemExit(f'{path} holds no state_dict: give a checkpoint of mmengine')
    differing = compare(first, second)
    if differing:
        print(f'{args.first} and {args.second} differ in:')
        print('\n'.join(f'  {path}' for path in differing))
        return 1
    compared = ' and '.join(section for section in SECTIONS if section in first)
    print(f'bit-equal: {compared} of {args.first} and {args.second}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
