# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import argparse
import os
import re

import compare_weights
import launch
import pytest
import summarize_run
import torch
from mmengine.config import Config
from train import merge_train_args

TOY = """
custom_imports = dict(imports=['mmprefetch.demo'], allow_failed_imports=False)
default_scope = 'mmengine'
model = dict(type='SimpleClassifier', num_classes=10)
train_cfg = dict(by_epoch=True, max_epochs=1)
"""


def parse(*flags):
    parser = argparse.ArgumentParser()
    launch.add_common_args(parser)
    return parser.parse_args([str(flag) for flag in flags])


def train_args(**flags):
    return argparse.Namespace(**dict(dict(amp=False, auto_scale_lr=False, resume=None), **flags))


@pytest.fixture
def config_file(tmp_path):
    path = tmp_path / 'toy.py'
    path.write_text(TOY)
    return path


def test_common_flags(config_file, monkeypatch):
    monkeypatch.delenv('LOCAL_RANK', raising=False)
    options = ('--cfg-options', 'model.num_classes=3', 'train_cfg.max_epochs=5')
    cfg = launch.load_config(parse(config_file, '--launcher', 'none', *options))
    assert cfg.work_dir == 'work_dirs/toy'
    assert cfg.launcher == 'none'
    assert (cfg.model.num_classes, cfg.train_cfg.max_epochs) == (3, 5)
    assert 'LOCAL_RANK' not in os.environ

    cfg = launch.load_config(
        parse(config_file, '--work-dir', 'here', '--cfg-options', 'work_dir=x')
    )
    assert cfg.work_dir == 'here'
    cfg = launch.load_config(parse(config_file, '--cfg-options', 'work_dir=x'))
    assert cfg.work_dir == 'x'


@pytest.mark.parametrize('flag', ['--local_rank=3', '--local-rank=3'])
def test_local_rank_flag_reaches_mmengine(config_file, flag, monkeypatch):
    monkeypatch.setenv('LOCAL_RANK', '0')
    monkeypatch.delenv('LOCAL_RANK')
    launch.load_config(parse(config_file, flag))
    assert os.environ['LOCAL_RANK'] == '3'


def test_prefetch_flag_switches_a_config_that_knows_nothing_of_it(config_file):
    assert launch.load_config(parse(config_file)).train_cfg.get('type') is None
    cfg = launch.load_config(parse(config_file, '--prefetch'))
    assert cfg.train_cfg.type.startswith('Prefetch')
    assert cfg.train_cfg.max_epochs == 1


def test_process_group_is_left_to_mmengine_unless_torchrun_runs_on_cpu():
    cfg = Config(dict(launcher='none'))
    launch.init_cpu_group(cfg)
    assert 'model_wrapper_cfg' not in cfg and not torch.distributed.is_initialized()


def test_amp():
    cfg = Config(dict(optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1))))
    merge_train_args(cfg, train_args(amp=True))
    assert (cfg.optim_wrapper.type, cfg.optim_wrapper.loss_scale) == ('AmpOptimWrapper', 'dynamic')
    cfg = Config(dict(optim_wrapper=dict(type='AmpOptimWrapper', loss_scale=8.0)))
    merge_train_args(cfg, train_args(amp=True))
    assert cfg.optim_wrapper.loss_scale == 8.0
    cfg = Config(dict(optim_wrapper=dict(type='ApexOptimWrapper')))
    with pytest.raises(ValueError, match=r"optim_wrapper\.type .* not 'ApexOptimWrapper'"):
        merge_train_args(cfg, train_args(amp=True))


def test_auto_scale_lr():
    cfg = Config(dict(auto_scale_lr=dict(base_batch_size=32)))
    merge_train_args(cfg, train_args(auto_scale_lr=True))
    assert cfg.auto_scale_lr == dict(base_batch_size=32, enable=True)
    with pytest.raises(ValueError, match=r'auto_scale_lr=dict\(base_batch_size=\.\.\.\)'):
        merge_train_args(Config({}), train_args(auto_scale_lr=True))


@pytest.mark.parametrize(
    ('flag', 'load_from'), [('auto', None), ('x/epoch_1.pth', 'x/epoch_1.pth')]
)
def test_resume(flag, load_from):
    cfg = Config(dict(load_from='pretrained.pth', resume=False))
    merge_train_args(cfg, train_args(resume=flag))
    assert (cfg.resume, cfg.load_from) == (True, load_from)


def test_nothing_changes_without_flags():
    cfg = Config(dict(load_from='pretrained.pth', optim_wrapper=dict(type='OptimWrapper')))
    before = cfg.to_dict()
    merge_train_args(cfg, train_args())
    assert cfg.to_dict() == before


def test_stock_and_prefetch_twins_end_bit_equal(stock_run, prefetch_run, call_main):
    for name in ('epoch_1.pth', 'epoch_2.pth'):
        assert call_main(compare_weights, stock_run / name, prefetch_run / name) == 0
    epochs = [prefetch_run / 'epoch_1.pth', prefetch_run / 'epoch_2.pth']
    assert call_main(compare_weights, *epochs) == 1


@pytest.mark.parametrize('from_stock', [True, False])
def test_resume_goes_on_as_if_nothing_had_happened(
    train, stock_run, prefetch_run, call_main, tmp_path, from_stock
):
    """A checkpoint of mmengine's loops, resumed with --prefetch, and the other way round."""
    first = (stock_run if from_stock else prefetch_run) / 'epoch_1.pth'
    flags = ['--prefetch'] if from_stock else []
    options = ['train_cfg.max_epochs=2']
    train('digits_stock', tmp_path, '--resume', first, *flags, options=options)
    assert call_main(compare_weights, stock_run / 'epoch_2.pth', tmp_path / 'epoch_2.pth') == 0


def test_log_shows_progress_and_summary_shows_the_files(stock_run, call_main, capsys):
    (log,) = stock_run.glob('*/*.log')
    text = log.read_text()
    assert re.search(r'Epoch\(train\) +\[2\]\[40/45\].* eta: .* loss: ', text)
    accuracy = re.findall(r'accuracy/top1: ([\d.]+)', text)[-1]

    call_main(summarize_run, stock_run)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f'accuracy/top1: {float(accuracy):.2f}'
    files = dict(line.split(': ', 1) for line in lines[1:])
    assert files['log'].strip() == str(log)
    assert files['checkpoint'].strip() == str(stock_run / 'epoch_2.pth')
    assert files['curves'].strip() == str(log.parent / 'vis_data' / 'scalars.json')


def test_summary_without_a_run_says_what_to_do(call_main, tmp_path):
    with pytest.raises(SystemExit, match='holds no run: train with'):
        call_main(summarize_run, tmp_path)
