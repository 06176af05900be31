# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import json

import mmcv
import numpy as np
import prepare_demo_data
import pytest
from prepare_demo_data import split_of
from sklearn.datasets import load_digits


def read_all(root):
    """Map each image's number to its split, class and pixels."""
    return {
        int(path.stem): (path.parts[-3], int(path.parts[-2]), mmcv.imread(str(path)))
        for path in root.rglob('*.png')
    }


def test_writes_every_scan_once_in_its_class(digits_root):
    digits = load_digits()
    images = read_all(digits_root)
    assert sorted(images) == list(range(1797))
    for index, (_, label, pixels) in images.items():
        expected = np.rint(digits.images[index] * 255 / 16)
        assert label == digits.target[index]
        assert pixels.shape == (8, 8, 3) and (pixels == expected[..., None]).all()


def test_stats_are_those_of_the_training_images(digits_root):
    stats = json.loads((digits_root / 'stats.json').read_text())
    images = read_all(digits_root)
    train = np.stack([pixels for split, _, pixels in images.values() if split == 'train'])
    assert stats['images'] == dict(train=len(train), val=1797 - len(train))
    np.testing.assert_allclose(stats['mean'], train.mean((0, 1, 2), dtype=np.float64))
    np.testing.assert_allclose(stats['std'], train.std((0, 1, 2), dtype=np.float64))


def test_split_takes_the_same_part_of_every_class_and_follows_the_seed():
    labels = np.repeat(np.arange(3), [10, 20, 40])
    split = split_of(labels, val_ratio=0.2, seed=0)
    assert [int((split[labels == label] == 'val').sum()) for label in range(3)] == [2, 4, 8]
    assert (split == split_of(labels, val_ratio=0.2, seed=0)).all()
    assert (split != split_of(labels, val_ratio=0.2, seed=1)).any()


def test_a_second_run_changes_nothing(call_main, digits_root):
    before = {path: path.stat().st_mtime_ns for path in digits_root.rglob('*')}
    call_main(prepare_demo_data, '--out', digits_root)
    assert before == {path: path.stat().st_mtime_ns for path in digits_root.rglob('*')}


def test_refuses_to_mix_with_another_split(call_main, digits_root):
    with pytest.raises(SystemExit, match=r"holds the split \{'seed': 0"):
        call_main(prepare_demo_data, '--out', digits_root, '--seed', 1)


def test_refuses_to_write_among_other_files(call_main, tmp_path):
    (tmp_path / 'mine.txt').write_text('keep me')
    with pytest.raises(SystemExit, match='holds other files'):
        call_main(prepare_demo_data, '--out', tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ['mine.txt']


def test_an_interrupted_run_is_begun_again(call_main, tmp_path):
    (tmp_path / 'digits.part' / 'train' / '0').mkdir(parents=True)
    (tmp_path / 'digits.part' / 'train' / '0' / '9999.png').write_text('half')
    call_main(prepare_demo_data, '--out', tmp_path / 'digits')
    assert [path.name for path in tmp_path.iterdir()] == ['digits']
    assert sorted(read_all(tmp_path / 'digits')) == list(range(1797))
