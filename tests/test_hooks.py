# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The hook tells which split runs, and is first whatever else there is."""

import torch
import toys
from mmengine.hooks import Hook, RuntimeInfoHook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

from mmprefetch import PrefetchDataPreprocessor, PrefetchHook
from mmprefetch.hooks import find_preprocessor, put_first


@HOOKS.register_module(force=True)
class Eager(Hook):
    """Would come before any other by its priority."""

    priority = 0

    def __init__(self):
        self.events = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.events.append(('hook', batch_idx))


def test_it_is_first_even_if_others_come_later(tmp_path):
    cfg = toys.prefetching(toys.config(tmp_path, hooks=[dict(type='Eager')]))
    runner = Runner.from_cfg(cfg)
    loop = runner.train_loop
    assert isinstance(runner.hooks[0], PrefetchHook)
    runner.register_hook(dict(type='Eager'), priority='HIGHEST')
    runner._hooks.insert(0, Eager())
    runner.train()
    assert runner.train_loop is loop
    assert isinstance(runner.hooks[0], PrefetchHook)
    assert sum(isinstance(hook, PrefetchHook) for hook in runner.hooks) == 1


def test_put_first_keeps_the_order_of_the_others():
    class FakeRunner:
        _hooks = [Eager(), PrefetchHook(), RuntimeInfoHook()]

    kinds = [type(hook) for hook in FakeRunner._hooks]
    put_first(FakeRunner)
    assert [type(hook) for hook in FakeRunner._hooks] == [PrefetchHook, kinds[0], kinds[2]]


def test_split_follows_the_loops(tmp_path, monkeypatch):
    cfg = toys.config(tmp_path)
    cfg['val_cfg'] = dict()
    cfg = toys.prefetching(cfg)
    cfg.val_cfg = dict(type='ValLoop')
    runner = Runner.from_cfg(cfg)
    seen = []
    forward = PrefetchDataPreprocessor.forward
    monkeypatch.setattr(
        PrefetchDataPreprocessor,
        'forward',
        lambda self, data, training=False: (
            seen.append((self.split, training)),
            forward(self, data, training),
        )[1],
    )
    runner.train()
    assert (
        seen
        == [('train', True)] * 4
        + [('val', False)] * 4
        + [('train', True)] * 4
        + [('val', False)] * 4
    )
    assert find_preprocessor(runner).split is None


def test_checkpoints_stay_loadable_by_the_safe_loader(tmp_path):
    runner, _ = toys.run(toys.prefetching(toys.config(tmp_path)))
    checkpoint = torch.load(tmp_path / 'epoch_2.pth', weights_only=True)
    record = checkpoint['meta']['data_preprocessor']
    assert record['train']['mean'] == toys.IMG['mean']
    assert record['val']['type'] == 'ImgDataPreprocessor'
    assert list(checkpoint['state_dict']) == list(runner.model.state_dict())
