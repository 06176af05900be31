# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Batches come in order, bounded, each begun once, and the pass ends cleanly."""

import gc
import itertools
import multiprocessing
import threading
import time

import pytest
import torch
from mmengine.dataset import InfiniteSampler
from torch.utils.data import DataLoader, Dataset, IterableDataset

from mmprefetch.loading import LoaderThread
from mmprefetch.lookahead import UNREDEEMED_LIMIT, LookAheadLoader


class Numbers(Dataset):
    def __init__(self, length, fail_at=None, delay=0.0, die_at=None):
        self.length, self.fail_at, self.delay, self.die_at = length, fail_at, delay, die_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        time.sleep(self.delay)
        if index == self.fail_at:
            raise LookupError(f'no item {index}')
        if index == self.die_at:
            import os
            import signal

            os.kill(os.getpid(), signal.SIGKILL)
        return index


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(7))


class Recording:
    """A preprocessor that keeps account."""

    compute_on_host = True

    def __init__(self, redeem=True):
        self.redeem = redeem
        self.open, self.begun, self.most, self.threads = [], [], 0, set()

    def stage(self, batch, split, depth, parts=None):
        self.threads.add(threading.current_thread().name)
        return None

    def prefetch(self, batch, training, split, staged):
        self.open.append(batch)
        self.begun.append(batch)
        self.most = max(self.most, len(self.open))

    def discard(self, batch):
        if any(batch is other for other in self.open):
            self.open = [other for other in self.open if other is not batch]
            return True
        return False

    def close(self):
        self.closed = True

    def model(self, batch):
        if self.redeem:
            assert self.discard(batch)


@pytest.mark.parametrize('way', ['inside', 'instead'])
def test_a_second_pass_has_persistent_workers_of_its_own(way):
    dataloader = DataLoader(Numbers(12), batch_size=1, num_workers=2, persistent_workers=True)
    preprocessor = Recording()
    loader = LookAheadLoader(dataloader, preprocessor, 'train', 2)
    first = iter(loader)
    seen = [next(first).item()]
    if way == 'inside':
        assert next(iter(loader)).item() == 0
        preprocessor.open.clear()
        assert seen + [batch.item() for batch in first] == list(range(12))
    else:
        first = iter(loader)
    for _ in range(2):
        assert [batch.item() for batch in (first if way == 'instead' else loader)] == list(
            range(12)
        )
        first = iter(loader)
        assert dataloader._iterator is not None
    loader.close()
    assert not loader_threads()


def loader_threads():
    return [each for each in threading.enumerate() if each.name == 'mmprefetch-loader']


def test_a_close_that_is_broken_off_can_be_called_again(monkeypatch):
    loader = LookAheadLoader(
        DataLoader(Numbers(9, delay=30), num_workers=1), Recording(), 'train', 2
    )
    current = iter(loader)
    current.fill()
    assert loader_threads()

    def interrupted(self, within):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LoaderThread, '_has_ended', interrupted)
        loader.close()
    assert loader_threads()
    loader.close()
    assert not loader_threads() and not multiprocessing.active_children()
    assert list(current) == []


def test_a_thread_that_was_never_started_is_not_waited_for(monkeypatch):
    loader = LookAheadLoader(DataLoader(Numbers(9), num_workers=1), Recording(), 'train', 2)

    def interrupted(self):
        raise KeyboardInterrupt

    current = iter(loader)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LoaderThread, 'start', interrupted)
        patch.setattr(LoaderThread, '_wake', lambda self: pytest.fail('nothing waits'))
        try:
            next(current)
        finally:
            loader.close()


def test_who_waits_in_another_thread_is_told_of_the_close():
    loader = LookAheadLoader(
        DataLoader(Numbers(9, delay=30), num_workers=1), Recording(), 'train', 2
    )
    current, ended = iter(loader), []
    waiting = threading.Thread(target=lambda: ended.append(list(current)))
    waiting.start()
    while not loader_threads():
        time.sleep(0.01)
    loader.close()
    waiting.join(timeout=30)
    assert ended == [[]]


def test_a_pass_that_is_collected_in_its_own_thread():
    preprocessor, own = Recording(), []

    def stage(batch, split, depth, parts=None):
        if batch.item() == 3:
            own[0].close()  # as the collector does, from `__del__`
        return None

    preprocessor.stage = stage
    dataloader = DataLoader(Numbers(20), batch_size=1, num_workers=1, persistent_workers=True)
    loader = LookAheadLoader(dataloader, preprocessor, 'train', 2)
    own.append(iter(loader))
    preprocessor.model(next(own[0]))
    for batch in own[0]:
        preprocessor.model(batch)
    while loader_threads():
        time.sleep(0.01)
    assert preprocessor.open == [] and len(preprocessor.begun) <= 4
    assert not multiprocessing.active_children()


def test_the_dataloaders_timeout_counts_from_the_request():
    """The thread waits for a batch while the step of an earlier one still runs."""
    dataloader = DataLoader(
        Numbers(2, delay=4), batch_size=1, num_workers=1, timeout=2, persistent_workers=True
    )
    preprocessor = Recording()
    loader = LookAheadLoader(dataloader, preprocessor, 'train', 1)
    for _ in range(2):  # the second time with workers that have served already
        current, errors, seen = iter(loader), [], []
        while not seen:  # whoever catches it may go on
            try:
                seen.append(next(current))
            except RuntimeError as error:
                errors.append(str(error))
        assert errors and set(errors) == {'DataLoader timed out after 2 seconds'}
        preprocessor.model(seen[0])
        time.sleep(3.5)  # longer than the timeout, as a step may be
        for batch in current:
            preprocessor.model(batch)
            seen.append(batch)
        assert seen == [0, 1]
    loader.close()


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('limit', [None, 12])
def test_a_hooks_own_pass_takes_nothing_from_the_loop(workers, limit):
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(20), batch_size=1, num_workers=workers), preprocessor, 'train', 2
    )
    outer = iter(loader)
    if limit is not None:
        loader.plan(skip=2, limit=limit - 2)
    seen, inner = [], []
    for batch in itertools.islice(outer, 12):
        if len(seen) >= 2 or limit is None:
            preprocessor.model(batch)
        seen.append(batch.item())
        loader.fill()
        if len(seen) in (1, 5):
            time.sleep(0.05)
            passes = []
            for other in loader:
                preprocessor.model(other)
                passes.append(other.item())
                if len(passes) == 6 and len(seen) == 1:
                    break
            inner.append(passes)
    loader.close()
    assert seen == list(range(12))
    assert inner == [list(range(6)), list(range(20))]


def test_a_pass_that_nobody_redeems_ends_look_ahead_for_itself_alone():
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(20), batch_size=1), preprocessor, 'train', 2)
    outer = iter(loader)
    for batch in itertools.islice(outer, 4):
        preprocessor.model(batch)
    for _ in range(2):
        assert len(list(loader)) == 20
    assert loader._depth == 2
    begun = len(preprocessor.begun)
    rest = list(outer)
    assert len(rest) == 16 and len(preprocessor.begun) > begun


def ids(loader, preprocessor):
    seen = []
    for batch in loader:
        preprocessor.model(batch)
        seen.append(batch)
    return [batch.tolist() for batch in seen]


def plain(dataset, **kwargs):
    return [batch.tolist() for batch in DataLoader(dataset, **kwargs)]


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('depth', [0, 1, 2, 3])
def test_ids_equal_those_of_a_plain_loop(workers, depth):
    for length in (0, 1, 2, 7):
        kwargs = dict(batch_size=2, num_workers=workers)
        preprocessor = Recording(redeem=depth > 0)
        loader = LookAheadLoader(
            DataLoader(Numbers(length), **kwargs), preprocessor, 'train', depth
        )
        for _ in range(2):
            assert ids(loader, preprocessor) == plain(Numbers(length), **kwargs)
        iterator = iter(loader)
        for batch in iterator:
            preprocessor.model(batch)
        for _ in range(3):
            with pytest.raises(StopIteration):
                next(iterator)
        loader.close()
        assert preprocessor.most <= depth + 1
        assert not preprocessor.open


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('depth', [1, 2, 5])
def test_depth_is_honoured(workers, depth):
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(20), num_workers=workers), preprocessor, 'train', depth
    )
    iterator = iter(loader)
    for index in range(20):
        batch = next(iterator)
        deadline = time.monotonic() + 20
        while len(preprocessor.begun) < min(index + 1 + depth, 20):
            loader.fill()
            assert time.monotonic() < deadline
        loader.fill()
        assert len(preprocessor.begun) == min(index + 1 + depth, 20)
        preprocessor.model(batch)
    loader.close()
    assert preprocessor.most == depth + 1


def test_accelerators_begin_after_the_step():
    preprocessor = Recording()
    preprocessor.compute_on_host = False
    loader = LookAheadLoader(DataLoader(Numbers(6)), preprocessor, 'train', 2)
    iterator = iter(loader)
    for index in range(6):
        batch = next(iterator)
        assert len(preprocessor.begun) == (1 if index == 0 else min(index + 2, 6))
        preprocessor.model(batch)
        loader.fill()
        assert len(preprocessor.begun) == min(index + 3, 6)


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('at', [0, 5])
def test_an_error_comes_at_its_batch(workers, at):
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(9, fail_at=at), num_workers=workers), preprocessor, 'train', 3
    )
    seen = []
    with pytest.raises(LookupError, match=f'no item {at}'):
        for batch in loader:
            preprocessor.model(batch)
            seen.append(batch.item())
    assert seen == list(range(at))
    loader.close()
    assert leftovers() == []


@pytest.mark.parametrize('workers', [0, 2])
def test_whoever_catches_an_error_may_go_on(workers):
    preprocessor = Recording()
    dataloader = DataLoader(Numbers(9, fail_at=3), num_workers=workers)
    iterator = iter(LookAheadLoader(dataloader, preprocessor, 'train', 2))
    seen = []
    while True:
        try:
            seen.append(next(iterator).item())
        except LookupError:
            seen.append('error')
        except StopIteration:
            break
    assert seen == [0, 1, 2, 'error', 4, 5, 6, 7, 8]


def test_close_ends_every_pass():
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(50), num_workers=1), preprocessor, 'train', 2)
    iterators = [iter(loader), iter(loader)]
    for iterator in iterators:
        next(iterator)
    loader.close()
    assert leftovers() == []
    for iterator in iterators:
        with pytest.raises(StopIteration):
            next(iterator)


def test_a_worker_that_is_killed_is_named():
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(9, die_at=4), num_workers=1), preprocessor, 'train', 2
    )
    with pytest.raises(RuntimeError, match=r'worker .*(killed|exited|exit code -9)'):
        ids(loader, preprocessor)
    loader.close()


def leftovers():
    gc.collect()
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        left = [thread.name for thread in threading.enumerate()
                if thread.name.startswith('mmprefetch')]  # fmt: skip
        left += [child.name for child in multiprocessing.active_children()]
        if not left:
            break
        time.sleep(0.05)
    return left


@pytest.mark.parametrize('persistent', [False, True])
@pytest.mark.parametrize('taken', [0, 1, 4])
def test_nothing_is_left_when_a_pass_is_broken_off(persistent, taken):
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(50, delay=0.01), num_workers=2, persistent_workers=persistent),
        preprocessor,
        'train',
        2,
    )
    iterator = iter(loader)
    for batch in itertools.islice(iterator, taken):
        preprocessor.model(batch)
    loader.close()
    assert leftovers() == []
    with pytest.raises(StopIteration):
        next(iterator)
    assert not preprocessor.open
    assert ids(loader, preprocessor) == [[index] for index in range(50)]
    loader.close()
    del loader, iterator
    assert leftovers() == []


def test_a_thread_that_waits_for_a_worker_is_woken():
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(4, delay=60), num_workers=1), preprocessor, 'train', 2
    )
    iterator = iter(loader)
    iterator.fill()
    assert any(thread.name == 'mmprefetch-loader' for thread in threading.enumerate())
    begin = time.monotonic()
    loader.close()
    assert not any(thread.name == 'mmprefetch-loader' for thread in threading.enumerate())
    assert time.monotonic() - begin < 50  # it did not sleep the item's minute out


def test_an_abandoned_iterator_ends_its_thread():
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(50), num_workers=1), preprocessor, 'train', 2)
    next(iter(loader))
    del loader
    assert leftovers() == []


def test_loader_thread_can_be_turned_off():
    for on in (True, False):
        preprocessor = Recording()
        loader = LookAheadLoader(
            DataLoader(Numbers(6), num_workers=1), preprocessor, 'train', 2, loader_thread=on
        )
        assert ids(loader, preprocessor) == [[index] for index in range(6)]
        assert preprocessor.threads == {'mmprefetch-loader' if on else 'MainThread'}


@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_spawn_and_fork(method):
    preprocessor = Recording()
    kwargs = dict(num_workers=2, multiprocessing_context=method, batch_size=3)
    loader = LookAheadLoader(DataLoader(Numbers(10), **kwargs), preprocessor, 'train', 2)
    assert ids(loader, preprocessor) == plain(Numbers(10), batch_size=3)
    loader.close()


@pytest.mark.parametrize('workers', [0, 1])
def test_iterable_dataset(workers):
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Stream(), batch_size=2, num_workers=workers), preprocessor, 'train', 3
    )
    assert ids(loader, preprocessor) == [[0, 1], [2, 3], [4, 5], [6]]


@pytest.mark.parametrize('workers', [0, 2])
def test_plan_limits_an_endless_loader(workers):
    preprocessor = Recording()
    dataset = Numbers(5)
    loader = LookAheadLoader(
        DataLoader(dataset, sampler=InfiniteSampler(dataset, shuffle=False), num_workers=workers),
        preprocessor,
        'train',
        3,
    )
    loader.plan(skip=4, limit=8)
    iterator = iter(loader)
    seen = list(itertools.islice(iterator, 4))
    assert not preprocessor.begun
    for _ in range(8):
        seen.append(next(iterator))
        preprocessor.model(seen[-1])
    assert [batch.item() for batch in seen] == [index % 5 for index in range(12)]
    assert len(preprocessor.begun) == 8
    # A loop that changes its mind gets more.
    seen = [next(iterator) for _ in range(6)]
    assert [batch.item() for batch in seen] == [index % 5 for index in range(12, 18)]
    loader.close()
    assert leftovers() == []


@pytest.mark.parametrize('workers', [0, 2])
def test_an_endless_loader_goes_on_after_passes_that_were_closed(workers):
    preprocessor, dataset = Recording(), Numbers(5)
    loader = LookAheadLoader(
        DataLoader(dataset, sampler=InfiniteSampler(dataset, shuffle=False), num_workers=workers),
        preprocessor,
        'train',
        1,
    )
    for _ in range(3):
        loader.plan(limit=6)
        seen = []
        for batch in itertools.islice(loader, 4):
            preprocessor.model(batch)
            seen.append(batch.item())
        loader.close()
        assert seen == [index % 5 for index in range(seen[0], seen[0] + 4)]


def test_batches_that_are_never_asked_for_end_the_look_ahead():
    preprocessor = Recording(redeem=False)
    loader = LookAheadLoader(DataLoader(Numbers(30)), preprocessor, 'test', 2)
    assert ids(loader, preprocessor) == [[index] for index in range(30)]
    assert len(preprocessor.begun) <= UNREDEEMED_LIMIT + 2
    assert not preprocessor.open
    begun = len(preprocessor.begun)
    assert ids(loader, preprocessor) == [[index] for index in range(30)]
    assert len(preprocessor.begun) == begun


def test_the_iterator_is_made_when_the_loop_makes_it():
    preprocessor = Recording()
    dataloader = DataLoader(Numbers(4), shuffle=True)
    torch.manual_seed(5)
    iter(dataloader)
    expected = torch.rand(1)
    torch.manual_seed(5)
    iter(LookAheadLoader(dataloader, preprocessor, 'train', 2))
    assert torch.equal(torch.rand(1), expected)


def test_it_stands_in_for_the_dataloader():
    dataloader = DataLoader(Numbers(4), batch_size=2)
    loader = LookAheadLoader(dataloader, Recording(), 'train', 2)
    assert isinstance(loader, DataLoader)
    assert len(loader) == 2 and loader.dataset is dataloader.dataset
    loader.epoch = 3
    assert dataloader.epoch == 3
    with pytest.raises(ValueError, match='should not be set'):
        loader.batch_size = 5
