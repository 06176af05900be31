# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Run the tools as users do, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / 'tools'
# The tools import what they share by its bare name, as scripts in one folder do.
sys.path.insert(0, str(TOOLS))


@pytest.fixture(scope='session')
def run_tool():
    """Run a Python tool and return the finished process; fails unless it exits with ``rc``."""

    def run(name, *args, rc=0, cwd=ROOT):
        command = [sys.executable, TOOLS / name, *map(str, args)]
        result = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
        assert result.returncode == rc, result.stdout + result.stderr
        return result

    return run


@pytest.fixture(scope='session')
def digits_options(digits_root):
    """Config options that point the demo's configs to the tests' images."""
    return [f'{split}_dataloader.dataset.data_root={digits_root}' for split in ('train', 'val')]


@pytest.fixture(scope='session')
def train(run_tool, digits_options):
    """Train one of the demo's configs and return its work directory."""

    def run(config, work_dir, *flags, options=()):
        config = ROOT / 'configs' / 'demo' / f'{config}.py'
        options = [*digits_options, *options]
        run_tool('train.py', config, '--work-dir', work_dir, *flags, '--cfg-options', *options)
        return work_dir

    return run


@pytest.fixture(scope='session')
def stock_run(train, tmp_path_factory):
    """Work directory of two epochs under mmengine's own loops."""
    work_dir = tmp_path_factory.mktemp('stock')
    return train('digits_stock', work_dir, options=['train_cfg.max_epochs=2'])


@pytest.fixture(scope='session')
def prefetch_run(train, tmp_path_factory):
    """Work directory of the same two epochs with prefetching."""
    work_dir = tmp_path_factory.mktemp('prefetch')
    return train('digits_prefetch', work_dir, options=['train_cfg.max_epochs=2'])


@pytest.fixture(scope='session')
def run_script(tmp_path_factory):
    """Run a shell tool with this Python, in a folder where mmengine may leave its own files."""
    folder = tmp_path_factory.mktemp('script')

    def run(name, *args, **environment):
        return subprocess.run(
            ['bash', TOOLS / name, *map(str, args)],
            cwd=folder,
            env=dict(os.environ, PYTHON=sys.executable, **environment),
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def call_main(monkeypatch):
    """Call a tool's main function with these arguments in this process."""

    def call(module, *args):
        monkeypatch.setattr(sys, 'argv', [module.__file__, *map(str, args)])
        return module.main()

    return call
