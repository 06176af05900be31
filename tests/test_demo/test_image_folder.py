# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import mmcv
import numpy as np
import pytest
from mmengine.registry import DATASETS

from mmprefetch.demo import ImageFolderDataset


@pytest.fixture
def folder(tmp_path):
    """Three images of class 'cat' and two of 'ant', beside a file that is no image."""
    for name, count in (('cat', 3), ('ant', 2)):
        for index in range(count):
            image = np.full((4, 6, 3), 10 * index, dtype=np.uint8)
            mmcv.imwrite(image, str(tmp_path / 'train' / name / f'{index}.png'))
    (tmp_path / 'train' / 'cat' / 'notes.txt').write_text('no image')
    (tmp_path / 'empty' / 'cat').mkdir(parents=True)
    return tmp_path


def test_lists_classes_and_images_in_sorted_order(folder):
    dataset = ImageFolderDataset(data_root=str(folder), split='train')
    assert dataset.metainfo['classes'] == ('ant', 'cat')
    assert len(dataset) == 5
    infos = [dataset.get_data_info(index) for index in range(5)]
    assert [info['gt_label'] for info in infos] == [0, 0, 1, 1, 1]
    names = [info['img_path'].removeprefix(str(folder)) for info in infos]
    assert names == [
        *('/train/ant/0.png', '/train/ant/1.png'),
        *('/train/cat/0.png', '/train/cat/1.png', '/train/cat/2.png'),
    ]


def test_reads_images_through_the_pipeline(folder):
    cfg = dict(
        type='ImageFolderDataset',
        data_root=str(folder),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='PackImageInputs')],
    )
    item = DATASETS.build(cfg)[4]
    assert item['inputs'].shape == (3, 4, 6)
    assert (item['inputs'] == 20).all()
    assert item['data_samples'].gt_label.tolist() == [1]


def test_images_are_read_when_they_are_asked_for(folder):
    dataset = ImageFolderDataset(
        data_root=str(folder), pipeline=[dict(type='LoadImageFromFile')], lazy_init=False
    )
    mmcv.imwrite(np.full((4, 6, 3), 99, dtype=np.uint8), str(folder / 'train' / 'ant' / '0.png'))
    assert (dataset[0]['img'] == 99).all()


def test_own_metainfo_is_kept(folder):
    dataset = ImageFolderDataset(data_root=str(folder), metainfo=dict(source='drawn'))
    assert dataset.metainfo == dict(classes=('ant', 'cat'), source='drawn')


def test_missing_split_says_what_to_do(folder):
    with pytest.raises(FileNotFoundError, match=r"dataset\.data_root=.*'val'.*dataset\.split"):
        ImageFolderDataset(data_root=str(folder), split='val')


def test_split_without_images_says_where_it_looked(folder):
    with pytest.raises(FileNotFoundError, match=r'no image .*empty'):
        ImageFolderDataset(data_root=str(folder), split='empty')
