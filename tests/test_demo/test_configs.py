# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import json
from pathlib import Path

import pytest
from mmengine.config import Config

CONFIGS = Path(__file__).parents[2] / 'configs' / 'demo'
SPLITS = ('train', 'val', 'test')


@pytest.fixture
def prefetch():
    return Config.fromfile(CONFIGS / 'digits_prefetch.py')


@pytest.fixture
def stock():
    return Config.fromfile(CONFIGS / 'digits_stock.py')


def test_normalization_is_the_measured_one(prefetch, digits_root):
    measured = json.loads((digits_root / 'stats.json').read_text())
    for split in SPLITS:
        fields = prefetch[f'{split}_dataloader'].dataset.data_preprocessor
        assert fields.mean == [round(value, 2) for value in measured['mean']]
        assert fields.std == [round(value, 2) for value in measured['std']]
        assert fields.bgr_to_rgb is True


def test_prefetch_config_uses_the_prefetch_classes(prefetch):
    assert prefetch.train_cfg.type == 'PrefetchLoop'
    assert prefetch.val_cfg.type == 'PrefetchValLoop'
    assert prefetch.test_cfg.type == 'PrefetchTestLoop'
    assert prefetch.model.data_preprocessor == dict(type='PrefetchDataPreprocessor')


def test_the_stock_twin_differs_in_loops_and_preprocessor_only(prefetch, stock):
    fields = prefetch.train_dataloader.dataset.data_preprocessor
    for split in SPLITS:
        loader = prefetch[f'{split}_dataloader'].to_dict()
        loader['dataset'].pop('data_preprocessor')
        assert stock[f'{split}_dataloader'] == loader
    assert stock.model.data_preprocessor == dict(type='ImgDataPreprocessor', **fields)
    assert stock.train_cfg == dict(by_epoch=True, max_epochs=10, val_interval=1)
    assert stock.val_cfg == stock.test_cfg == {}

    same = set(prefetch) - {f'{split}_{part}' for split in SPLITS for part in ('cfg', 'dataloader')}
    assert set(prefetch) == set(stock)
    for key in same - {'model'}:
        assert prefetch[key] == stock[key], key
    for cfg in (prefetch, stock):
        del cfg.model['data_preprocessor']
    assert prefetch.model == stock.model
