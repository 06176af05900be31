# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What train.py and test.py share: their flags, the config they run, processes without a GPU."""

import argparse
import os
from pathlib import Path

import torch
from mmengine.config import Config, DictAction

import mmprefetch


def add_common_args(parser: argparse.ArgumentParser) -> None:
    """Add the flags that training and testing have in common.

    Args:
        parser (argparse.ArgumentParser): The parser; changed in place.
    """
    parser.add_argument('config', help='path of the config file')
    parser.add_argument('--work-dir', help='folder for logs and checkpoints')
    parser.add_argument(
        '--prefetch',
        action='store_true',
        help='switch prefetching on for train, val and test, whatever the config says',
    )
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        help='override keys of the config: key=value, nested.key=value, key="[a,b]"',
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='how the processes of a distributed run are started',
    )
    parser.add_argument('--local_rank', '--local-rank', type=int, help='given by some launchers')


def load_config(args: argparse.Namespace) -> Config:
    """Read the config that the flags name, and write the common flags into it.

    Args:
        args (argparse.Namespace): The parsed flags.

    Returns:
        Config: The config to run.
    """
    if args.local_rank is not None:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = Config.fromfile(args.config)
    if args.cfg_options is not None:
        cfg.merge_from_dict(args.cfg_options)
    cfg.launcher = args.launcher
    if args.work_dir is not None:
        cfg.work_dir = args.work_dir
    elif cfg.get('work_dir') is None:
        cfg.work_dir = str(Path('work_dirs') / Path(args.config).stem)
    return mmprefetch.enable_prefetch(cfg) if args.prefetch else cfg


def init_cpu_group(cfg: Config) -> None:
    """Start the process group of a distributed run on a machine without an accelerator.

    mmengine chooses a CUDA device before it starts the group and hands the device's index to the
    model's wrapper; neither can work on a CPU. A run of one process, or on an accelerator, is left
    to mmengine.

    Args:
        cfg (Config): The config; its ``model_wrapper_cfg`` is changed in place.
    """
    if cfg.launcher != 'pytorch' or torch.accelerator.is_available():
        return
    torch.distributed.init_process_group('gloo')
    wrapper = cfg.get('model_wrapper_cfg') or dict(type='MMDistributedDataParallel')
    cfg.model_wrapper_cfg = dict(wrapper, device_ids=None)
