# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from mmengine.config import Config
from mmengine.dataset import BaseDataset
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, MODELS

from mmprefetch.fields.explain import explain, render
from mmprefetch.fields.locate import ConfigFile

REPOSITORY = Path(__file__).parents[2]
TOOL = REPOSITORY / 'tools' / 'explain.py'
RGB = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
BGR = {name: values[::-1] for name, values in RGB.items()}
DATA = 'train_dataloader.dataset.data_preprocessor'
LOOP = dict(type='PrefetchLoop', max_epochs=1)


@DATASETS.register_module(force=True)
class ExplainedImages(BaseDataset):
    METAINFO = dict(preprocess=dict(pad_value=4))


@MODELS.register_module(force=True)
class TypeGivingModel(BaseModel):
    def __init__(self, data_preprocessor=None):
        data_preprocessor = data_preprocessor or {}
        data_preprocessor.setdefault('type', 'mmengine.ImgDataPreprocessor')
        super().__init__(data_preprocessor)


def images(fields=None, **kwargs):
    bound = {} if fields is None else dict(data_preprocessor=fields)
    return dict(dataset=dict(type='ToyExplained', **bound, **kwargs))


def prefetching(*fields, own=None, train_cfg=LOOP, **kwargs):
    """A config whose splits have these fields bound to their datasets."""
    names = ('train_dataloader', 'val_dataloader', 'test_dataloader')
    own = dict(type='PrefetchDataPreprocessor', **(own or {}))
    return Config(
        dict(
            model=dict(type='M', data_preprocessor=own),
            train_cfg=train_cfg,
            **dict(zip(names, map(images, fields), strict=False)),
            **kwargs,
        )
    )


@pytest.fixture
def chain(tmp_path, monkeypatch):
    """Composed config files, the way OpenMMLab composes them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'data.py').write_text(
        'norm = dict(\n'
        '    mean=[1.0, 2.0, 3.0],\n'
        '    std=[4.0, 5.0, 6.0])\n'
        "train_dataloader = dict(dataset=dict(type='T', data_preprocessor=norm))\n"
        "val_dataloader = dict(dataset=dict(type='T', data_preprocessor=dict(norm)))\n"
    )
    (tmp_path / 'model.py').write_text(
        "model = dict(type='M', data_preprocessor=dict(\n"
        "    type='PrefetchDataPreprocessor', mean=[123.0], std=[58.0],\n"
        '    bgr_to_rgb=True, pad_size_divisor=32))\n'
        "train_cfg = dict(type='PrefetchLoop', max_epochs=1)\n"
    )
    (tmp_path / 'middle.py').write_text("_base_ = ['./data.py', './model.py']\n")
    (tmp_path / 'child.py').write_text(
        "_base_ = './middle.py'\n"
        'train_dataloader = dict(\n'
        '    dataset=dict(data_preprocessor=dict(\n'
        '        mean=[0.0, 0.0, 0.0], rgb_to_bgr=True)))\n'
    )
    return tmp_path / 'child.py'


# Where a key is set


@pytest.mark.parametrize(
    ('key', 'place'),
    [
        (f'{DATA}.mean', 'child.py:4'),
        (f'{DATA}.std', 'data.py:3'),
        (f'{DATA}', 'child.py:3'),
        ('val_dataloader.dataset.data_preprocessor.mean', 'data.py'),
        ('val_dataloader.dataset.type', 'data.py:5'),
        ('model.data_preprocessor.mean', 'model.py:2'),
        ('model.data_preprocessor.pad_size_divisor', 'model.py:3'),
        ('model.data_preprocessor.size', None),
        ('no_such_key', None),
    ],
)
def test_file_and_line_of_a_key(chain, key, place):
    assert ConfigFile(chain).locate(key) == place


def test_value_written_again_counts_as_set_there(chain):
    chain.write_text("_base_ = './middle.py'\nmodel = dict(data_preprocessor=dict(mean=[123.0]))\n")
    assert ConfigFile(chain).locate('model.data_preprocessor.mean') == 'child.py:2'
    assert ConfigFile(chain).locate('model.data_preprocessor.std') == 'model.py:2'


def test_base_variables_and_list_elements(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'base.py').write_text('one = dict(mean=[1.0])\nparts = [dict(a=1), {"a": 2}]\n')
    (tmp_path / 'child.py').write_text(
        "_base_ = 'base.py'\n"
        'two = _base_.one\n'
        'two.mean = [9.0]\n'
        'other = dict(inner={{_base_.parts}})\n'
    )
    file = ConfigFile(tmp_path / 'child.py')
    assert file.locate('two.mean') == 'child.py:3'
    # `two` is the base's own dict, so that the child has changed `one` too.
    assert file.locate('one.mean') == 'child.py'
    assert file.locate('parts.0.a') == 'base.py:2'
    assert file.locate('parts.1.a') == 'base.py:2'
    assert file.locate('other.inner.1.a') == 'child.py'
    assert file.locate('parts.2.a') is None


def test_yaml_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'base.yaml').write_text('a: {b: 1, c: 2}\n')
    (tmp_path / 'child.yaml').write_text('_base_: base.yaml\na: {b: 3}\n')
    file = ConfigFile('child.yaml')
    assert (file.locate('a.b'), file.locate('a.c')) == ('child.yaml', 'base.yaml')


def test_lazy_import_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub' / 'base.py').write_text(
        'from mmengine.dataset import BaseDataset\n'
        'train_dataloader = dict(dataset=dict(type=BaseDataset,\n'
        '    data_preprocessor=dict(mean=[1.0], std=[2.0], pad_value=3)))\n'
        "model = dict(data_preprocessor=dict(type='PrefetchDataPreprocessor'))\n"
        "train_cfg = dict(type='PrefetchLoop', max_epochs=1)\n"
    )
    (tmp_path / 'child.py').write_text(
        'from mmengine.config import read_base\n'
        'with read_base():\n'
        '    from .sub.base import *\n'
        'train_dataloader.dataset.data_preprocessor.mean = [5.0]\n'
        'train_dataloader.dataset.data_preprocessor.update(std=[6.0])\n'
    )
    report = explain(Config.fromfile('child.py'))
    ((group,),) = report['splits'].values()
    assert group['datasets'] == [dict(key='train_dataloader.dataset', type='BaseDataset')]
    assert {name: (f['value'], f['file']) for name, f in group['fields'].items()} == dict(
        mean=([5.0], 'child.py:4'), std=([6.0], 'child.py'), pad_value=(3, 'sub/base.py:3')
    )


# The report


def test_report_of_composed_configs(chain):
    report = explain(Config.fromfile(chain))
    assert report['preprocessor'] == 'ImgDataPreprocessor'
    assert list(report['splits']) == ['train', 'val']
    ((train,), (val,)) = report['splits'].values()
    model = 'model.data_preprocessor'
    assert train['fields'] == dict(
        pad_size_divisor=dict(value=32, key=model, file='model.py:3', overrides=[]),
        mean=dict(
            value=[0.0, 0.0, 0.0],
            key=DATA,
            file='child.py:4',
            overrides=[dict(field='mean', value=[123.0], key=model, file='model.py:2')],
        ),
        std=dict(
            value=[4.0, 5.0, 6.0],
            key=DATA,
            file='data.py:3',
            overrides=[dict(field='std', value=[58.0], key=model, file='model.py:2')],
        ),
        rgb_to_bgr=dict(
            value=True,
            key=DATA,
            file='child.py:4',
            overrides=[dict(field='bgr_to_rgb', value=True, key=model, file='model.py:3')],
        ),
    )
    assert val['fields']['bgr_to_rgb']['key'] == model
    assert report['warnings'] == [
        'train and val differ in mean: [0.0, 0.0, 0.0] and [1.0, 2.0, 3.0]'
    ]


def test_text_of_a_report(chain):
    lines = render(explain(Config.fromfile(chain))).splitlines()
    start = lines.index('train: T at train_dataloader.dataset')
    assert lines[start + 3 : start + 6] == [
        '  mean             = [0.0, 0.0, 0.0]',
        f'                     from {DATA} (child.py:4)',
        '                     overrides [123.0] from model.data_preprocessor (model.py:2)',
    ]
    assert (
        '                     overrides bgr_to_rgb = True from model.data_preprocessor (model.py:3)'
        in lines
    )
    assert lines[-2:] == [
        'warnings:',
        '  - train and val differ in mean: [0.0, 0.0, 0.0] and [1.0, 2.0, 3.0]',
    ]


def test_text_of_a_report_without_fields_or_warnings():
    text = render(explain(prefetching({})))
    assert '  no field is set, all are at their defaults' in text.splitlines()
    assert text.endswith('warnings: none')


def test_command_line_is_named_as_the_source(chain):
    cfg = Config.fromfile(chain)
    options = {f'{DATA}.mean': [7.0], 'model.data_preprocessor': dict(pad_value=1)}
    cfg.merge_from_dict(options)
    fields = explain(cfg, options)['splits']['train'][0]['fields']
    assert (fields['mean']['value'], fields['mean']['file']) == ([7.0], '--cfg-options')
    assert fields['pad_value']['file'] == '--cfg-options'
    assert fields['std']['file'] == 'data.py:3'


def test_class_is_named_as_the_source_of_its_metainfo():
    cfg = prefetching()
    cfg.train_dataloader = dict(dataset=dict(type='ExplainedImages'))
    field = explain(cfg)['splits']['train'][0]['fields']['pad_value']
    assert (field['value'], field['key']) == (4, 'ExplainedImages.METAINFO.preprocess')
    assert field['file'] == __file__


def test_datasets_that_differ_are_shown_one_by_one():
    cfg = prefetching()
    parts = [images(fields)['dataset'] for fields in (dict(RGB, to_rgb=True), BGR)]
    cfg.train_dataloader = dict(dataset=dict(type='ConcatDataset', datasets=parts))
    groups = explain(cfg)['splits']['train']
    assert [group['datasets'][0]['key'] for group in groups] == [
        f'train_dataloader.dataset.datasets.{index}' for index in (0, 1)
    ]
    assert [group['fields']['mean']['value'] for group in groups] == [RGB['mean'], BGR['mean']]


def test_datasets_that_agree_are_shown_together():
    cfg = prefetching(own=RGB | dict(bgr_to_rgb=True))
    cfg.train_dataloader = dict(
        dataset=dict(type='ConcatDataset', datasets=[images()['dataset']] * 2)
    )
    (group,) = explain(cfg)['splits']['train']
    assert len(group['datasets']) == 2


def test_config_is_not_changed():
    cfg = prefetching(dict(RGB, to_rgb=True), BGR)
    before = cfg.pretty_text
    explain(cfg)
    assert cfg.pretty_text == before


@pytest.mark.parametrize(
    ('model', 'name'),
    [
        (dict(type='TypeGivingModel'), 'ImgDataPreprocessor'),
        (
            dict(type='TypeGivingModel', data_preprocessor=dict(mean=[1], std=[1])),
            'ImgDataPreprocessor',
        ),
        (dict(type='NotRegistered'), 'BaseDataPreprocessor'),
        (dict(data_preprocessor=dict(type='BaseDataPreprocessor')), 'BaseDataPreprocessor'),
        (
            dict(data_preprocessor=dict(type=MODELS.get('ImgDataPreprocessor'))),
            'ImgDataPreprocessor',
        ),
    ],
)
def test_class_of_the_preprocessor(model, name):
    assert explain(Config(dict(model=model, train_dataloader=images())))['preprocessor'] == name


@pytest.mark.parametrize('type_', ['Detection', 'mmengine.Detection', 'not_installed.Detection'])
def test_class_that_is_not_registered(type_):
    with pytest.raises(ValueError, match=f"no preprocessor '{type_}' is registered; install"):
        explain(prefetching({}, own=dict(wraps=type_)))


def test_misspelt_class():
    cfg = prefetching({}, own=dict(wraps='ImgDataPreprocesor'))
    with pytest.raises(ValueError, match="did you mean 'ImgDataPreprocessor'") as error:
        explain(cfg)
    assert str(error.value).startswith('model.data_preprocessor: ')


def test_class_that_nothing_names():
    cfg = Config(dict(model=dict(type='X', data_preprocessor=dict(mean=[1])), train_dataloader={}))
    with pytest.raises(ValueError, match=r'model\.data_preprocessor: it has no type'):
        explain(cfg)


def test_dataloader_without_dataset():
    cfg = prefetching(val_dataloader=dict(batch_size=1))
    with pytest.raises(ValueError, match='val_dataloader: has no dataset'):
        explain(cfg)


# Warnings


@pytest.mark.parametrize(
    ('train', 'other', 'said'),
    [
        (dict(pad_size_divisor=32), dict(pad_size_divisor=1), 'pad_size_divisor: 32 and 1'),
        (dict(pad_size_divisor=32), {}, 'pad_size_divisor: 32 and 1'),
        ({}, dict(pad_value=3), 'pad_value: 0 and 3'),
        (dict(bgr_to_rgb=True), {}, 'channel order: reversed and left as it is'),
        ({}, dict(rgb_to_bgr=True), 'channel order: left as it is and reversed'),
    ],
)
@pytest.mark.parametrize('split', ['val', 'test'])
def test_splits_that_differ(train, other, said, split):
    splits = (train, other) if split == 'val' else (train, train, other)
    assert explain(prefetching(*splits))['warnings'] == [f'train and {split} differ in {said}']


@pytest.mark.parametrize(
    ('train', 'val'),
    [
        (dict(RGB, bgr_to_rgb=True), dict(RGB, rgb_to_bgr=True)),
        (dict(pad_value=0), {}),
        (dict(mean=[1], std=[2]), dict(mean=(1,), std=(2,))),
    ],
)
def test_splits_that_mean_the_same(train, val):
    differing = [said for said in explain(prefetching(train, val))['warnings'] if 'differ' in said]
    assert differing == []


@pytest.mark.parametrize(
    ('mean', 'std', 'suspicious'),
    [
        ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225], True),
        ([0.5], [0.5], True),
        ([0.0], [1.0], False),
        ([0.0], [255.0], False),
        ([127.5], [127.5], False),
        (None, None, False),
    ],
)
def test_values_for_another_range(mean, std, suspicious):
    warnings = explain(prefetching(dict(mean=mean, std=std, to_rgb=True)))['warnings']
    assert [said.endswith('multiply both by 255') for said in warnings] == [True] * suspicious


@pytest.mark.parametrize(
    ('fields', 'transform', 'said'),
    [
        (dict(RGB), {}, 'RGB order, but it is subtracted from channels in BGR order'),
        (dict(RGB, bgr_to_rgb=True), {}, None),
        (dict(BGR), {}, None),
        (dict(BGR, bgr_to_rgb=True), {}, 'BGR order, but it is subtracted from channels in RGB'),
        (dict(mean=BGR['mean'], std=[1.0, 1.0, 1.0]), {}, None),
        (dict(mean=RGB['mean'], std=[1.0, 1.0, 1.0]), {}, 'RGB order, but'),
        (dict(mean=[123.68, 116.78, 103.94], std=[58.4, 57.1, 57.4]), {}, 'RGB order, but'),
        (dict(mean=RGB['mean'], std=BGR['std'], bgr_to_rgb=True), {}, 'in RGB order, std='),
        (dict(RGB), dict(channel_order='rgb'), None),
        (dict(BGR), dict(channel_order='rgb'), 'BGR order, but it is subtracted from channels in'),
        (dict(BGR, rgb_to_bgr=True), dict(channel_order='rgb'), None),
        (dict(RGB), dict(channel_order='yuv'), None),
        (dict(RGB), dict(to_rgb=True), None),
        (dict(mean=[1.0, 2.0, 3.0], std=[1.0, 1.0, 1.0]), {}, None),
        (dict(mean=[123.675], std=[58.395]), {}, None),
    ],
)
def test_known_statistics_in_the_wrong_order(fields, transform, said):
    cfg = prefetching(fields)
    cfg.train_dataloader.dataset.pipeline = [dict(type='LoadImageFromFile', **transform)]
    warnings = explain(cfg)['warnings']
    if said is None:
        assert warnings == []
    else:
        (warning,) = warnings
        assert warning.startswith('train_dataloader.dataset: mean=')
        assert said in warning


def test_top_level_that_nothing_reads():
    top = dict(type='ImgDataPreprocessor', mean=[0.0], std=[1.0])
    own = dict(type='ImgDataPreprocessor', mean=[123.0], std=[58.0], pad_size_divisor=32)
    cfg = Config(
        dict(
            model=dict(data_preprocessor=own),
            data_preprocessor=top,
            train_dataloader=images(),
            train_cfg=LOOP,
        )
    )
    report = explain(cfg)
    (warning,) = report['warnings']
    assert warning.startswith('data_preprocessor: nothing reads mean, std at the top level')
    fields = report['splits']['train'][0]['fields']
    assert (fields['mean']['value'], fields['pad_size_divisor']['value']) == ([123.0], 32)
    cfg.model.data_preprocessor.update(type='PrefetchDataPreprocessor')
    report = explain(cfg)
    assert report['warnings'] == []
    fields = report['splits']['train'][0]['fields']
    assert (fields['mean']['value'], fields['mean']['key']) == ([0.0], 'data_preprocessor')
    assert fields['pad_size_divisor']['value'] == 32


@pytest.mark.parametrize('train_cfg', [dict(by_epoch=True, max_epochs=1), None])
def test_fields_that_no_loop_reads(train_cfg):
    cfg = prefetching(dict(pad_value=1), train_cfg=train_cfg, data_preprocessor=dict(pad_value=2))
    assert [said.partition(': nothing reads it, since no loop')[0] for said in _warn(cfg)] == [
        'data_preprocessor',
        DATA,
    ]
    cfg.val_cfg = dict(type='PrefetchValLoop')
    assert _warn(cfg) == []


def test_fields_beside_the_dataset():
    cfg = prefetching({})
    cfg.train_dataloader.data_preprocessor = dict(pad_value=1)
    (warning,) = _warn(cfg)
    assert warning.startswith('train_dataloader.data_preprocessor: nothing reads it there')
    assert warning.endswith(f'move it to {DATA}')


def _warn(cfg):
    return explain(cfg)['warnings']


# The tool


@pytest.fixture
def run(monkeypatch, capsys):
    spec = importlib.util.spec_from_file_location('explain_tool', TOOL)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)

    def call(*args):
        monkeypatch.setattr(sys, 'argv', [str(TOOL), *map(str, args)])
        return tool.main(), *capsys.readouterr()

    return call


def test_tool_prints_the_report_alone_to_stdout(chain):
    # mmengine warns on stdout of a scope that it can't find.
    text = chain.read_text() + "default_scope = 'no_such_scope'\n"
    chain.write_text(text)
    done = subprocess.run(
        [sys.executable, str(TOOL), 'child.py'],
        env=dict(os.environ, PYTHONPATH=str(REPOSITORY)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert 'no_such_scope' in done.stderr
    assert done.stdout == render(explain(Config.fromfile('child.py'))) + '\n'


def test_tool_prints_json(chain, run):
    code, out, _ = run('child.py', '--json', '--cfg-options', f'{DATA}.std=[7,8,9]')
    assert code == 0
    field = json.loads(out)['splits']['train'][0]['fields']['std']
    assert (field['value'], field['file']) == ([7, 8, 9], '--cfg-options')


@pytest.mark.parametrize(
    ('option', 'said'),
    [
        (f'{DATA}.maen=[1]', f"error: {DATA}: ImgDataPreprocessor has no field 'maen'"),
        (f'{DATA}.std=[1,2]', 'error: mean has 3 values'),
        ('model.data_preprocessor.wraps=Nothing', "no preprocessor 'Nothing' is registered"),
        ('train_dataloader.dataset.metainfo.preprocess=1', 'metainfo.preprocess: expected a dict'),
    ],
)
def test_tool_says_what_is_wrong(chain, run, option, said):
    code, out, err = run('child.py', '--json', '--cfg-options', option)
    assert (code, out) == (1, '')
    assert said in err


@pytest.mark.parametrize('text', [None, 'a = (', 'custom_imports = dict(imports=["no_module"])'])
def test_tool_on_a_config_that_can_not_be_read(tmp_path, run, text):
    path = tmp_path / 'config.py'
    if text is not None:
        path.write_text(text)
    code, out, err = run(path)
    assert (code, out) == (1, '')
    assert err.startswith('error: ')


@pytest.mark.parametrize('name', ['digits_prefetch', 'digits_stock'])
def test_tool_on_the_demo(run, name):
    code, out, err = run(REPOSITORY / 'configs' / 'demo' / f'{name}.py', '--json')
    assert code == 0, err
    report = json.loads(out)
    assert list(report['splits']) == ['train', 'val', 'test']
    assert report['warnings'] == []
