# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import socket
from pathlib import Path

import compare_weights
import pytest

DEMO = Path(__file__).parents[2] / 'configs' / 'demo'


def free_port():
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return str(listener.getsockname()[1])


def test_two_processes_end_bit_equal_with_and_without_prefetching(
    run_script, call_main, digits_options, digits_root, tmp_path
):
    for name in ('digits_stock', 'digits_prefetch'):
        options = ['--cfg-options', *digits_options, 'train_cfg.max_epochs=1']
        flags = ['--work-dir', tmp_path / name, *options]
        result = run_script('dist_train.sh', DEMO / f'{name}.py', 2, *flags, PORT=free_port())
        assert result.returncode == 0, result.stdout + result.stderr
        # 1438 images in batches of 32 for each of two processes.
        assert '[20/23]' in result.stdout
    checkpoints = [tmp_path / name / 'epoch_1.pth' for name in ('digits_stock', 'digits_prefetch')]
    assert call_main(compare_weights, *checkpoints) == 0

    options = ['--cfg-options', f'test_dataloader.dataset.data_root={digits_root}']
    flags = [checkpoints[0], 2, '--work-dir', tmp_path / 'test', *options]
    result = run_script('dist_test.sh', DEMO / 'digits_prefetch.py', *flags, PORT=free_port())
    assert result.returncode == 0, result.stdout + result.stderr
    assert 'accuracy/top1' in result.stdout


@pytest.mark.parametrize('name', ['dist_train', 'dist_test', 'slurm_train', 'slurm_test'])
def test_usage(run_script, name):
    result = run_script(f'{name}.sh')
    assert result.returncode == 2
    assert result.stderr.startswith('Usage: ') and f'tools/{name}.sh' in result.stderr


@pytest.mark.parametrize(
    ('name', 'args', 'expected'),
    [
        ('train', ['part', 'job', 'cfg.py', 'out'], 'train.py cfg.py --work-dir out'),
        ('test', ['part', 'job', 'cfg.py', 'a.pth'], 'test.py cfg.py a.pth'),
    ],
)
def test_slurm_command(run_script, tmp_path, monkeypatch, name, args, expected):
    srun = tmp_path / 'srun'
    srun.write_text('#!/bin/sh\necho "$@"\n')
    srun.chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:/usr/bin:/bin')
    result = run_script(f'slurm_{name}.sh', *args, '--prefetch', GPUS='4', SRUN_ARGS='-x bad')
    assert result.returncode == 0, result.stderr
    assert '-p part --job-name=job' in result.stdout
    assert '--ntasks=4 ' in result.stdout and ' -x bad ' in result.stdout
    assert result.stdout.rstrip().endswith(f'{expected} --launcher slurm --prefetch')
