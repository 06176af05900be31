# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Measure the mean and std of the images of a config's datasets."""

import argparse
import contextlib
import sys

from mmengine.config import Config, DictAction

from mmprefetch.statistics.measure import DatasetStatistics, measure_split
from mmprefetch.statistics.write import paste_place, write


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument('--split', choices=['train', 'val', 'test'], default='train')
    parser.add_argument(
        '--max-images',
        type=_positive,
        help='measure at most so many images of each dataset, evenly spread over it',
    )
    parser.add_argument(
        '--workers', type=int, help="worker processes; by default the dataloader's num_workers"
    )
    parser.add_argument(
        '--write',
        action='store_true',
        help='write the values over those in the config files that set them',
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


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f'{value}: write 1 or more')
    return value


def report(result: DatasetStatistics) -> None:
    """Print what was measured of one dataset, and on stderr what was wrong with it.

    Args:
        result (DatasetStatistics): The measurement.
    """
    for name, reason in result.failures:
        print(f'cannot read {name}: {reason}', file=sys.stderr)
    if result.moments is None:
        print(f'error: {result.key}: no image could be read', file=sys.stderr)
        return
    if len(result.dtypes) > 1:
        kinds = ', '.join(result.dtypes)
        print(f'warning: {result.key} holds images of different types: {kinds}', file=sys.stderr)
    for channel in result.constant:
        print(
            f'warning: {result.key}: channel {channel} is the same in all pixels; std=1 leaves it '
            'unscaled',
            file=sys.stderr,
        )
    order = f'reversed ({result.reversed_by}=True)' if result.reversed_by else 'as decoded'
    print(
        f'# {result.key}: {result.type_name}, {result.images} {"/".join(result.dtypes)} images, '
        f'channels {order}'
    )
    print(f'{result.snippet()},')


def main() -> int:
    args = parse_args()
    # mmengine logs to stdout, which is the report's alone.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            cfg = Config.fromfile(args.config)
            cfg.merge_from_dict(args.cfg_options)
            results = measure_split(
                cfg, args.split, args.max_images, args.workers, args.cfg_options
            )
        except (ImportError, KeyError, OSError, SyntaxError, TypeError, ValueError) as error:
            print(f'error: {error}', file=sys.stderr)
            return 1
    for result in results:
        report(result)
    failures = sum(len(result.failures) for result in results)
    if failures:
        print(f'error: {failures} images could not be read', file=sys.stderr)
    if any(result.moments is None for result in results):
        return 1
    if args.write:
        try:
            places = write(results)
        except ValueError as error:
            print(f'error: nothing is written: {error}', file=sys.stderr)
            for result in results:
                where = paste_place(result, args.config)
                print(f'paste the line of {result.key} into {where}', file=sys.stderr)
            return 1
        print(f'written: {", ".join(places)}', file=sys.stderr)
    return 1 if failures else 0


if __name__ == '__main__':
    sys.exit(main())
