# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Validation and test look ahead as well, and do what mmengine's loops do."""

import copy

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.model import BaseTTAModel
from mmengine.registry import HOOKS, MODELS
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement


@HOOKS.register_module(force=True)
class KeepInputs(Hook):
    """Keeps every input that the model was given, and a copy from that moment."""

    def before_run(self, runner):
        self.kept = []
        runner.model.conv.register_forward_pre_hook(
            lambda module, args: self.kept.append((args[0], args[0].clone()))
        )


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('depth', [0, 1, 3])
def test_a_tensor_that_anyone_holds_is_never_overwritten(tmp_path, depth, workers):
    train = dict(by_epoch=True, max_epochs=4)
    cfg = toys.config(tmp_path, workers=workers, hooks=[dict(type='KeepInputs')], train=train)
    runner, _ = toys.run(toys.prefetching(cfg, depth))
    kept = next(hook for hook in runner.hooks if isinstance(hook, KeepInputs)).kept
    assert len(kept) == 4 * (4 + 4)
    assert all(torch.equal(tensor, then) for tensor, then in kept)


@MODELS.register_module(force=True)
class LossInVal(toys.ToyModel):
    """Appends its loss to its predictions, which mmengine's loops take off again."""

    def forward(self, inputs, data_samples=None, mode='tensor'):
        out = super().forward(inputs, data_samples, mode)
        if mode != 'predict':
            return out
        loss = super().forward(inputs, data_samples, 'loss')['loss']
        return [*out, BaseDataElement(loss=dict(val_ce=loss))]


@pytest.mark.parametrize('fp16', [False, True])
@pytest.mark.parametrize('workers', [0, 2])
def test_loss_in_validation_and_fp16(tmp_path, workers, fp16):
    cfg = toys.config(tmp_path / 'a', workers=workers)
    cfg['model']['type'] = 'LossInVal'
    cfg['val_cfg'] = dict(fp16=fp16)
    stock = toys.run(cfg)
    assert 'val_ce' in stock[1].metrics[0]
    cfg['work_dir'] = str(tmp_path / 'b')
    toys.assert_same_run(stock, toys.run(toys.prefetching(cfg, 2)))


@MODELS.register_module(force=True)
class ToyTTA(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        merged = []
        for samples in data_samples_list:
            sample = samples[0].new()
            sample.score = sum(one.score for one in samples) / len(samples)
            merged.append(sample)
        return merged


class TwoViews(toys.ToyImages):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        image, sample = item['inputs'], item['data_samples']
        return dict(inputs=[image, image.flip(-1)], data_samples=[sample, sample.clone()])


toys.DATASETS.register_module(module=TwoViews, force=True)


def test_batches_that_a_model_takes_apart_first_are_no_harm(tmp_path, caplog):
    cfg = toys.config(tmp_path, batch_size=1, workers=1)
    test = copy.deepcopy(cfg['val_dataloader'])
    test['dataset']['type'] = 'TwoViews'
    cfg.update(
        model=dict(type='ToyTTA', module=cfg['model']),
        test_dataloader=test,
        test_cfg=dict(),
        test_evaluator=dict(type='ToyMetric'),
    )
    for split in ('train', 'val'):
        for name in ('dataloader', 'cfg', 'evaluator'):
            cfg.pop(f'{split}_{name}', None)
    for name in ('optim_wrapper', 'param_scheduler'):
        cfg.pop(name)
    results = []
    for made in (Config(cfg), toys.prefetching(cfg)):
        torch.manual_seed(0)
        runner = Runner.from_cfg(made)
        runner.model.module.init_weights()
        runner.logger.addHandler(caplog.handler)
        results.append([runner.test() for _ in range(2)])
    assert results[0] == results[1]
    warned = [r.getMessage() for r in caplog.records if 'look-ahead is now off' in r.getMessage()]
    assert len(warned) == 1 and 'test_cfg.prefetch_depth=0' in warned[0]
    assert not runner.test_loop.dataloader.looks_ahead
