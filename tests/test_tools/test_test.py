# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import re
from pathlib import Path

import pytest
from mmengine.config import Config

ROOT = Path(__file__).parents[2]


def read_accuracy(text, kind):
    return re.findall(rf'Epoch\({kind}\).*accuracy/top1: ([\d.]+)', text)[-1]


@pytest.mark.parametrize('flags', [['digits_stock', '--prefetch'], ['digits_prefetch']])
def test_gives_the_accuracy_of_the_last_validation(
    run_tool, stock_run, digits_options, digits_root, tmp_path, flags
):
    (log,) = stock_run.glob('*/*.log')
    config, *flags = flags
    result = run_tool(
        'test.py',
        ROOT / 'configs' / 'demo' / f'{config}.py',
        stock_run / 'epoch_2.pth',
        *('--work-dir', tmp_path, *flags, '--cfg-options'),
        *(*digits_options, f'test_dataloader.dataset.data_root={digits_root}'),
    )
    assert read_accuracy(result.stdout, 'test') == read_accuracy(log.read_text(), 'val')


def test_augmentation_of_the_config_is_switched_on():
    import importlib.util

    spec = importlib.util.spec_from_file_location('tools_test', ROOT / 'tools' / 'test.py')
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    dataset = dict(type='RepeatDataset', dataset=dict(type='Images', pipeline=['plain']))
    cfg = Config(dict(model=dict(type='Model'), test_dataloader=dict(dataset=dataset)))
    with pytest.raises(ValueError, match='--tta: the config has no tta_model'):
        tool.with_augmentation(cfg)
    cfg.merge_from_dict(dict(tta_model=dict(type='TTA'), tta_pipeline=['augmented']))
    tool.with_augmentation(cfg)
    assert cfg.model == dict(type='TTA', module=dict(type='Model'))
    assert cfg.test_dataloader.dataset.dataset.pipeline == ['augmented']
