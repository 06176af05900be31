# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What a checkpoint records of the preprocessing is rebuilt, compared and chosen."""

import copy
import logging
import pickle
import sys
import types

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.registry import MODELS, Registry
from mmengine.runner import Runner

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.checkpoints.restore import (
    choose_preprocessing,
    describe,
    load_preprocessor,
    read_record,
    type_name,
)
from mmprefetch.fields.binding import REVERSAL, Binding
from mmprefetch.hooks import find_preprocessor

OWN = dict(mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0], bgr_to_rgb=True)
OTHER = dict(mean=[9.0, 8.0, 7.0], std=[2.0, 2.5, 3.0])


def record_of(**fields):
    return dict(type='ImgDataPreprocessor', **fields)


def checkpoint_of(**records):
    return dict(meta=dict(data_preprocessor=records))


def images(channels=3):
    made = torch.arange(channels * 20, dtype=torch.uint8).view(channels, 5, 4)
    return dict(inputs=[made, made.flip(1)])


def config(tmp_path, **fields):
    """A run whose train and test datasets bind fields of their own, tested by the stock loop."""
    model = dict(type='PrefetchDataPreprocessor', pad_size_divisor=4)
    cfg = toys.prefetching(toys.config(tmp_path, preprocessor=model))
    cfg.train_dataloader.dataset.data_preprocessor = OWN
    cfg.val_dataloader.dataset.data_preprocessor = OTHER
    test = dict(test_cfg=dict(type='PrefetchTestLoop'), test_evaluator=dict(type='ToyMetric'))
    cfg.merge_from_dict(dict(**test, test_dataloader=copy.deepcopy(cfg.val_dataloader)))
    cfg.test_dataloader.dataset.data_preprocessor = dict(OTHER, **fields)
    return cfg


@pytest.fixture(scope='module')
def trained(tmp_path_factory):
    """A checkpoint of a run that bound fields to the datasets of train and val."""
    folder = tmp_path_factory.mktemp('trained')
    toys.run(config(folder))
    return folder / 'epoch_2.pth'


# -- load ---------------------------------------------------------------------------------------


@pytest.mark.parametrize('loaded', [False, True])
@pytest.mark.parametrize(('split', 'fields'), [('train', OWN), ('val', OTHER)])
def test_rebuilds_what_a_run_recorded(trained, split, fields, loaded):
    checkpoint = torch.load(trained) if loaded else trained
    found = load_preprocessor(checkpoint, split)
    assert type(found) is ImgDataPreprocessor
    expected = ImgDataPreprocessor(**fields, pad_size_divisor=4)
    assert torch.equal(found(images())['inputs'], expected(images())['inputs'])


@pytest.mark.parametrize(
    ('recorded', 'split', 'taken'),
    [
        (['train', 'val', 'test'], 'test', 'test'),
        (['train', 'val'], 'test', 'val'),
        (['train'], 'test', 'train'),
        (['train'], 'val', 'train'),
        (['train', 'test'], 'val', 'train'),
    ],
)
def test_the_next_split_stands_in(recorded, split, taken, capfd):
    means = dict(train=[1.0], val=[2.0], test=[3.0])
    checkpoint = checkpoint_of(
        **{name: record_of(mean=means[name], std=[1.0]) for name in recorded}
    )
    assert load_preprocessor(checkpoint, split).mean.item() == means[taken][0]
    said = capfd.readouterr()
    assert (f'its {taken} split is taken' in said.out + said.err) == (taken != split)


@pytest.mark.parametrize(
    ('checkpoint', 'split', 'words'),
    [
        ({}, 'test', ("['meta']['data_preprocessor']", 'none', 'PrefetchLoop')),
        (dict(meta=dict(epoch=1)), 'test', ('none', 'PrefetchHook')),
        (checkpoint_of(val=record_of()), 'train', ('only that of val',)),
        (checkpoint_of(val=record_of()), 'tset', ("split='tset'", "'test', 'val' or 'train'")),
        (checkpoint_of(test=dict(type='Nowhere')), 'test', ("'Nowhere'", 'not registered')),
        (checkpoint_of(test=dict(type='there.Nowhere')), 'test', ('Install and import there',)),
        (checkpoint_of(test=record_of(meen=[1.0])), 'test', ('meen', 'mean', "['test']")),
        (checkpoint_of(test=record_of(mean=[1.0])), 'test', ('std is not',)),
    ],
)
def test_what_cannot_be_rebuilt(checkpoint, split, words):
    with pytest.raises(ValueError) as caught:
        load_preprocessor(checkpoint, split)
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize('name', ['subprocess.Popen', 'os.system', 'mmengine.fileio.load'])
def test_a_record_calls_nothing_but_modules(name):
    with pytest.raises(ValueError, match='not a module of torch'):
        load_preprocessor(checkpoint_of(test={'type': name, 'args': ['true']}))


class Touch:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), 'w')


def test_files_are_read_by_the_safe_loader_only(tmp_path):
    torch.save(checkpoint_of(test=Touch(tmp_path / 'touched')), tmp_path / 'bad.pth')
    with pytest.raises(pickle.UnpicklingError):
        load_preprocessor(tmp_path / 'bad.pth')
    assert not (tmp_path / 'touched').exists()


@pytest.mark.parametrize('mean', [[1.0, 2.0, 3.0, 4.0], [5.0], None])
def test_four_channels_are_reversed_without_losing_one(mean):
    fields = dict(mean=mean, std=mean) if mean else {}
    found = load_preprocessor(checkpoint_of(test=record_of(**fields, bgr_to_rgb=True)))
    assert isinstance(found, PrefetchDataPreprocessor)
    ours = found(images(4))['inputs']
    image = images(4)['inputs'][0][[2, 1, 0, 3]].float()
    if mean:
        constants = torch.tensor(mean).view(-1, 1, 1)
        image = (image - constants) / constants
    assert torch.equal(ours[0], image)


# -- names --------------------------------------------------------------------------------------


@pytest.fixture
def package(monkeypatch):
    """A package with a registry of its own below MODELS."""
    registry = Registry('model', parent=MODELS, scope='theirs')
    module = types.ModuleType('theirs')
    monkeypatch.setitem(sys.modules, 'theirs', module)

    @registry.register_module()
    class TheirPreprocessor(ImgDataPreprocessor):
        pass

    yield TheirPreprocessor
    del MODELS.children['theirs']


def test_names_are_found_again(package):
    for cls, name in [
        (ImgDataPreprocessor, 'ImgDataPreprocessor'),
        (BaseDataPreprocessor, 'BaseDataPreprocessor'),
        (package, 'theirs.TheirPreprocessor'),
        (toys.RandomPreprocessor, 'toys.RandomPreprocessor'),
    ]:
        assert type_name(cls) == name
        assert type(load_preprocessor(checkpoint_of(test=dict(type=name)))) is cls


def test_a_name_without_its_package_is_found_where_that_is_imported(package):
    record = dict(type='TheirPreprocessor', mean=[1.0], std=[2.0])
    assert type(load_preprocessor(checkpoint_of(val=record))) is package


# -- compare ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('ours', 'record', 'expected'),
    [
        (OWN, OWN, {}),
        (dict(OWN, mean=(1, 2, 3)), OWN, {}),
        (OWN, dict(OWN, pad_size_divisor=1, pad_value=0), {}),
        (dict(to_rgb=True), dict(bgr_to_rgb=True), {}),
        (dict(rgb_to_bgr=True), dict(bgr_to_rgb=True), {}),
        (dict(bgr_to_rgb=False), {}, {}),
        (OWN, dict(OWN, bgr_to_rgb=False), {REVERSAL: (True, False)}),
        (
            dict(OWN, mean=[0.0] * 3),
            dict(OWN, pad_size_divisor=32),
            dict(mean=([0.0] * 3, [1.0, 2.0, 3.0]), pad_size_divisor=(1, 32)),
        ),
        ({}, OTHER, dict(mean=(None, OTHER['mean']), std=(None, OTHER['std']))),
    ],
)
def test_differences(ours, record, expected):
    ours, theirs = (Binding('test', ImgDataPreprocessor, fields, {}) for fields in (ours, record))
    assert ours.differences(theirs) == expected


def test_the_message_shows_both():
    found = dict(mean=([0.0], [1.0]), pad_size_divisor=(1, 32))
    assert describe('test', found).splitlines() == [
        'The test split: the config says another preprocessing than the checkpoint.',
        '  field             config  checkpoint',
        '  mean              [0.0]   [1.0]',
        '  pad_size_divisor  1       32',
        "The config's is used; to use the checkpoint's, say `--preprocess-from checkpoint`.",
    ]
    last = describe('test', found, 'checkpoint').splitlines()[-1]
    assert last.startswith("The checkpoint's is used") and last.endswith('config`.')
    assert 'both say' in describe('test', {})


# -- choose -------------------------------------------------------------------------------------


def evaluate(cfg, checkpoint, loop='PrefetchTestLoop', **choice):
    """Test a run's checkpoint; return what was chosen, what was logged and the metrics."""
    cfg.test_cfg = dict(type=loop)
    cfg.load_from = str(checkpoint)
    cfg.log_level = 'INFO'
    runner = Runner.from_cfg(cfg)
    said = []
    handler = logging.Handler()
    handler.emit = lambda logged: said.append((logged.levelname, logged.getMessage()))
    runner.logger.addHandler(handler)
    found = choose_preprocessing(runner, checkpoint, **choice) if choice else {}
    return found, said, runner.test(), runner


def test_equal_preprocessing_is_said_so(tmp_path, trained):
    found, said, metrics, _ = evaluate(config(tmp_path / 'a'), trained, source='config')
    assert found == {}
    assert ('INFO', describe('test', {})) in said
    assert metrics == evaluate(config(tmp_path / 'b'), trained)[2]


def test_another_preprocessing_gives_a_warning_that_shows_both(tmp_path, trained):
    other = dict(mean=[100.0, 50.0, 20.0])
    found, said, metrics, _ = evaluate(config(tmp_path / 'a', **other), trained, source='config')
    assert found == dict(mean=(other['mean'], OTHER['mean']))
    (warning,) = [text for level, text in said if level == 'WARNING' and 'another' in text]
    assert str(other['mean']) in warning and str(OTHER['mean']) in warning
    assert metrics == evaluate(config(tmp_path / 'b', **other), trained)[2]


def test_the_checkpoints_is_used_when_chosen(tmp_path, trained):
    other = dict(mean=[100.0, 50.0, 20.0], bgr_to_rgb=True)
    expected = evaluate(config(tmp_path / 'a'), trained)[2]
    found, _, metrics, runner = evaluate(
        config(tmp_path / 'b', **other), trained, source='checkpoint'
    )
    assert set(found) == {'mean', 'bgr_to_rgb'}
    assert metrics == expected
    assert metrics != evaluate(config(tmp_path / 'c', **other), trained)[2]
    binding = find_preprocessor(runner).bindings['test']
    assert binding.split == 'test' and binding.fields == dict(OTHER, pad_size_divisor=4)
    assert 'checkpoint' in binding.origin['mean']


@pytest.mark.parametrize('opted_in', [True, False])
def test_under_mmengines_own_loop(tmp_path, trained, opted_in):
    expected = evaluate(config(tmp_path / 'a'), trained)[2]
    model = dict(OTHER, pad_size_divisor=4, mean=[100.0, 50.0, 20.0])
    model['type'] = 'PrefetchDataPreprocessor' if opted_in else 'ImgDataPreprocessor'
    results = []
    for source in ('config', 'checkpoint'):
        cfg = Config(toys.config(tmp_path / source, preprocessor=model))
        cfg.merge_from_dict(
            dict(test_dataloader=cfg.val_dataloader, test_evaluator=dict(type='ToyMetric'))
        )
        found, _, metrics, _ = evaluate(cfg, trained, 'TestLoop', source=source)
        assert set(found) == {'mean'}
        results.append(metrics)
    assert results[0] != expected and results[1] == expected


def test_what_was_loaded_will_do_and_the_loop_may_be_built(tmp_path, trained):
    cfg = config(tmp_path, mean=[100.0, 50.0, 20.0])
    runner = Runner.from_cfg(cfg)
    loop = runner.test_loop
    checkpoint = torch.load(trained)
    assert set(choose_preprocessing(runner, checkpoint, source='checkpoint')) == {'mean'}
    assert runner.test_loop is loop
    module = find_preprocessor(runner).of_split('test')
    expected = load_preprocessor(checkpoint)
    assert torch.equal(module(images())['inputs'], expected(images())['inputs'])
    # Nothing differs any more.
    assert choose_preprocessing(runner, checkpoint, source='config') == {}


def test_another_class_is_shown_even_where_it_is_not_installed(tmp_path):
    runner = Runner.from_cfg(config(tmp_path))
    record = dict(type='theirs.Preprocessor', **OTHER, pad_size_divisor=8)
    assert choose_preprocessing(runner, checkpoint_of(test=record)) == dict(
        type=('ImgDataPreprocessor', 'Preprocessor'), pad_size_divisor=(4, 8)
    )


def test_without_a_record(tmp_path):
    runner = Runner.from_cfg(config(tmp_path))
    assert choose_preprocessing(runner, dict(meta={}), source='config') == {}
    with pytest.raises(ValueError, match=r'none\. PrefetchHook writes it'):
        choose_preprocessing(runner, dict(meta={}), source='checkpoint')
    with pytest.raises(ValueError, match="preprocess-from='both': write 'config' or 'checkpoint'"):
        choose_preprocessing(runner, dict(meta={}), source='both')


def test_without_a_preprocessor(tmp_path):
    cfg = Config(toys.config(tmp_path))
    cfg.merge_from_dict(dict(test_cfg={}, test_dataloader=cfg.val_dataloader,
                             test_evaluator=dict(type='ToyMetric')))  # fmt: skip
    runner = Runner.from_cfg(cfg)
    del runner.model.data_preprocessor
    checkpoint = checkpoint_of(test=record_of())
    assert choose_preprocessing(runner, checkpoint, source='config') == {}
    with pytest.raises(ValueError, match='no data preprocessor to replace'):
        choose_preprocessing(runner, checkpoint, source='checkpoint')


def test_the_record_that_is_read(trained):
    split, record = read_record(trained, 'train')
    assert split == 'train'
    assert record == record_of(**OWN, pad_size_divisor=4)


def test_types_that_somebody_took_off_the_list(trained):
    """As a package does whose own list ends with the file that it was for."""
    before = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    try:
        assert read_record(trained, 'train')[0] == 'train'
    finally:
        torch.serialization.add_safe_globals(before)
