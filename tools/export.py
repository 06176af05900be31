# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Export a trained model to ONNX, with the preprocessing that its checkpoint records inside."""

import argparse
import sys
from pathlib import Path

import torch
from mmengine.config import Config, DictAction
from mmengine.registry import DATASETS, MODELS, DefaultScope
from mmengine.runner import load_checkpoint

from mmprefetch.checkpoints.export import to_onnx
from mmprefetch.checkpoints.restore import load_preprocessor
from mmprefetch.fields.datasets import split_dataloader


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('out', type=Path, help='the ONNX file to write')
    parser.add_argument(
        '--split',
        choices=['test', 'val', 'train'],
        default='test',
        help='whose preprocessing goes inside',
    )
    parser.add_argument(
        '--shape',
        nargs=3,
        type=int,
        metavar=('C', 'H', 'W'),
        help="channels, height and width of the uint8 images; by default those of the split's "
        'first image',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        default={},
        metavar='KEY=VALUE',
        help='change these keys of the config',
    )
    return parser.parse_args()


def example_of(cfg: Config, split: str, shape: list[int] | None) -> torch.Tensor:
    """Give one image for the export to be traced with.

    Args:
        cfg (Config): The config.
        split (str): 'train', 'val' or 'test'.
        shape (list[int], optional): Channels, height and width. Defaults to None, for the first
            image of the split's dataset.

    Returns:
        torch.Tensor: Shape (1, C, H, W); uint8 if the shape is given.

    Raises:
        ValueError: No shape is given, and the config has no dataset for the split.
    """
    if shape:
        return torch.zeros(1, *shape, dtype=torch.uint8)
    if cfg.get(f'{split}_dataloader') is None:
        raise ValueError(f'the config has no {split}_dataloader; write `--shape C H W`')
    dataloader, _ = split_dataloader(cfg[f'{split}_dataloader'], f'{split}_dataloader')
    return DATASETS.build(dataloader['dataset'])[0]['inputs'][None]


def main() -> int:
    args = parse_args()
    try:
        cfg = Config.fromfile(args.config)
        cfg.merge_from_dict(args.cfg_options)
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
            model = MODELS.build(cfg.model)
            checkpoint = load_checkpoint(model, args.checkpoint, map_location='cpu', strict=True)
            preprocessor = load_preprocessor(checkpoint, args.split)
            example = example_of(cfg, args.split, args.shape)
            args.out.parent.mkdir(parents=True, exist_ok=True)
            any_size = to_onnx(model, preprocessor, example, args.out)
    except (ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        print(f'error: {error}', file=sys.stderr)
        return 1
    batch = 'N' if any_size else len(example)
    sides = ', '.join(map(str, example.shape[1:]))
    print(f'{args.out}: takes ({batch}, {sides}) {str(example.dtype).removeprefix("torch.")}')
    return 0


if __name__ == '__main__':
    sys.exit(main())
