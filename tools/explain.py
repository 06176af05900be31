# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Print the preprocessor fields of each split of a config, and where each comes from."""

import argparse
import contextlib
import json
import sys

from mmengine.config import Config, DictAction

from mmprefetch.fields.explain import explain, render


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config', help='path of the config')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        default={},
        metavar='KEY=VALUE',
        help='change these keys of the config',
    )
    parser.add_argument('--json', action='store_true', help='print JSON, for programs')
    return parser.parse_args()


def main() -> int:
    args = parse_args()
    # mmengine logs to stdout, which is the report's alone.
    with contextlib.redirect_stdout(sys.stderr):
        try:
            cfg = Config.fromfile(args.config)
            cfg.merge_from_dict(args.cfg_options)
            report = explain(cfg, args.cfg_options)
        # OpenMMLab's packages assert, while they are imported, that their versions fit.
        except (
            AssertionError,
            ImportError,
            KeyError,
            OSError,
            SyntaxError,
            TypeError,
            ValueError,
        ) as error:
            print(f'error: {error}', file=sys.stderr)
            return 1
    print(json.dumps(report, indent=2, default=str) if args.json else render(report))
    return 0


if __name__ == '__main__':
    sys.exit(main())
