# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import re
import subprocess
import sys
from pathlib import Path

import pytest
from setuptools import find_packages

import mmprefetch

ROOT = Path(__file__).parents[1]
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] == {blocked!r}:
            raise ModuleNotFoundError('No module named ' + repr(name), name=name)

sys.meta_path.insert(0, Blocker())
import {imported}
"""


def import_without(blocked, imported):
    """Import a module in a new process in which another one cannot be found."""
    return subprocess.run(
        [sys.executable, '-c', BLOCKER.format(blocked=blocked, imported=imported)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def read_pins():
    """Read constraints.txt into a dict of package name and version."""
    lines = (ROOT / 'constraints.txt').read_text().splitlines()
    return dict(line.split('==') for line in lines if not line.startswith('#'))


def test_import_without_mmengine_names_the_install_command():
    result = import_without('mmengine', 'mmprefetch')
    assert result.returncode == 1
    assert re.search(r'ImportError: .*pip install .*mmengine', result.stderr)


def test_the_core_imports_without_mmcv():
    result = import_without('mmcv', 'mmprefetch')
    assert (result.returncode, result.stderr) == (0, '')


def test_the_demo_without_mmcv_names_the_install_command():
    result = import_without('mmcv', 'mmprefetch.demo')
    assert result.returncode == 1
    assert re.search(r'ImportError: .*pip install mmcv-lite', result.stderr)


def test_public_names():
    assert sorted(mmprefetch.__all__) == [
        'PrefetchDataPreprocessor',
        'PrefetchEpochBasedTrainLoop',
        'PrefetchHook',
        'PrefetchIterBasedTrainLoop',
        'PrefetchLoop',
        'PrefetchTestLoop',
        'PrefetchValLoop',
        '__version__',
        'deploy_config',
        'enable_prefetch',
        'load_preprocessor',
        'look_ahead',
    ]
    assert all(hasattr(mmprefetch, name) for name in mmprefetch.__all__)


def test_setup_reads_the_version_of_the_package():
    result = subprocess.run(
        [sys.executable, 'setup.py', '--version'], cwd=ROOT, capture_output=True, text=True
    )
    assert result.stdout.split()[-1] == mmprefetch.__version__


def test_every_folder_with_modules_is_packaged():
    packages = set(find_packages(ROOT, include=['mmprefetch', 'mmprefetch.*']))
    folders = {path.parent for path in (ROOT / 'mmprefetch').rglob('*.py')}
    assert packages == {'.'.join(folder.relative_to(ROOT).parts) for folder in folders}


@pytest.mark.parametrize('name', ['runtime', 'mminstall', 'demo', 'tests'])
def test_lower_bounds_are_the_tested_versions(name):
    pins = read_pins()
    for line in (ROOT / 'requirements' / f'{name}.txt').read_text().splitlines():
        match = re.match(r'([\w-]+)>=([\d.]+)', line)
        assert match is None or pins[match[1]] == match[2]


def test_mmengine_and_mmcv_are_not_forced_on_an_environment():
    runtime = (ROOT / 'requirements' / 'runtime.txt').read_text()
    assert 'mmengine' not in runtime and 'mmcv' not in runtime
    assert 'mmcv' not in (ROOT / 'requirements' / 'demo.txt').read_text()
