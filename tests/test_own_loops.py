# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Look-ahead in loops that are not mmprefetch's."""

import copy
import gc
import threading

import pytest
import torch
import toys
from mmengine.dataset import pseudo_collate
from mmengine.model import ImgDataPreprocessor
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, Runner, ValLoop
from torch.utils.data import DataLoader

from mmprefetch import PrefetchDataPreprocessor, look_ahead
from mmprefetch.engine import Preparation

IMG = {key: value for key, value in toys.IMG.items() if key != 'type'}


@pytest.fixture
def begun(monkeypatch):
    """The tickets of the batches that were begun."""
    tickets, begin = [], Preparation.begin
    monkeypatch.setattr(
        Preparation, 'begin', lambda self, ticket: (tickets.append(ticket), begin(self, ticket))
    )
    return tickets


def dataloader(workers=1):
    return DataLoader(
        toys.ToyImages(), batch_size=3, num_workers=workers, collate_fn=pseudo_collate
    )


@pytest.mark.parametrize('flags', [(), (False,), (True,)])
@pytest.mark.parametrize(('workers', 'thread'), [(0, None), (1, None), (0, True)])
def test_a_plain_loop(begun, workers, thread, flags):
    preprocessor, stock = PrefetchDataPreprocessor(**IMG), ImgDataPreprocessor(**IMG)
    loader = look_ahead(dataloader(workers), preprocessor, loader_thread=thread)
    assert len(loader) == 5
    for _ in range(2):
        for batch, expected in zip(loader, dataloader(), strict=True):
            assert toys.same(preprocessor(batch, *flags), stock(expected, *flags))
    ahead = bool(workers or thread)
    assert len(begun) == 8 * ahead and all(ticket.claimed for ticket in begun)
    assert all(ticket.work is None for ticket in begun)


def test_it_ends_when_it_is_dropped(begun):
    preprocessor = PrefetchDataPreprocessor(**IMG)
    for batch in look_ahead(dataloader(), preprocessor):
        preprocessor(batch)
        break
    gc.collect()
    assert not [each for each in threading.enumerate() if each.name.startswith('mmprefetch')]
    assert preprocessor.runtime.due == []


@LOOPS.register_module(force=True)
class OwnTrainLoop(EpochBasedTrainLoop):
    """A loop of another package, with look-ahead."""

    def __init__(self, runner, dataloader, **kwargs):
        super().__init__(runner, dataloader, **kwargs)
        self.dataloader = look_ahead(self.dataloader, runner.model.data_preprocessor)


@LOOPS.register_module(force=True)
class OwnValLoop(ValLoop):
    def __init__(self, runner, dataloader, **kwargs):
        super().__init__(runner, dataloader, **kwargs)
        self.dataloader = look_ahead(self.dataloader, runner.model.data_preprocessor, 'val', 1)


def test_a_loop_of_mmengines_kind(tmp_path, begun):
    cfg = toys.config(tmp_path / 'a', workers=1)
    stock = toys.run(copy.deepcopy(cfg))
    cfg['work_dir'] = str(tmp_path / 'b')
    cfg['experiment_name'] = 'own'
    cfg['model']['data_preprocessor'].update(
        type='PrefetchDataPreprocessor', wraps='ImgDataPreprocessor'
    )
    cfg['train_cfg'] = dict(type='OwnTrainLoop', max_epochs=2)
    cfg['val_cfg'] = dict(type='OwnValLoop')
    toys.assert_same_run(stock, toys.run(cfg))
    assert len(begun) == 2 * (3 + 3)


@pytest.mark.parametrize('depth', [1, 3])
def test_two_splits_have_batches_in_flight_while_validation_runs_inside(
    tmp_path, monkeypatch, depth
):
    """Each split has its own bound: `depth` ahead, and the one in use."""
    held, most = set(), {}
    begin, withdraw = Preparation.begin, PrefetchDataPreprocessor.withdraw
    lock = threading.Lock()

    def counted(self, ticket):
        with lock:
            held.add(ticket)
            for split in ('train', 'val'):
                count = sum(each.split == split for each in held)
                most[split] = max(most.get(split, 0), count)
            most['both'] = max(most.get('both', 0), len(held))
        begin(self, ticket)

    def forgotten(self, ticket):
        with lock:
            held.discard(ticket)
        withdraw(self, ticket)

    monkeypatch.setattr(Preparation, 'begin', counted)
    monkeypatch.setattr(PrefetchDataPreprocessor, 'withdraw', forgotten)
    cfg = toys.config(tmp_path, workers=1, dataset=dict(length=40), batch_size=2,
                      train=dict(by_epoch=False, max_iters=12, val_interval=4))  # fmt: skip
    toys.run(toys.prefetching(cfg, depth))
    assert most['train'] <= depth + 1 and most['val'] <= depth + 1
    assert depth + 1 < most['both'] <= 2 * (depth + 1)


@pytest.mark.parametrize(
    ('arguments', 'error', 'words'),
    [
        ((ImgDataPreprocessor(),), TypeError, 'ImgDataPreprocessor.*around'),
        ((None,), TypeError, 'NoneType.*around'),
        ((PrefetchDataPreprocessor(), 'train', -1), ValueError, 'depth: found -1'),
        ((PrefetchDataPreprocessor(), 'train', 1.5), TypeError, 'depth: expected an int'),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        look_ahead([], *arguments)


def test_enable_prefetch_names_the_function(tmp_path, caplog):
    cfg = toys.config(tmp_path)
    cfg['train_cfg'] = dict(type='OwnTrainLoop', max_epochs=2)
    log_level = dict(log_level='WARNING')
    runner = Runner.from_cfg(toys.prefetching({**toys.config(tmp_path / 'log'), **log_level}))
    runner.logger.addHandler(caplog.handler)
    toys.prefetching(cfg)
    (said,) = [r.getMessage() for r in caplog.records if 'counterpart' in r.getMessage()]
    assert 'OwnTrainLoop' in said and 'mmprefetch.look_ahead(dataloader, preprocessor)' in said


def test_a_compiled_step_does_not_trace_the_look_ahead(begun):
    preprocessor = PrefetchDataPreprocessor(**IMG)
    step = torch.compile(lambda batch: preprocessor(batch, True)['inputs'] * 2, backend='eager')
    stock = ImgDataPreprocessor(**IMG)
    for batch in look_ahead(dataloader(), preprocessor):
        assert torch.equal(step(batch), stock(batch, True)['inputs'] * 2)
    assert len(begun) == 4 and all(ticket.claimed for ticket in begun)
