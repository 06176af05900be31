# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Train a model by its config."""

import argparse

from launch import add_common_args, init_cpu_group, load_config
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_args(parser)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        help='go on from this checkpoint; without a path, from the latest in the work directory',
    )
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate by the actual batch size over auto_scale_lr.base_batch_size',
    )
    return parser.parse_args()


def merge_train_args(cfg: Config, args: argparse.Namespace) -> None:
    """Write the flags of training into the config.

    Args:
        cfg (Config): The config; changed in place.
        args (argparse.Namespace): The parsed flags.

    Raises:
        ValueError: If a flag does not fit the config; it names the config key.
    """
    if args.amp:
        kind = cfg.optim_wrapper.get('type', 'OptimWrapper')
        if kind not in ('OptimWrapper', 'AmpOptimWrapper'):
            raise ValueError(
                f"--amp needs optim_wrapper.type 'OptimWrapper' or 'AmpOptimWrapper', not {kind!r}"
            )
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            raise ValueError(
                '--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in the config'
            )
        cfg.auto_scale_lr.enable = True
    if args.resume:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume


def main() -> None:
    args = parse_args()
    cfg = load_config(args)
    merge_train_args(cfg, args)
    init_cpu_group(cfg)
    runner = Runner.from_cfg(cfg) if 'runner_type' not in cfg else RUNNERS.build(cfg)
    runner.train()


if __name__ == '__main__':
    main()
