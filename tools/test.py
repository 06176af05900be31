# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Test a model by its config and a checkpoint."""

import argparse

from launch import add_common_args, init_cpu_group, load_config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner

from mmprefetch.checkpoints.restore import SOURCES, choose_preprocessing


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    add_common_args(parser)
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument(
        '--preprocess-from',
        choices=SOURCES,
        default='config',
        help='whose preprocessing to use where the config and the checkpoint differ',
    )
    return parser.parse_args()


def main() -> None:
    args = parse_args()
    cfg = load_config(args)
    cfg.load_from = args.checkpoint
    init_cpu_group(cfg)
    runner = Runner.from_cfg(cfg) if 'runner_type' not in cfg else RUNNERS.build(cfg)
    choose_preprocessing(runner, args.checkpoint, 'test', args.preprocess_from)
    runner.test()


if __name__ == '__main__':
    main()
