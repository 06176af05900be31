# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Measure mmprefetch: ``engine`` for the look-ahead, ``preprocess`` for the fused pass."""

import argparse
import os
import platform
import shlex
import sys

import benchmark_engine
import benchmark_preprocess
import torch

PARTS = {'engine': benchmark_engine.main, 'preprocess': benchmark_preprocess.main}


def cpu_model() -> str:
    """The processor's name, as far as the system tells it."""
    try:
        with open('/proc/cpuinfo') as lines:
            names = [
                line.split(':', 1)[1].strip() for line in lines if line.startswith('model name')
            ]
    except OSError:
        names = []
    return names[0] if names else platform.processor() or platform.machine()


def main() -> int:
    """Run one part; its own options follow its name.

    Returns:
        int: Exit status, 1 when a result is wrong.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        'part', choices=PARTS, help='what to measure; `PART --help` for its options'
    )
    part = parser.parse_args(sys.argv[1:2]).part
    print(f'command: python tools/benchmark.py {shlex.join(sys.argv[1:])}')
    print(f'machine: {cpu_model()}, {os.cpu_count()} cores; torch {torch.__version__}')
    return PARTS[part](sys.argv[2:]) or 0


if __name__ == '__main__':
    sys.exit(main())
