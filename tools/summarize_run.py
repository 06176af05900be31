# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Say how the latest training run of a work directory ended, and where its files are."""

import argparse
import json
from pathlib import Path


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('work_dir', type=Path, help='work directory of the run')
    return parser.parse_args()


def read_metrics(scalars: Path) -> dict:
    """Find the metrics of the last validation.

    Args:
        scalars (Path): The file of JSON lines that mmengine's local backend writes.

    Returns:
        dict: The last record that is not one of training.
    """
    records = [json.loads(line) for line in scalars.read_text().splitlines()]
    validations = [record for record in records if 'loss' not in record]
    return {
        key: value
        for key, value in validations[-1].items()
        if key not in ('data_time', 'time', 'step')
    }


def main() -> None:
    work_dir = parse_args().work_dir
    curves = max(work_dir.glob('*/vis_data/scalars.json'), default=None)
    if curves is None:
        raise SystemExit(f'{work_dir} holds no run: train with --work-dir {work_dir} first')
    run = curves.parent.parent
    for name, value in read_metrics(curves).items():
        print(f'{name}: {value:.2f}')
    print(f'log:        {run / f"{run.name}.log"}')
    print(f'checkpoint: {(work_dir / "last_checkpoint").read_text().strip()}')
    print(f'curves:     {curves}')


if __name__ == '__main__':
    main()
