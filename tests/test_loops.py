# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Training through the prefetching loops is equal, to the bit, to training through mmengine's."""

import copy
import shutil
from itertools import chain

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner

from mmprefetch import (
    PrefetchEpochBasedTrainLoop,
    PrefetchHook,
    PrefetchIterBasedTrainLoop,
    PrefetchTestLoop,
    PrefetchValLoop,
)
from mmprefetch.engine import LookAheadLoader, Preparation

DEPTHS = (0, 1, 2, 8)
ITERS = dict(by_epoch=False, max_iters=9, val_interval=4)
RANDOM = dict(type='RandomPreprocessor', scale=3.0)


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize(
    'options',
    [
        dict(),
        dict(train=ITERS),
        dict(preprocessor=RANDOM),
        dict(preprocessor=RANDOM, train=ITERS),
        dict(preprocessor=None, batch_size=3),
        dict(optim=dict(accumulative_counts=3)),
        dict(optim=dict(clip_grad=dict(max_norm=0.1)), train=ITERS),
        dict(hooks=[dict(type='EMAHook', momentum=0.1)]),
        dict(hooks=[dict(type='EMAHook', momentum=0.1, update_buffers=True)], train=ITERS),
        dict(val=False),
    ],
    ids=lambda options: '-'.join(options) or 'plain',
)
def test_equal_to_stock(tmp_path, options, workers):
    cfg = toys.config(tmp_path / 'stock', workers=workers, **options)
    stock = toys.run(cfg)
    assert len(stock[1].losses) in (8, 9, 10)
    for depth in DEPTHS if workers == 0 or not options else (2,):
        cfg['work_dir'] = str(tmp_path / f'depth{depth}')
        toys.assert_same_run(stock, toys.run(toys.prefetching(cfg, depth)))


@pytest.mark.parametrize('depth', DEPTHS)
def test_early_stop(tmp_path, depth):
    stop = dict(type='EarlyStoppingHook', monitor='score', patience=1, min_delta=1e9, rule='less')
    cfg = toys.config(tmp_path / 'stock', hooks=[stop], train=dict(by_epoch=True, max_epochs=9))
    stock = toys.run(cfg)
    assert stock[0].epoch < 9
    cfg['work_dir'] = str(tmp_path / 'prefetch')
    toys.assert_same_run(stock, toys.run(toys.prefetching(cfg, depth)))


@HOOKS.register_module(force=True)
class StopAt(Hook):
    """Breaks a run off, as a user would."""

    priority = 'LOWEST'

    def __init__(self, iteration):
        self.iteration = iteration

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter + 1 == self.iteration:
            raise KeyboardInterrupt


def broken_off(cfg, iteration):
    cfg = Config(copy.deepcopy(dict(cfg)))
    cfg.custom_hooks.append(dict(type='StopAt', iteration=iteration))
    cfg.experiment_name += '-broken'
    runner = Runner.from_cfg(cfg)
    with pytest.raises(KeyboardInterrupt):
        runner.train()
    return toys.recorder(runner)


def resumed(cfg):
    cfg = Config(copy.deepcopy(dict(cfg)))
    whole = f'{cfg.work_dir}-{cfg.experiment_name}'
    shutil.copytree(cfg.work_dir, whole)
    cfg.update(resume=True, work_dir=whole)
    cfg.experiment_name += '-resumed'
    return toys.run(cfg)


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('first', ['stock', 'prefetch'])
@pytest.mark.parametrize('second', ['stock', 'prefetch'])
@pytest.mark.parametrize(
    'train',
    [dict(by_epoch=True, max_epochs=4), dict(by_epoch=False, max_iters=20, val_interval=100)],
    ids=['epochs', 'iterations'],
)
def test_resume_goes_on_with_either_loop(tmp_path, train, first, second, workers):
    ema = dict(type='EMAHook', momentum=0.1)
    cfg = toys.config(tmp_path, workers=workers, train=train, hooks=[ema])
    cfg['default_hooks']['checkpoint']['interval'] = 2 if train['by_epoch'] else 7
    made = dict(stock=cfg, prefetch=toys.prefetching(cfg))
    before = broken_off(made[first], 11 if train['by_epoch'] else 7)
    runner, after = resumed(made[second])
    other, again = resumed(made['stock' if second == 'prefetch' else 'prefetch'])
    assert after.losses == again.losses
    assert same_weights(runner, other)
    if not train['by_epoch']:
        unbroken = toys.run(toys.config(tmp_path / 'whole', workers=workers, train=train))[1]
        assert before.indices == unbroken.indices[:7]
        assert after.indices == unbroken.indices[7:]


@HOOKS.register_module(force=True)
class GoOn(Hook):
    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == 3:
            runner.train_loop._max_iters = 9


@pytest.mark.parametrize('workers', [0, 2])
def test_a_hook_lets_the_training_go_on(tmp_path, workers):
    train = dict(by_epoch=False, max_iters=6, val_interval=100)
    cfg = toys.config(tmp_path / 'a', train=train, hooks=[dict(type='GoOn')], workers=workers)
    stock = toys.run(cfg)
    assert len(stock[1].losses) == 9
    cfg['work_dir'] = str(tmp_path / 'b')
    toys.assert_same_run(stock, toys.run(toys.prefetching(cfg)))


@pytest.mark.parametrize('at', [3, 4, 5, 8])
@pytest.mark.parametrize('depth', [1, 2])
def test_resume_beyond_the_end_of_a_finite_dataloader(tmp_path, depth, at):
    train = dict(by_epoch=False, max_iters=11, val_interval=100)
    cfg = toys.config(tmp_path, train=train, val=False)
    cfg['train_dataloader']['sampler'] = dict(type='DefaultSampler', shuffle=True)
    cfg['default_hooks']['checkpoint']['interval'] = at
    broken_off(cfg, at)
    stock, record = resumed(cfg)
    assert len(record.indices) == 11 - at
    prefetch = resumed(toys.prefetching(cfg, depth))
    toys.assert_same_run((stock, record), prefetch)


def same_weights(one, other):
    return toys.same(dict(one.model.state_dict()), dict(other.model.state_dict()))


def test_state_dict_keys_are_the_stock_ones(tmp_path):
    cfg = toys.config(tmp_path, preprocessor=RANDOM)
    stock, _ = toys.run(cfg)
    prefetch, _ = toys.run(toys.prefetching(cfg))
    assert 'data_preprocessor.scale' in stock.model.state_dict()
    assert list(stock.model.state_dict()) == list(prefetch.model.state_dict())


def test_skipped_batches_are_not_begun(tmp_path, monkeypatch):
    train = dict(by_epoch=False, max_iters=20)
    cfg = toys.prefetching(toys.config(tmp_path, train=train, val=False, workers=2))
    broken_off(cfg, 7)
    begun, begin = [], Preparation.begin
    monkeypatch.setattr(
        Preparation, 'begin', lambda self, ticket: (begun.append(ticket), begin(self, ticket))
    )
    runner, record = resumed(cfg)
    assert len(record.indices) == 20 - 7
    # The first is handed out as it comes; behind the last, batches were loaded that nobody takes.
    trained = [raw for raw, *_ in record.raw][1:]
    assert [ticket.batch is raw for ticket, raw in zip(begun, trained, strict=False)] == [True] * 12
    assert len(begun) <= 12 + runner.train_loop.dataloader._depth


def test_prefetch_loop_is_of_the_kind_asked_for(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path))
    runner = Runner.from_cfg(cfg)
    loop = runner.build_train_loop(cfg.train_cfg)
    assert type(loop) is PrefetchEpochBasedTrainLoop
    assert isinstance(loop, EpochBasedTrainLoop)
    assert type(runner.build_val_loop(cfg.val_cfg)) is PrefetchValLoop
    loop = runner.build_train_loop(dict(type='PrefetchLoop', max_iters=3))
    assert type(loop) is PrefetchIterBasedTrainLoop
    assert isinstance(loop, IterBasedTrainLoop)
    assert isinstance(loop.dataloader, torch.utils.data.DataLoader)


@pytest.mark.parametrize(
    ('loop', 'error', 'words'),
    [
        (dict(max_epochs=1, max_iters=2), ValueError, ('max_epochs=1', 'max_iters=2', 'train_cfg')),
        (dict(), ValueError, ('neither', 'max_epochs', 'max_iters')),
        (dict(max_epochs=1, prefetch_deph=1), TypeError, ('prefetch_deph', 'prefetch_depth')),
        (dict(max_epochs=1, prefetch_depth=-1), ValueError, ('prefetch_depth', '-1')),
        (dict(max_epochs=1, prefetch_depth=1.5), TypeError, ('prefetch_depth', '1.5')),
        (dict(max_epochs=1, prefetch_depth=True), TypeError, ('prefetch_depth', 'True')),
        (dict(max_iters=1, loader_thread=1), TypeError, ('loader_thread', '1')),
    ],
)
def test_bad_arguments(tmp_path, loop, error, words):
    runner = Runner.from_cfg(Config(toys.config(tmp_path)))
    with pytest.raises(error) as caught:
        runner.build_train_loop(dict(type='PrefetchLoop', **loop))
    assert all(word in str(caught.value) for word in words)


@pytest.mark.parametrize(
    ('kind', 'split'),
    [
        ('PrefetchEpochBasedTrainLoop', 'train'),
        ('PrefetchIterBasedTrainLoop', 'train'),
        ('PrefetchValLoop', 'val'),
        ('PrefetchTestLoop', 'test'),
    ],
)
def test_unknown_arguments_of_any_loop(tmp_path, kind, split):
    runner = Runner.from_cfg(Config(toys.config(tmp_path)))
    build = getattr(runner, f'build_{split}_loop')
    with pytest.raises(TypeError, match=rf'{split}_cfg\.prefech_depth.*prefetch_depth'):
        build(dict(type=kind, prefech_depth=1))


@pytest.mark.parametrize('split', ['train', 'val'])
def test_empty_dataloader(tmp_path, split):
    cfg = toys.prefetching(toys.config(tmp_path))
    cfg[f'{split}_dataloader'].dataset.length = 0
    cfg[f'{split}_dataloader'].sampler = dict(type='DefaultSampler', round_up=False, shuffle=False)
    with pytest.raises(ValueError, match=f'{split}_dataloader has no batches.*0 samples'):
        toys.run(cfg)


def test_raw_batches_reach_the_hooks_unchanged(tmp_path):
    stock = toys.run(toys.config(tmp_path / 'a'))[1]
    prefetch = toys.run(toys.prefetching(toys.config(tmp_path / 'b')))[1]
    for (batch, inputs, kind), (_, other, other_kind) in zip(stock.raw, prefetch.raw, strict=True):
        assert toys.same(inputs, other)
        assert kind is other_kind
        assert toys.same(batch['inputs'], inputs)


@HOOKS.register_module(force=True)
class Brighten(Hook):
    """Changes batches on their way to the model."""

    def __init__(self, how):
        self.how = how

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.how == 'in place':
            data_batch['inputs'][1].add_(3)
        elif self.how == 'element':
            data_batch['inputs'][1] = data_batch['inputs'][1] // 2
        elif self.how == 'key':
            data_batch['inputs'] = [image // 2 for image in data_batch['inputs']]
        else:
            runner.model.data_preprocessor.pad_value = batch_idx


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('how', ['in place', 'element', 'key', 'field'])
def test_a_hook_that_changes_the_batch_or_the_preprocessor_counts(tmp_path, how, workers):
    cfg = toys.config(tmp_path / 'a', workers=workers, hooks=[dict(type='Brighten', how=how)])
    stock = toys.run(cfg)
    cfg['work_dir'] = str(tmp_path / 'b')
    toys.assert_same_run(stock, toys.run(toys.prefetching(cfg, 2)))
    plain = toys.run(toys.config(tmp_path / 'c', workers=workers))
    assert plain[1].losses != stock[1].losses


@HOOKS.register_module(force=True)
class EpochOfDataset(Hook):
    def before_train_epoch(self, runner):
        runner.train_dataloader.dataset.epoch = runner.epoch
        runner.train_dataloader.sampler.set_epoch(runner.epoch)


def test_epoch_boundary(tmp_path):
    cfg = toys.config(tmp_path, hooks=[dict(type='EpochOfDataset')], val=False)
    _, record = toys.run(toys.prefetching(cfg, 3))
    epochs = [sample.epoch for raw, *_ in record.raw for sample in raw['data_samples']]
    assert epochs == [0] * 14 + [1] * 14
    first, second = (list(chain(*part)) for part in (record.indices[:4], record.indices[4:]))
    assert sorted(first) == sorted(second) == list(range(14))
    assert first != second


@pytest.mark.parametrize('workers', [0, 2])
def test_dataset_error_comes_where_it_belongs(tmp_path, workers):
    cfg = toys.config(tmp_path, batch_size=1, workers=workers, dataset=dict(fail_at=5), val=False)
    cfg['train_dataloader']['sampler']['shuffle'] = False
    runner = Runner.from_cfg(toys.prefetching(cfg, 2))
    with pytest.raises(OSError, match='image 5 is broken') as caught:
        runner.train()
    record = toys.recorder(runner)
    assert record.indices == [[0], [1], [2], [3], [4]] and len(record.losses) == 5
    text = ''.join(str(entry) for entry in caught.traceback) + str(caught.value)
    assert 'toys.py' in text and '__getitem__' in text


def test_preprocessor_error_comes_where_it_belongs(tmp_path):
    cfg = toys.config(tmp_path, batch_size=1, val=False)
    cfg['train_dataloader']['sampler']['shuffle'] = False
    runner = Runner.from_cfg(toys.prefetching(cfg, 2))
    dataset = runner.train_loop.dataloader.dataset
    getitem = type(dataset).__getitem__

    class Broken(type(dataset)):
        def __getitem__(self, index):
            item = getitem(self, index)
            if index == 5:
                item['inputs'] = 'no image'
            return item

    dataset.__class__ = Broken
    with pytest.raises(TypeError, match='no image') as caught:
        runner.train()
    assert len(toys.recorder(runner).losses) == 5
    assert any(entry.path.name == 'data_preprocessor.py' for entry in caught.traceback)


def test_infinite_sampler_stops_at_max_iters(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path, train=dict(by_epoch=False, max_iters=5)), 3)
    runner = Runner.from_cfg(cfg)
    asked = []
    dataset = runner.train_loop.dataloader.dataset
    getitem = type(dataset).__getitem__

    class Counting(type(dataset)):
        def __getitem__(self, index):
            asked.append(index)
            return getitem(self, index)

    dataset.__class__ = Counting
    runner.train()
    assert len(asked) == 5 * 4


def test_hook_is_registered_once_and_first(tmp_path):
    for hooks in ([], [dict(type='PrefetchHook')]):
        early = dict(type='StopAt', iteration=-1, priority='HIGHEST')
        cfg = toys.prefetching(toys.config(tmp_path, hooks=[early, *hooks]))
        runner, _ = toys.run(cfg)
        assert isinstance(runner.hooks[0], PrefetchHook)
        assert sum(isinstance(hook, PrefetchHook) for hook in runner.hooks) == 1


def test_test_loop(tmp_path):
    cfg = toys.config(tmp_path)
    cfg.update(
        test_dataloader=copy.deepcopy(cfg['val_dataloader']),
        test_cfg=dict(),
        test_evaluator=dict(type='ToyMetric'),
    )
    results = []
    for made in (Config(cfg), toys.prefetching(cfg)):
        torch.manual_seed(0)
        runner = Runner.from_cfg(made)
        runner.model.init_weights()
        results.append((type(runner.test_loop), runner.test()))
    assert results[0][1] == results[1][1]
    assert results[1][0] is PrefetchTestLoop


def test_loops_are_registered():
    for name in ('PrefetchLoop', 'PrefetchEpochBasedTrainLoop', 'PrefetchIterBasedTrainLoop',
                 'PrefetchValLoop', 'PrefetchTestLoop'):  # fmt: skip
        assert LOOPS.get(name) is not None


def test_model_without_preprocessor(tmp_path):
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def train_step(self, data, optim_wrapper):
            loss = (self.weight - len(data['inputs'])).square().sum()
            optim_wrapper.update_params(loss)
            return dict(loss=loss)

    weights = []
    for made in (toys.config(tmp_path, val=False), toys.config(tmp_path, val=False)):
        made['model'] = Bare()
        if weights:
            made['train_cfg'] = dict(type='PrefetchLoop', max_epochs=2)
        made.pop('experiment_name')
        runner = Runner(**made)
        runner.train()
        weights.append(runner.model.weight.item())
        assert isinstance(runner.train_loop.dataloader, LookAheadLoader) or len(weights) == 1
    assert weights[0] == weights[1] != 0


def test_arguments_are_those_of_the_installed_loops(tmp_path, monkeypatch):
    """Another version of mmengine, or a fork of it, may have more of them."""
    init = IterBasedTrainLoop.__init__

    def with_more(self, runner, dataloader, max_iters, fast_forward_on_resume=False, **kwargs):
        init(self, runner, dataloader, max_iters, **kwargs)
        self.fast_forward_on_resume = fast_forward_on_resume

    monkeypatch.setattr(IterBasedTrainLoop, '__init__', with_more)
    runner = Runner.from_cfg(Config(toys.config(tmp_path)))
    cfg = dict(type='PrefetchLoop', max_iters=3, fast_forward_on_resume=True)
    assert runner.build_train_loop(cfg).fast_forward_on_resume
    with pytest.raises(TypeError, match=r'fast_foward_on_resume.*fast_forward_on_resume'):
        runner.build_train_loop(dict(type='PrefetchLoop', max_iters=3, fast_foward_on_resume=1))
