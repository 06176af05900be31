# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Runners that build their loops before their model, and loops of several dataloaders."""

import copy

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.evaluator import Evaluator
from mmengine.registry import LOOPS
from mmengine.runner import FlexibleRunner, Runner, ValLoop
from mmengine.runner.base_loop import BaseLoop

from mmprefetch.engine import Preparation

DATASET = dict(mean=[9.0, 8.0, 7.0], std=[2.0, 3.0, 4.0])
OTHER = dict(mean=[1.0, 2.0, 3.0], std=[4.0, 5.0, 6.0])
ITERS = dict(by_epoch=False, max_iters=9, val_interval=4)


def run_flexibly(cfg):
    """Train with a FlexibleRunner; return the runner and the record of the run."""
    torch.manual_seed(0)
    runner = FlexibleRunner.from_cfg(Config(cfg) if isinstance(cfg, dict) else cfg)
    runner.train()
    return runner, toys.recorder(runner)


def flexible(cfg):
    cfg['default_hooks']['checkpoint'] = None
    cfg['env_cfg'] = dict(dist_cfg=dict(backend='gloo'))
    return cfg


@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('train', [None, ITERS], ids=['epochs', 'iterations'])
@pytest.mark.parametrize('bound', [None, 'one', 'mixed'])
def test_a_runner_that_builds_its_model_last(tmp_path, monkeypatch, bound, train, workers):
    begun, begin = [], Preparation.begin
    monkeypatch.setattr(
        Preparation, 'begin', lambda self, ticket: (begun.append(ticket), begin(self, ticket))
    )
    stock = toys.config(tmp_path / 'a', workers=workers, train=train)
    ours = copy.deepcopy(stock)
    ours['work_dir'] = str(tmp_path / 'b')
    if bound is not None:
        stock['model']['data_preprocessor'].update(DATASET)
    for split in ('train', 'val'):
        dataset = ours[f'{split}_dataloader']['dataset']
        if bound is not None:
            dataset['data_preprocessor'] = dict(DATASET)
        if bound == 'mixed':
            # Both parts have the same values but for a channel order that says the same.
            part = dict(dataset, type='FullToyImages')
            ours[f'{split}_dataloader']['dataset'] = dict(
                type='ConcatDataset',
                datasets=[part, dict(part, data_preprocessor=dict(DATASET, bgr_to_rgb=True))],
            )
            stock[f'{split}_dataloader']['dataset'] = dict(
                type='ConcatDataset', datasets=[dict(type='FullToyImages')] * 2
            )
    expected, record = run_flexibly(flexible(stock))
    runner, ours_record = run_flexibly(toys.prefetching(flexible(ours)))
    assert record.losses == ours_record.losses and record.losses
    assert record.metrics == ours_record.metrics
    assert toys.same(dict(expected.model.state_dict()), dict(runner.model.state_dict()))
    assert bool(begun) == bool(workers) and all(ticket.claimed for ticket in begun[:3])


@toys.DATASETS.register_module(force=True)
class FullToyImages(toys.ToyImages):
    def full_init(self):
        pass


@LOOPS.register_module(force=True)
class SeveralValLoop(ValLoop):
    """Validates on several dataloaders, one evaluator for each, as loops of other packages do."""

    def __init__(self, runner, dataloader, evaluator):
        BaseLoop.__init__(self, runner, runner.build_dataloader(dataloader[0]))
        self.fp16, self.val_loss = False, {}
        self.dataloaders = [runner.build_dataloader(each) for each in dataloader]
        self.evaluators = [Evaluator(toys.METRICS.build(each)) for each in evaluator]

    def run(self):
        self.runner.call_hook('before_val')
        self.runner.call_hook('before_val_epoch')
        self.runner.model.eval()
        metrics = {}
        for number, (loader, evaluator) in enumerate(
            zip(self.dataloaders, self.evaluators, strict=True)
        ):
            for batch in loader:
                with torch.no_grad():
                    evaluator.process(self.runner.model.val_step(batch), batch)
            for name, value in evaluator.evaluate(len(loader.dataset)).items():
                metrics[f'{number}/{name}'] = value
        self.runner.call_hook('after_val_epoch', metrics=metrics)
        self.runner.call_hook('after_val')


def several(work_dir, preprocessor=None, **bound):
    cfg = toys.config(work_dir, **({} if preprocessor is None else dict(preprocessor=preprocessor)))
    loader, evaluator = cfg['val_dataloader'], cfg['val_evaluator']
    loaders = [copy.deepcopy(loader), copy.deepcopy(loader)]
    loaders[1]['dataset']['length'] = 6
    for number, fields in enumerate(bound.values()):
        if fields is not None:
            loaders[number]['dataset']['data_preprocessor'] = dict(fields)
    cfg.update(
        val_dataloader=loaders, val_evaluator=[evaluator] * 2, val_cfg=dict(type='SeveralValLoop')
    )
    return cfg


@pytest.mark.parametrize('bound', [False, True])
def test_a_list_of_val_dataloaders(tmp_path, bound):
    stock = toys.run(several(tmp_path / 'a'))
    fields = dict(first=None, second=None)
    if bound:  # to what the model says anyway, so that only the keys have to be taken out
        own = {key: toys.IMG[key] for key in ('mean', 'std')}
        fields = dict(first=own, second=own)
    cfg = toys.prefetching(several(tmp_path / 'b', **fields))
    assert cfg.val_cfg.type == 'SeveralValLoop'
    toys.assert_same_run(stock, toys.run(cfg))
    assert set(stock[1].metrics[0]) == {'0/score', '1/score'}


def test_the_fields_of_a_list_are_applied(tmp_path):
    stock = toys.run(several(tmp_path / 'a', dict(toys.IMG, **DATASET)))
    cfg = toys.prefetching(several(tmp_path / 'b', first=DATASET, second=DATASET))
    cfg.train_dataloader.dataset.data_preprocessor = dict(DATASET)
    toys.assert_same_run(stock, toys.run(cfg))


def test_a_list_that_binds_different_fields_is_an_error_before_training(tmp_path):
    cfg = toys.prefetching(several(tmp_path, first=DATASET, second=OTHER))
    runner = Runner.from_cfg(cfg)
    with pytest.raises(ValueError, match=r'val_dataloader\.1\.dataset.*val_dataloader\.0\.dataset'):
        runner.train()
    assert toys.recorder(runner).losses == []


@pytest.mark.parametrize('workers', [0, 2])
def test_training_by_iterations_runs_on_after_its_end(tmp_path, workers):
    runs = []
    for prefetch in (False, True):
        train = dict(by_epoch=False, max_iters=5)
        cfg = toys.config(tmp_path / f'{prefetch}', workers=workers, val=False, train=train,
                          dataset=dict(length=40))  # fmt: skip
        runner = Runner.from_cfg(toys.prefetching(cfg) if prefetch else Config(cfg))
        runner.train()
        loop = runner.train_loop
        for more in (4, 3):
            loop._max_iters += more
            loop.run()
        runs.append((runner, toys.recorder(runner)))
    assert len(runs[0][1].indices) == 12
    toys.assert_same_run(*runs)
