# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import copy

import pytest
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, ValLoop
from mmengine.runner import TestLoop as StockTestLoop

from mmprefetch import PrefetchLoop, PrefetchValLoop, enable_prefetch
from mmprefetch.fields.datasets import FieldSource
from mmprefetch.fields.sources import dropped_top_level, is_prefetch_loop, preprocessor_sources

MEAN_123 = dict(mean=[123.0], std=[58.0])


class OwnLoop(EpochBasedTrainLoop):
    pass


def switched(prefetch_depth=2, **cfg):
    return enable_prefetch(Config(cfg), prefetch_depth=prefetch_depth)


@pytest.fixture
def warnings(monkeypatch):
    said = []

    def record(message, logger, level):
        said.append(message)

    monkeypatch.setattr('mmprefetch.config.print_log', record)
    return said


@pytest.mark.parametrize(
    ('train_cfg', 'expected'),
    [
        (dict(by_epoch=True, max_epochs=3), dict(max_epochs=3)),
        (
            dict(by_epoch=True, max_epochs=3, val_interval=2, dynamic_intervals=[(1, 2)]),
            dict(max_epochs=3, val_interval=2, dynamic_intervals=[(1, 2)]),
        ),
        (dict(by_epoch=False, max_iters=9, val_begin=4), dict(max_iters=9, val_begin=4)),
        (dict(max_iters=9), dict(max_iters=9)),
        (dict(max_epochs=9), dict(max_epochs=9)),
        (dict(type='EpochBasedTrainLoop', max_epochs=3), dict(max_epochs=3)),
        (dict(type='mmengine.EpochBasedTrainLoop', max_epochs=3), dict(max_epochs=3)),
        (dict(type='mmengine.runner.EpochBasedTrainLoop', max_epochs=3), dict(max_epochs=3)),
        (dict(type='mmengine.runner.loops.IterBasedTrainLoop', max_iters=9), dict(max_iters=9)),
        (dict(type='IterBasedTrainLoop', max_iters=9), dict(max_iters=9)),
        (dict(type=EpochBasedTrainLoop, max_epochs=3), dict(max_epochs=3)),
        (dict(type=IterBasedTrainLoop, max_iters=9), dict(max_iters=9)),
    ],
)
@pytest.mark.parametrize('depth', [0, 2, 8])
def test_train_loop(train_cfg, expected, depth, warnings):
    cfg = switched(depth, train_cfg=train_cfg)
    assert cfg.train_cfg == dict(type='PrefetchLoop', prefetch_depth=depth, **expected)
    assert warnings == []


@pytest.mark.parametrize(('key', 'stock'), [('val_cfg', ValLoop), ('test_cfg', StockTestLoop)])
def test_evaluation_loops(key, stock, warnings):
    name = stock.__name__
    types = [name, f'mmengine.{name}', f'mmengine.runner.{name}', stock]
    for loop in [{}, *(dict(type=type_) for type_ in types)]:
        cfg = switched(3, **{key: dict(loop, fp16=True)})
        assert cfg[key] == dict(type=f'Prefetch{name}', fp16=True, prefetch_depth=3)
    assert warnings == []


def test_loops_that_are_off_stay_off():
    cfg = switched(train_cfg=None, val_cfg=None)
    assert cfg.train_cfg is None
    assert cfg.val_cfg is None
    assert 'test_cfg' not in cfg


@pytest.mark.parametrize(
    'loops',
    [
        dict(
            train_cfg=dict(type='PrefetchLoop', max_epochs=3, prefetch_depth=5),
            val_cfg=dict(type='mmengine.PrefetchValLoop'),
            test_cfg=dict(type='PrefetchTestLoop', prefetch_depth=0),
        ),
        dict(train_cfg=dict(type='PrefetchIterBasedTrainLoop', max_iters=3)),
        dict(train_cfg=dict(type=PrefetchLoop, max_iters=3), val_cfg=dict(type=PrefetchValLoop)),
    ],
)
def test_prefetch_loops_stay(loops, warnings):
    cfg = switched(4, **loops)
    assert {key: cfg[key] for key in loops} == loops
    assert warnings == []


def test_switching_twice_is_switching_once():
    cfg = Config(dict(train_cfg=dict(by_epoch=True, max_epochs=3), val_cfg={}, test_cfg={}))
    once = enable_prefetch(cfg, 4)
    assert enable_prefetch(once, 7).to_dict() == once.to_dict()


@pytest.mark.parametrize(
    ('key', 'loop'),
    [
        ('train_cfg', dict(type='MultiLoaderTrainLoop', max_epochs=3)),
        ('train_cfg', dict(type=OwnLoop, max_epochs=3)),
        ('train_cfg', dict(type='other.EpochBasedTrainLoop', max_epochs=3)),
        ('train_cfg', dict(type='ValLoop')),
        ('val_cfg', dict(type='mmdet.TeacherStudentValLoop')),
        ('test_cfg', dict(type='ValLoop')),
    ],
)
def test_unknown_loop_stays_with_one_warning(key, loop, warnings):
    cfg = switched(**{key: loop})
    assert cfg[key] == loop
    (message,) = warnings
    name = loop['type'] if isinstance(loop['type'], str) else loop['type'].__name__
    assert message.startswith(f'{key}: ')
    assert repr(name.rpartition('.')[2]) in message


def test_warning_goes_to_the_logger(caplog):
    logger = MMLogger.get_instance('test_config')
    logger.addHandler(caplog.handler)
    switched(train_cfg=dict(type='OtherLoop'))
    (record,) = caplog.records
    assert record.levelname == 'WARNING'
    assert 'OtherLoop' in record.getMessage()


@pytest.mark.parametrize(
    ('train_cfg', 'said'),
    [
        (dict(by_epoch=False, max_epochs=3), 'by_epoch=False needs max_iters, found max_epochs=3'),
        (dict(by_epoch=True, max_iters=3), 'by_epoch=True needs max_epochs, found max_iters=3'),
        (dict(by_epoch=False), 'by_epoch=False needs max_iters, found neither'),
        (
            dict(type='EpochBasedTrainLoop', max_iters=3),
            "type='EpochBasedTrainLoop' needs max_epochs, found max_iters=3",
        ),
        (
            dict(type=IterBasedTrainLoop, max_epochs=3),
            "type='IterBasedTrainLoop' needs max_iters, found max_epochs=3",
        ),
    ],
)
def test_train_loop_that_counts_otherwise(train_cfg, said):
    with pytest.raises(ValueError, match=f'train_cfg: {said}'):
        switched(train_cfg=train_cfg)


@pytest.mark.parametrize(
    ('before', 'after'),
    [
        (None, dict(imports=['mmprefetch'], allow_failed_imports=False)),
        (
            dict(imports=['a.b'], allow_failed_imports=True),
            dict(imports=['a.b', 'mmprefetch'], allow_failed_imports=True),
        ),
        (dict(imports='a.b'), dict(imports=['a.b', 'mmprefetch'])),
        (dict(imports=('mmprefetch', 'a')), dict(imports=('mmprefetch', 'a'))),
    ],
)
def test_custom_imports(before, after):
    assert switched(custom_imports=before).custom_imports == after
    if before is None:
        assert switched().custom_imports == after


def test_nothing_else_changes():
    rest = dict(
        model=dict(type='X', data_preprocessor=dict(MEAN_123, type='ImgDataPreprocessor')),
        data_preprocessor=dict(mean=[0.0]),
        train_dataloader=dict(dataset=dict(type='Y', data_preprocessor=MEAN_123)),
        custom_hooks=[dict(type='EMAHook')],
    )
    cfg = Config(dict(train_cfg=dict(by_epoch=True, max_epochs=3), **copy.deepcopy(rest)))
    before = copy.deepcopy(cfg.to_dict())
    result = enable_prefetch(cfg)
    assert cfg.to_dict() == before
    assert {key: result[key] for key in rest} == rest
    assert result.model is not cfg.model
    assert set(result.keys()) == {*rest, 'train_cfg', 'custom_imports'}


def test_text_config_and_its_dump(tmp_path):
    (tmp_path / 'base.py').write_text(
        'train_cfg = dict(by_epoch=True, max_epochs=2)\nval_cfg = {}\n'
    )
    (tmp_path / 'child.py').write_text(
        "_base_ = './base.py'\ntrain_cfg = dict(max_epochs=4)\nval_cfg = dict(fp16=True)\n"
    )
    cfg = enable_prefetch(Config.fromfile(tmp_path / 'child.py'))
    cfg.dump(tmp_path / 'dumped.py')
    dumped = Config.fromfile(tmp_path / 'dumped.py')
    assert dumped.to_dict() == cfg.to_dict()
    assert dumped.train_cfg == dict(type='PrefetchLoop', max_epochs=4, prefetch_depth=2)
    assert dumped.val_cfg == dict(type='PrefetchValLoop', fp16=True, prefetch_depth=2)
    assert dumped.custom_imports.imports == ['mmprefetch']


def test_lazy_import_config_and_its_dump(tmp_path):
    (tmp_path / 'lazy.py').write_text(
        'from mmengine.runner import EpochBasedTrainLoop, ValLoop\n'
        'from torch.optim import SGD\n'
        'train_cfg = dict(type=EpochBasedTrainLoop, max_epochs=4)\n'
        'val_cfg = dict(type=ValLoop)\n'
        'optim_wrapper = dict(optimizer=dict(type=SGD, lr=0.1))\n'
    )
    cfg = Config.fromfile(tmp_path / 'lazy.py')
    result = enable_prefetch(cfg)
    assert cfg.train_cfg.type is EpochBasedTrainLoop
    assert result.train_cfg == dict(type='PrefetchLoop', max_epochs=4, prefetch_depth=2)
    assert result.optim_wrapper.optimizer.type is torch.optim.SGD
    result.dump(tmp_path / 'dumped.py')
    dumped = Config.fromfile(tmp_path / 'dumped.py')
    assert dumped.val_cfg == dict(type='PrefetchValLoop', prefetch_depth=2)
    assert dumped.custom_imports.imports == ['mmprefetch']


@pytest.mark.parametrize('name', ['PrefetchLoop', 'PrefetchValLoop', 'PrefetchTestLoop'])
def test_names_written_are_registered(name):
    assert LOOPS.get(name).__name__ == name
    assert is_prefetch_loop(dict(type=name))


@pytest.mark.parametrize('cfg', [{}, 'config.py', None])
def test_argument_that_is_no_config(cfg):
    with pytest.raises(TypeError, match=f'cfg: .* found {type(cfg).__name__}; write'):
        enable_prefetch(cfg)


@pytest.mark.parametrize(
    ('depth', 'error'), [(-1, ValueError), (1.0, TypeError), (True, TypeError)]
)
def test_depth_that_is_no_count(depth, error):
    with pytest.raises(error, match=f'prefetch_depth: .*{depth}'):
        enable_prefetch(Config({}), prefetch_depth=depth)


# The top-level data_preprocessor


@pytest.mark.parametrize(
    ('own', 'dropped'),
    [
        (MEAN_123, 'mean'),
        (dict(type='ImgDataPreprocessor', mean=(0.0,), std=[58.0]), ''),
        (dict(type='PrefetchDataPreprocessor', **MEAN_123), ''),
        (dict(type='mmengine.PrefetchDataPreprocessor', **MEAN_123), ''),
        (None, 'mean, std'),
        (dict(pad_value=1), 'mean, std'),
    ],
)
def test_dropped_top_level(own, dropped):
    top = dict(type='ImgDataPreprocessor', mean=[0.0], std=[58.0])
    cfg = dict(model=dict(type='X', data_preprocessor=own), data_preprocessor=top)
    expected = dropped and f'data_preprocessor: nothing reads {dropped}'
    for said in (dropped_top_level(cfg), dropped_top_level(Config(cfg))):
        assert said.partition(' at the top level')[0] == expected


def test_top_level_that_counts_is_not_dropped():
    assert dropped_top_level(dict(model=dict(type='X'), data_preprocessor=MEAN_123)) == ''
    own = dict(type='X', data_preprocessor=MEAN_123)
    assert dropped_top_level(dict(model=own)) == ''
    assert dropped_top_level(dict(model=own, data_preprocessor=None)) == ''


def test_top_level_beside_a_built_model_is_dropped():
    assert dropped_top_level(dict(model=object(), data_preprocessor=MEAN_123))


MODEL = 'model.data_preprocessor'
TOP = 'data_preprocessor'


@pytest.mark.parametrize(
    ('model', 'top', 'type_', 'keys'),
    [
        (dict(type='Det'), dict(type='Other'), 'Det', [MODEL]),
        (None, dict(type='Det'), None, []),
        ('absent', dict(type='Det'), 'Det', [TOP]),
        ('absent', dict(mean=[1.0]), None, [TOP]),
        ('absent', None, None, []),
        ('absent', dict(type='PrefetchDataPreprocessor'), 'ImgDataPreprocessor', [TOP]),
        (dict(type='PrefetchDataPreprocessor'), None, 'ImgDataPreprocessor', [MODEL]),
        (dict(type='PrefetchDataPreprocessor', wraps='mmdet.Det'), None, 'mmdet.Det', [MODEL]),
        (dict(type='PrefetchDataPreprocessor', wraps='Det'), {}, 'Det', [MODEL, TOP]),
        (dict(type='PrefetchDataPreprocessor'), dict(type='Det'), 'Det', [MODEL, TOP]),
        (dict(type='PrefetchDataPreprocessor', wraps='A'), dict(wraps='B'), 'B', [MODEL, TOP]),
        (
            dict(type='PrefetchDataPreprocessor', wraps='A'),
            dict(type='PrefetchDataPreprocessor'),
            'A',
            [MODEL, TOP],
        ),
    ],
)
def test_preprocessor_sources(model, top, type_, keys):
    cfg = dict(model=dict(type='X'), data_preprocessor=top)
    if model != 'absent':
        cfg['model']['data_preprocessor'] = model
    found, scope, sources = preprocessor_sources(Config(cfg))
    assert (found, scope) == (type_, None)
    assert [source.key for source in sources] == keys


def test_preprocessor_sources_hold_the_fields_and_the_scope():
    own = dict(type='DetDataPreprocessor', _scope_='mmdet', **MEAN_123)
    cfg = dict(model=dict(data_preprocessor=own))
    assert preprocessor_sources(cfg) == ('DetDataPreprocessor', 'mmdet', [FieldSource(MODEL, own)])


def test_top_level_that_names_two_classes():
    own = dict(type='PrefetchDataPreprocessor')
    cfg = dict(model=dict(data_preprocessor=own), data_preprocessor=dict(type='A', wraps='B'))
    with pytest.raises(ValueError, match="data_preprocessor: type='A' and wraps='B'"):
        preprocessor_sources(cfg)


def test_preprocessor_that_is_no_dict():
    with pytest.raises(TypeError, match=r'model\.data_preprocessor: expected a dict, found list'):
        preprocessor_sources(dict(model=dict(data_preprocessor=[1])))
