# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What the documentation says of the example configs is what the tools print and runs compute."""

import importlib.util
import itertools
import json
import re
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import toys  # noqa: F401  (lays configs out quickly)
from mmengine.config import Config
from mmengine.model import ImgDataPreprocessor
from mmengine.runner import Runner

mmcv = pytest.importorskip('mmcv')

REPOSITORY = Path(__file__).parents[1]
EXAMPLES = ['dataset_wins', 'top_level', 'splits_differ', 'mixed', 'suspicious']
CONSOLE = re.compile(r'^```console\n(.*?)^```$', re.MULTILINE | re.DOTALL)


@pytest.fixture
def tool(monkeypatch, capsys):
    """Run ``tools/NAME.py`` in this process; gives its exit status and what it prints."""

    def call(name, *args):
        path = REPOSITORY / 'tools' / f'{name}.py'
        spec = importlib.util.spec_from_file_location(f'{name}_tool', path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        monkeypatch.setattr(sys, 'argv', [str(path), *args])
        capsys.readouterr()
        return module.main(), capsys.readouterr().out

    return call


@pytest.fixture
def folders(tmp_path):
    """Two folders of coloured images, laid out like the digits, in place of them."""
    generator = np.random.default_rng(0)
    for folder, split, label in itertools.product(
        ('digits', 'digits_b'), ('train', 'val'), ('0', '1')
    ):
        for number in range(3):
            image = generator.integers(0, 256, (8, 8, 3), dtype=np.uint8)
            path = tmp_path / folder / split / label / f'{number}.png'
            assert mmcv.imwrite(image, str(path))
    return tmp_path


def runner_of(name, folders):
    cfg = Config.fromfile(REPOSITORY / 'configs' / 'examples' / f'{name}.py')
    options = dict(
        work_dir=str(folders / 'work'),
        experiment_name=f'example-{name}',
        log_level='ERROR',
        default_hooks=dict(checkpoint=dict(type='CheckpointHook', interval=-1, save_best=None)),
        train_cfg=dict(max_epochs=1),
    )
    for split in ('train', 'val', 'test'):
        options[f'{split}_dataloader'] = dict(batch_size=5, num_workers=0, persistent_workers=False)
    cfg.merge_from_dict(options)
    for split in ('train', 'val', 'test'):
        dataset = cfg[f'{split}_dataloader'].dataset
        for leaf in dataset.get('datasets', [dataset]):
            leaf.data_root = str(folders / Path(leaf.data_root).name)
    return Runner.from_cfg(cfg)


def record_inputs(runner):
    """Keep each image that the model gets, by split and file."""
    seen = {split: {} for split in ('train', 'val', 'test')}

    def keep(module, args, kwargs):
        split = module.data_preprocessor.split
        for image, sample in zip(kwargs['inputs'], kwargs['data_samples'], strict=True):
            seen[split][sample.img_path] = image.clone()

    runner.model.register_forward_pre_hook(keep, with_kwargs=True)
    return seen


@pytest.mark.parametrize('name', EXAMPLES)
def test_a_run_computes_what_explain_says(tool, folders, name, monkeypatch):
    monkeypatch.chdir(REPOSITORY)
    code, out = tool('explain', f'configs/examples/{name}.py', '--json')
    assert code == 0
    splits = json.loads(out)['splits']
    runner = runner_of(name, folders)
    seen = record_inputs(runner)
    runner.train()
    runner.test()
    for split, groups in splits.items():
        assert [len(group['datasets']) for group in groups] == [1] * len(groups)
        assert len(seen[split]) == 6 * len(groups)
        for path, image in seen[split].items():
            # Of a concatenation, the folders stand in the order of the groups.
            group = groups['digits_b' in path]
            fields = {field: found['value'] for field, found in group['fields'].items()}
            raw = torch.from_numpy(mmcv.imread(path).transpose(2, 0, 1).copy())
            expected = ImgDataPreprocessor(**fields)(dict(inputs=[raw]))['inputs'][0]
            assert torch.equal(image, expected), (split, path)


def test_all_examples_are_explained():
    found = {path.stem for path in (REPOSITORY / 'configs' / 'examples').glob('*.py')}
    assert found == {*EXAMPLES, 'common'}
    text = (REPOSITORY / 'README.md').read_text()
    shown = re.findall(r'^\$ python tools/explain\.py configs/examples/(\w+)\.py$', text, re.M)
    assert shown == EXAMPLES


def console(page):
    """The commands of a page's console blocks, each with the output that follows."""
    blocks = CONSOLE.findall((REPOSITORY / page).read_text())
    commands = [part for block in blocks for part in re.split(r'^\$ ', block, flags=re.M)[1:]]
    return [tuple(part.split('\n', 1)) for part in commands]


@pytest.mark.parametrize('page', ['README.md', 'docs/datasets.md'])
def test_documented_output_is_what_the_tools_print(tool, digits_root, tmp_path, page, monkeypatch):
    commands = console(page)
    (tmp_path / 'configs').symlink_to(REPOSITORY / 'configs')
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data' / 'digits').symlink_to(digits_root)
    monkeypatch.chdir(tmp_path)
    if any('mixed.py' in command and 'stats' in command for command, _ in commands):
        tool('prepare_demo_data', '--out', 'data/digits_b', '--seed', '1')
    assert commands
    for command, expected in commands:
        python, path, *args = shlex.split(command)
        assert (python, Path(path).parent) == ('python', Path('tools'))
        assert tool(Path(path).stem, *args) == (0, expected), command
