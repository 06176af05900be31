# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A model built from the deploy config predicts what the run predicted, without mmprefetch."""

import subprocess
import sys

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.registry import MODELS
from mmengine.runner import load_checkpoint
from test_called_preprocessor import tta_config  # and with it the classes registered there

from mmprefetch import PrefetchDataPreprocessor, deploy_config

FIRST = dict(mean=[9.0, 8.0, 7.0], std=[2.0, 3.0, 4.0])
SECOND = dict(mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], bgr_to_rgb=False)


def test_predictions_of_the_run(tmp_path):
    cfg = toys.config(tmp_path)
    for split, fields in (('train', FIRST), ('val', SECOND)):
        cfg[f'{split}_dataloader']['dataset']['data_preprocessor'] = dict(fields)
    runner, _ = toys.run(toys.prefetching(cfg))
    items = [toys.ToyImages()[index] for index in range(4)]
    batch = {key: [item[key] for item in items] for key in ('inputs', 'data_samples')}
    runner.model.eval()
    runner.model.data_preprocessor.split = 'val'
    with torch.no_grad():
        expected = [sample.score for sample in runner.model.val_step(batch)]
    (written,) = tmp_path.glob('*_deploy.py')
    made = Config.fromfile(written)
    assert 'custom_imports' not in made and made.val_cfg.type == 'ValLoop'
    assert made.train_cfg == dict(type='EpochBasedTrainLoop', max_epochs=2, val_interval=1)
    for split in ('train', 'val'):
        assert 'data_preprocessor' not in made[f'{split}_dataloader'].dataset
    model = MODELS.build(made.model)
    assert not isinstance(model.data_preprocessor, PrefetchDataPreprocessor)
    load_checkpoint(model, str(tmp_path / 'epoch_2.pth'), map_location='cpu')
    model.eval()
    with torch.no_grad():
        found = [sample.score for sample in model.test_step(batch)]
    assert all(map(torch.equal, expected, found))


SCRIPT = """
import sys
sys.modules['mmprefetch'] = None  # it cannot be imported
from mmengine.config import Config
from mmengine.model import ImgDataPreprocessor
from mmengine.registry import MODELS
cfg = Config.fromfile({path!r})
made = MODELS.build(cfg.model.data_preprocessor)
assert type(made) is ImgDataPreprocessor and made.mean.flatten().tolist() == [9.0, 8.0, 7.0]
"""


def test_it_needs_no_mmprefetch(tmp_path):
    cfg = toys.config(tmp_path, val=False)
    cfg['model']['data_preprocessor'] = dict(type='PrefetchDataPreprocessor', pad_size_divisor=4)
    cfg['train_dataloader']['dataset']['data_preprocessor'] = dict(FIRST)
    path = tmp_path / 'deploy.py'
    deploy_config(toys.prefetching(cfg), 'train').dump(str(path))
    subprocess.run([sys.executable, '-c', SCRIPT.format(path=str(path))], check=True)


def test_the_top_level_is_merged_where_it_counts():
    top = dict(mean=[5.0] * 3, std=[6.0] * 3)
    cfg = Config(dict(toys.config('x'), data_preprocessor=top))
    assert deploy_config(cfg, 'val').model.data_preprocessor == toys.IMG
    cfg.model.data_preprocessor = dict(type='PrefetchDataPreprocessor', pad_value=7)
    made = deploy_config(cfg, 'val')
    assert made.model.data_preprocessor == dict(type='ImgDataPreprocessor', pad_value=7, **top)
    assert 'data_preprocessor' not in made


def test_a_preprocessor_inside_another_and_a_wrapper_for_augmentation():
    own = dict(type='Branches', data_preprocessor=dict(toys.IMG))
    cfg = Config(toys.config('x', preprocessor=own))
    cfg.val_dataloader.dataset.data_preprocessor = dict(FIRST)
    made = deploy_config(cfg, 'val').model.data_preprocessor
    assert made == dict(type='Branches', data_preprocessor=dict(toys.IMG, **FIRST))
    cfg = Config(tta_config('x', True, dict(toys.IMG)))
    made = deploy_config(cfg).model.module.data_preprocessor
    assert made.mean == [9.0, 8.0, 7.0] and made.pad_size_divisor == 4


def test_parts_that_differ():
    cfg = Config(toys.config('x'))
    part = dict(cfg.val_dataloader.dataset)
    cfg.val_dataloader.dataset = dict(type='ConcatDataset', datasets=[
        dict(part, data_preprocessor=FIRST), dict(part, data_preprocessor=SECOND)])  # fmt: skip
    keys = [f'val_dataloader.dataset.datasets.{n}' for n in range(2)]
    with pytest.raises(ValueError, match='part=None') as caught:
        deploy_config(cfg, 'val')
    assert all(key in str(caught.value) for key in keys)
    for key, fields in zip(keys, (FIRST, SECOND), strict=True):
        made = deploy_config(cfg, 'val', key).model.data_preprocessor
        assert made.mean == fields['mean']


def test_a_split_that_is_not_there():
    with pytest.raises(ValueError, match=r"split='test': the config has no test_dataloader"):
        deploy_config(Config(toys.config('x')))
