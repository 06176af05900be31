# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Test a model by its config and a checkpoint."""

import argparse

from launch import add_common_args, init_cpu_group, load_config
from mmengine.config import Config, ConfigDict
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
    parser.add_argument(
        '--tta', action='store_true', help='test with the test-time augmentation of the config'
    )
    return parser.parse_args()


def with_augmentation(cfg: Config) -> None:
    """Switch test-time augmentation on, as the tools of OpenMMLab's packages do.

    Args:
        cfg (Config): The config; changed in place.

    Raises:
        ValueError: It lacks ``tta_model`` or ``tta_pipeline``.
    """
    for key in ('tta_model', 'tta_pipeline'):
        if key not in cfg:
            raise ValueError(f'--tta: the config has no {key}; write it, or leave --tta out')
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    dataset.pipeline = cfg.tta_pipeline
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)


def main() -> None:
    args = parse_args()
    cfg = load_config(args)
    cfg.load_from = args.checkpoint
    if args.tta:
        with_augmentation(cfg)
    init_cpu_group(cfg)
    runner = Runner.from_cfg(cfg) if 'runner_type' not in cfg else RUNNERS.build(cfg)
    choose_preprocessing(runner, args.checkpoint, 'test', args.preprocess_from)
    runner.test()


if __name__ == '__main__':
    main()
