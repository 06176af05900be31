# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Measured statistics are those of numpy over all pixels; written, they are what a config says."""

import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from mmcv.transforms import TRANSFORMS, BaseTransform
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.registry import DATASETS

import mmprefetch.demo  # noqa: F401
from mmprefetch.statistics.measure import DatasetStatistics, measure, measure_split
from mmprefetch.statistics.moments import Moments
from mmprefetch.statistics.write import paste_place, write

ROOT = Path(__file__).parents[2]
SIZES = [(5, 7), (4, 4), (9, 3), (1, 1), (6, 8), (2, 5)]
STATS = dict(mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])


def images_of(dtype, channels, offset=0):
    generator = np.random.default_rng(5)
    made = []
    for size in SIZES:
        shape = (channels, *size)
        if np.issubdtype(dtype, np.integer):
            info = np.iinfo(dtype)
            image = generator.integers(info.min, info.max, shape, dtype=dtype, endpoint=True)
        else:
            image = (generator.normal(size=shape) + offset).astype(dtype)
        made.append(image)
    return made


def two_pass(images):
    pixels = np.concatenate([image.reshape(len(image), -1) for image in images], axis=1)
    pixels = pixels.astype(np.float64)
    return pixels.mean(axis=1), pixels.std(axis=1)


class Tensors(torch.utils.data.Dataset):
    """A dataset without a pipeline."""

    def __init__(self, images):
        self.images = images

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return dict(inputs=torch.from_numpy(self.images[index]))


@pytest.mark.parametrize('channels', [1, 3, 4])
@pytest.mark.parametrize('dtype', [np.uint8, np.uint16, np.int16, np.float16, np.float32])
def test_equals_two_passes_over_all_pixels(dtype, channels):
    images = images_of(dtype, channels)
    found = measure(Tensors(images))
    mean, std = two_pass(images)
    assert (found.images, found.failures, found.dtypes) == (6, [], [np.dtype(dtype).name])
    np.testing.assert_allclose(np.array(found.moments.mean, float), mean, rtol=1e-13, atol=1e-13)
    np.testing.assert_allclose(found.moments.std, std, rtol=1e-13)


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16, np.float32])
def test_any_number_of_workers_gives_the_same_to_the_bit(dtype):
    dataset = Tensors(images_of(dtype, 3))
    assert measure(dataset, workers=0).moments == measure(dataset, workers=2).moments


@pytest.mark.parametrize('dtype', [np.uint8, np.uint16])
def test_integers_are_exact(dtype):
    images = images_of(dtype, 2)
    values = [[int(value) for image in images for value in image[c].flat] for c in range(2)]
    moments = measure(Tensors(images)).moments
    for channel, own in enumerate(values):
        mean = Fraction(sum(own), len(own))
        assert moments.count == len(own)
        assert moments.mean[channel] == mean
        assert moments.squares[channel] == sum((value - mean) ** 2 for value in own)
    backwards = [Moments.of(image) for image in images[::-1]]
    merged = backwards[0]
    for other in backwards[1:]:
        merged = merged.merge(other)
    assert merged == moments


def test_floats_far_from_zero_lose_nothing():
    images = images_of(np.float64, 3, offset=1e8)
    np.testing.assert_allclose(measure(Tensors(images)).moments.std, two_pass(images)[1], rtol=1e-7)


def test_integers_and_floats_merge():
    images = [*images_of(np.uint8, 3), *images_of(np.float32, 3)]
    found = measure(Tensors(images))
    np.testing.assert_allclose(np.array(found.moments.mean, float), two_pass(images)[0], rtol=1e-12)
    np.testing.assert_allclose(found.moments.std, two_pass(images)[1], rtol=1e-12)
    assert found.dtypes == ['uint8', 'float32']


@pytest.mark.parametrize(('count', 'expected'), [(2, [0, 3]), (4, [0, 1, 3, 4]), (99, range(6))])
def test_max_images_are_spread_evenly(count, expected):
    images = images_of(np.uint8, 3)
    found = measure(Tensors(images), max_images=count)
    assert found.images == len(expected)
    assert found.moments == measure(Tensors([images[index] for index in expected])).moments


def test_what_is_no_image_is_named_and_left_out():
    images = images_of(np.float32, 3)
    expected = measure(Tensors(images[:3])).moments
    images[3] = np.full((3, 2, 2), np.nan, np.float32)
    images[4] = np.zeros((1, 2, 2), np.float32)
    images[5] = np.zeros((3, 2, 2, 2), np.float32)
    found = measure(Tensors(images), workers=1)
    assert found.moments == expected
    assert [name for name, _ in found.failures] == ['item 3', 'item 4', 'item 5']
    for (_, reason), word in zip(found.failures, ['finite', '1 channel', '(C, H, W)'], strict=True):
        assert word in reason


@pytest.mark.parametrize(
    ('item', 'words'), [(dict(label=1), ("'inputs'", 'label')), (None, ('nothing',))]
)
def test_items_without_an_image(item, words):
    found = measure([item])
    assert found.moments is None and found.images == 0
    assert all(word in found.failures[0][1] for word in words)


# -- through a config ---------------------------------------------------------------------------


@TRANSFORMS.register_module(force=True)
class Blacken(BaseTransform):
    """An augmentation, which has to be left out."""

    def transform(self, results):
        results['img'] = results['img'] * 0
        return results


@TRANSFORMS.register_module(force=True)
class LoadBrokenAnnotations(BaseTransform):
    """Annotations, which are not needed."""

    def transform(self, results):
        raise OSError('no annotations')


@DATASETS.register_module(force=True)
class Files(BaseDataset):
    """Image files."""

    def load_data_list(self):
        return [dict(img_path=str(path)) for path in sorted(Path(self.data_root).iterdir())]


@DATASETS.register_module(force=True)
class Joined(torch.utils.data.Dataset):
    """A wrapper, which is not built."""

    def __init__(self, datasets):
        raise AssertionError('wrappers are not needed')


@pytest.fixture
def folder(tmp_path):
    """Write images into a folder; return it and the images as they are decoded, (C, H, W)."""

    def write_images(name='images', dtype=np.uint8, channels=3, scale=1):
        root = tmp_path / name
        root.mkdir()
        images = [image // scale for image in images_of(dtype, channels)]
        for index, image in enumerate(images):
            assert cv2.imwrite(str(root / f'{index}.png'), np.moveaxis(image, 0, -1))
        return root, images

    return write_images


def dataset_cfg(root, **more):
    pipeline = [
        dict(type='LoadImageFromFile', color_type='unchanged'),
        dict(type='LoadBrokenAnnotations'),
        dict(type='Blacken'),
        dict(type='PackImageInputs'),
    ]
    return dict(type='Files', data_root=str(root), pipeline=pipeline, **more)


def config_of(dataset, **model):
    return Config(
        dict(
            model=dict(
                type='SimpleClassifier',
                num_classes=2,
                data_preprocessor=dict(type='PrefetchDataPreprocessor', **model),
            ),
            train_dataloader=dict(batch_size=2, num_workers=0, dataset=dataset),
            train_cfg=dict(type='PrefetchLoop', max_epochs=1),
        )
    )


@pytest.mark.parametrize(
    ('dtype', 'channels'), [(np.uint8, 1), (np.uint8, 3), (np.uint8, 4), (np.uint16, 3)]
)
def test_images_are_taken_as_they_are_loaded(folder, dtype, channels):
    root, images = folder(dtype=dtype, channels=channels)
    (found,) = measure_split(config_of(dataset_cfg(root)))
    assert found.moments == measure(Tensors(images)).moments
    assert (found.key, found.type_name) == ('train_dataloader.dataset', 'Files')


@pytest.mark.parametrize(
    ('channels', 'order'), [(3, [2, 1, 0]), (4, [2, 1, 0, 3]), (1, [0])]
)  # fmt: skip
@pytest.mark.parametrize('where', ['model', 'dataset'])
def test_reported_in_the_order_of_the_preprocessor(folder, channels, order, where):
    root, images = folder(channels=channels)
    fields = dict(bgr_to_rgb=True)
    bound = dict(data_preprocessor=fields) if where == 'dataset' else {}
    cfg = config_of(dataset_cfg(root, **bound), **(fields if where == 'model' else {}))
    (found,) = measure_split(cfg)
    mean, std = two_pass(images)
    assert found.measured() == dict(
        mean=[float(f'{mean[c]:.6g}') for c in order], std=[float(f'{std[c]:.6g}') for c in order]
    )
    pasted = eval(f'dict({found.snippet()})')['data_preprocessor']
    assert pasted == dict(found.measured(), bgr_to_rgb=True)


def test_each_dataset_of_a_concatenation_is_measured_on_its_own(folder):
    first, second = folder('first'), folder('second', scale=3)
    parts = [
        dataset_cfg(first[0]),
        dict(type='Joined', datasets=[dataset_cfg(second[0], data_preprocessor=STATS)]),
    ]
    found = measure_split(config_of(dict(type='Joined', datasets=parts)))
    assert [result.key for result in found] == [
        'train_dataloader.dataset.datasets.0',
        'train_dataloader.dataset.datasets.1.datasets.0',
    ]
    for result, (_, images) in zip(found, (first, second), strict=True):
        assert result.moments == measure(Tensors(images)).moments


def test_an_unreadable_image_is_named_and_not_replaced_by_another(folder):
    root, images = folder()
    (root / '2.png').write_bytes(b'no image')
    (found,) = measure_split(config_of(dataset_cfg(root)), workers=2)
    assert [name for name, _ in found.failures] == [str(root / '2.png')]
    assert found.moments == measure(Tensors(images[:2] + images[3:])).moments


def test_a_constant_channel_gets_a_std_that_can_be_divided_by():
    image = np.stack([np.full((3, 4), 7, np.uint8), np.arange(12, dtype=np.uint8).reshape(3, 4)])
    found = measure(Tensors([image]))
    assert found.constant == [0]
    assert found.measured() == dict(mean=[7.0, 5.5], std=[1.0, 3.45205])


def test_split_that_the_config_lacks(folder):
    with pytest.raises(ValueError, match='no val_dataloader; it has: train_dataloader'):
        measure_split(config_of(dataset_cfg(folder()[0])), 'val')


# -- writing ------------------------------------------------------------------------------------

BASE = """\
# The photographs.  é
own = dict(mean=[1.0, 2.0, 3.0], std=(4.0, 5.0, 6.0), bgr_to_rgb=True)  # of last year

train_dataloader = dict(
    batch_size=2, num_workers=0,
    dataset=dict(type='Files', data_root={root!r},  # é
                 pipeline=[dict(type='LoadImageFromFile')], data_preprocessor=own))
"""
TOP = """\
_base_ = 'base.py'
model = dict(type='SimpleClassifier', num_classes=2,
             data_preprocessor=dict(type='PrefetchDataPreprocessor', pad_size_divisor=4))
train_cfg = dict(type='PrefetchLoop', max_epochs=1)
"""


@pytest.fixture
def config_files(tmp_path, folder):
    """Write a config with a base; return its file, the base's and the images."""

    def write_configs(base=BASE, top=TOP, newline='\n', **folder_kwargs):
        root, images = folder(**folder_kwargs)
        text = base.replace('{root!r}', repr(str(root)))
        files = tmp_path / 'top.py', tmp_path / 'base.py'
        for path, content in zip(files, (top, text), strict=True):
            path.write_text(content, encoding='utf-8', newline=newline)
        return *files, images

    return write_configs


def measured_and_written(path):
    results = measure_split(Config.fromfile(path))
    return results, write(results)


@pytest.mark.parametrize('newline', ['\n', '\r\n'])
def test_only_the_values_are_written(config_files, newline):
    top, base, _ = config_files(newline=newline)
    before = base.read_bytes()
    results, places = measured_and_written(top)
    new = results[0].measured()
    expected = before.replace(b'[1.0, 2.0, 3.0]', repr(new['mean']).encode())
    expected = expected.replace(b'(4.0, 5.0, 6.0)', repr(tuple(new['std'])).encode())
    assert base.read_bytes() == expected and expected != before
    assert top.read_text() == TOP
    assert [place.rpartition('base.py:')[2] for place in places] == ['2']
    cfg = Config.fromfile(top).train_dataloader.dataset.data_preprocessor
    assert (list(cfg.mean), list(cfg.std)) == (new['mean'], new['std'])


LAZY = """\
from mmengine.config import read_base

with read_base():
    from .base import *

train_dataloader.update(num_workers=0)
"""


def test_a_config_that_imports_its_base(config_files):
    top, base, _ = config_files(top=LAZY + TOP.partition('\n')[2])
    results, places = measured_and_written(top)
    cfg = Config.fromfile(top).train_dataloader.dataset.data_preprocessor
    assert list(cfg.mean) == results[0].measured()['mean'] != [1.0, 2.0, 3.0]
    assert base.read_text(encoding='utf-8').endswith('data_preprocessor=own))\n')
    assert len(places) == 1


SPREAD = """\
MEAN = [
    1.0,  # red
    1.0, 1.0]
train_dataloader = dict(batch_size=2, dataset={
    'type': 'Files', 'data_root': {root!r}, 'pipeline': [dict(type='LoadImageFromFile')],
    'data_preprocessor': {'mean': MEAN, 'std': [4.0] * 3}})
train_dataloader['dataset']['metainfo'] = dict(mean=[1.0] * 3)
"""


def test_values_in_variables_and_repeated_ones_are_written(config_files):
    top, base, _ = config_files(base=SPREAD)
    results, places = measured_and_written(top)
    new = results[0].measured()
    cfg = Config.fromfile(top).train_dataloader.dataset
    assert cfg.data_preprocessor == new
    assert cfg.metainfo.mean == [1.0] * 3
    assert base.read_text().startswith(f'MEAN = {new["mean"]!r}\ntrain_dataloader')
    assert len(places) == 2


@pytest.mark.parametrize(
    ('base', 'words'),
    [
        (BASE.replace(', data_preprocessor=own', ''), ('no mean is bound',)),
        (BASE.replace('[1.0, 2.0, 3.0]', 'sorted([1.0, 2.0, 3.0])'), ('base.py', 'written out')),
    ],
)
def test_nothing_is_written_where_there_is_nothing_to_replace(config_files, base, words):
    top, path, _ = config_files(base=base)
    before = path.read_bytes()
    results = measure_split(Config.fromfile(top))
    with pytest.raises(ValueError) as caught:
        write(results)
    assert all(word in str(caught.value) for word in words)
    assert path.read_bytes() == before
    assert 'base.py:6)' in paste_place(results[0], str(top))


def test_the_models_own_values_are_not_written_over(config_files):
    stats = 'mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])'
    top, _, _ = config_files(
        base=BASE.replace(', data_preprocessor=own', ''),
        top=TOP.replace('pad_size_divisor=4)', stats),
    )
    with pytest.raises(ValueError, match='no mean is bound to this dataset'):
        measured_and_written(top)


def test_values_that_hold_for_datasets_of_other_statistics(tmp_path):
    text = 'train_dataloader = dict(x=dict(mean=[{}], std=[{}]))\n'
    (tmp_path / 'c.py').write_text(text.format(1.0, 2.0))
    fields = {
        name: dict(value=[value], key='train_dataloader.x', file=f'{tmp_path / "c.py"}:1')
        for name, value in dict(mean=1.0, std=2.0).items()
    }
    results = [
        DatasetStatistics(f'train_dataloader.{name}', '', Moments(1, (value,), (9.0,)), 1,
                          fields=fields)
        for name, value in dict(one=3.0, other=4.0).items()
    ]  # fmt: skip
    with pytest.raises(ValueError, match=r'several datasets.*train_dataloader\.other'):
        write(results)
    assert (tmp_path / 'c.py').read_text() == text.format(1.0, 2.0)
    assert write(results[:1]) == [f'{tmp_path / "c.py"}:1']
    assert (tmp_path / 'c.py').read_text() == text.format(3.0, 3.0)


# -- the tool -----------------------------------------------------------------------------------


def run_tool(*args):
    command = [sys.executable, ROOT / 'tools' / 'dataset_stats.py', *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


DEMO = ROOT / 'configs' / 'demo' / 'digits_prefetch.py'


def test_the_tool_gives_what_the_demos_images_were_written_with(digits_root):
    option = f'train_dataloader.dataset.data_root={digits_root}'
    result = run_tool(DEMO, '--workers', 2, '--cfg-options', option)
    assert result.returncode == 0, result.stderr
    comment, snippet = result.stdout.splitlines()
    assert '1438 uint8 images' in comment and 'bgr_to_rgb=True' in comment
    fields = eval(f'dict({snippet})')['data_preprocessor']
    assert [round(value, 2) for value in fields['mean']] == [77.91] * 3
    assert [round(value, 2) for value in fields['std']] == [95.87] * 3


def test_the_tool_writes_names_what_it_cannot_read_and_goes_on(config_files):
    base = BASE.replace("type='Files'", "type='ImageFolderDataset', split=''")
    top = TOP + "custom_imports = dict(imports=['mmprefetch', 'mmprefetch.demo'])\n"
    # One class folder: the images' own.
    config, path, images = config_files(base=base, top=top)
    root = path.parent / 'images'
    folder_of_classes = path.parent / 'classes'
    folder_of_classes.mkdir()
    root.rename(folder_of_classes / 'images')
    path.write_text(path.read_text().replace(repr(str(root)), repr(str(folder_of_classes))))
    for index in (1, 4):
        (folder_of_classes / 'images' / f'{index}.png').write_bytes(b'')
    result = run_tool(config, '--write', '--workers', 0)
    assert result.returncode == 1
    for index in (1, 4):
        assert f'cannot read {folder_of_classes / "images" / f"{index}.png"}' in result.stderr
    assert 'error: 2 images could not be read' in result.stderr and 'written: ' in result.stderr
    mean, _ = two_pass([image for index, image in enumerate(images) if index not in (1, 4)])
    fields = Config.fromfile(config).train_dataloader.dataset.data_preprocessor
    np.testing.assert_allclose(fields.mean, mean[::-1], rtol=1e-5)


def test_the_tool_says_where_to_paste(digits_root, tmp_path):
    config = tmp_path / 'c.py'
    config.write_text(
        f'_base_ = {str(DEMO)!r}\n'
        f'train_dataloader = dict(dataset=dict(data_root={str(digits_root)!r},\n'
        'data_preprocessor=dict(_delete_=True)))\n'
    )
    result = run_tool(config, '--write', '--max-images', 5)
    assert result.returncode == 1
    assert 'nothing is written' in result.stderr
    assert f'into train_dataloader.dataset ({config}:' in result.stderr
    assert '5 uint8 images' in result.stdout
