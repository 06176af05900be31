# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Write scikit-learn's scanned handwritten digits as PNG files in class folders."""

import argparse
import json
import shutil
from pathlib import Path

import mmcv
import numpy as np
from mmengine.utils import track_iter_progress
from sklearn.datasets import load_digits

# A scan's pixel is a count of the 4 x 4 dots that it covers.
MAX_COUNT = 16


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=Path('data/digits'), help='folder to write')
    parser.add_argument('--seed', type=int, default=0, help='seed of the split')
    parser.add_argument('--val-ratio', type=float, default=0.2, help='part of each class in val')
    return parser.parse_args()


def split_of(labels: np.ndarray, val_ratio: float, seed: int) -> np.ndarray:
    """Choose the validation images, the same part of every class.

    Args:
        labels (np.ndarray): Class of each image, shape (N,).
        val_ratio (float): Part of each class that goes to validation.
        seed (int): Seed of the choice.

    Returns:
        np.ndarray: Shape (N,), 'train' or 'val' for each image.
    """
    generator = np.random.default_rng(seed)
    split = np.full(len(labels), 'train', dtype='<U5')
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        split[members[: round(len(members) * val_ratio)]] = 'val'
    return split


def write_images(out: Path, val_ratio: float, seed: int) -> dict:
    """Write all images, and measure the training ones.

    Args:
        out (Path): Folder to write.
        val_ratio (float): Part of each class that goes to validation.
        seed (int): Seed of the split.

    Returns:
        dict: What ``stats.json`` holds: the arguments, the number of images of each split, and
        per channel the mean and standard deviation of the training images' pixels (0 to 255).
    """
    digits = load_digits()
    gray = np.rint(digits.images * (255 / MAX_COUNT)).astype(np.uint8)
    images = np.repeat(gray[..., None], 3, axis=3)
    split = split_of(digits.target, val_ratio, seed)
    for label in track_iter_progress(digits.target_names.tolist()):
        for index in np.flatnonzero(digits.target == label):
            path = out / split[index] / str(label) / f'{index:04d}.png'
            if not mmcv.imwrite(images[index], str(path)):
                raise OSError(f'could not write {path}')
    train = images[split == 'train'].astype(np.float64)
    return dict(
        seed=seed,
        val_ratio=val_ratio,
        images=dict(train=int((split == 'train').sum()), val=int((split == 'val').sum())),
        mean=train.mean(axis=(0, 1, 2)).tolist(),
        std=train.std(axis=(0, 1, 2)).tolist(),
    )


def main() -> None:
    args = parse_args()
    wanted = dict(seed=args.seed, val_ratio=args.val_ratio)
    stats_file = args.out / 'stats.json'
    if stats_file.exists():
        stats = json.loads(stats_file.read_text())
        found = {key: stats.get(key) for key in wanted}
        if found != wanted:
            raise SystemExit(
                f'{args.out} holds the split {found}, not {wanted}: '
                'remove it, or give another --out'
            )
    else:
        if args.out.exists() and any(args.out.iterdir()):
            raise SystemExit(f'{args.out} holds other files: remove them, or give another --out')
        # Written aside and renamed, so that an interrupted run leaves no half data set behind.
        part = args.out.with_name(args.out.name + '.part')
        shutil.rmtree(part, ignore_errors=True)
        stats = write_images(part, args.val_ratio, args.seed)
        (part / 'stats.json').write_text(json.dumps(stats, indent=2) + '\n')
        part.replace(args.out)
        print()
    counts = ', '.join(f'{count} {split}' for split, count in stats['images'].items())
    print(f'{args.out}: {counts} images; mean {stats["mean"]}, std {stats["std"]}')


if __name__ == '__main__':
    main()
