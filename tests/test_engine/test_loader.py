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

from mmprefetch.engine import LookAheadLoader
from mmprefetch.engine.loader import UNCLAIMED_LIMIT
from mmprefetch.engine.thread import LoaderThread


class Numbers(Dataset):
    def __init__(self, length, fail_at=None, delay=0.0, die_at=None):
        self.length, self.fail_at, self.delay, self.die_at = length, fail_at, delay, die_at

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        if index:
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

    def __init__(self, claims=True):
        self.claims = claims
        self.due, self.open, self.begun, self.most, self.threads = [], [], [], 0, set()

    def preparation(self, split):
        return self

    def enter_thread(self):
        self.threads.add(threading.current_thread().name)

    def begin(self, ticket):
        self.open.append(ticket)
        self.begun.append(ticket.batch)
        self.most = max(self.most, len(self.open))

    def expect(self, ticket):
        self.due.append(ticket)

    def withdraw(self, ticket):
        self.due.remove(ticket)
        if ticket in self.open:
            self.open.remove(ticket)

    def model(self, batch):
        if self.claims:
            for ticket in self.due:
                if ticket.batch is batch:
                    ticket.claim()


def first_of(loader, preprocessor):
    """A pass whose thread has been started, and what it gave out."""
    current = iter(loader)
    batch = next(current)
    preprocessor.model(batch)
    return current, batch


@pytest.mark.parametrize('way', ['inside', 'instead'])
def test_a_second_pass_has_persistent_workers_of_its_own(way):
    dataloader = DataLoader(Numbers(12), batch_size=1, num_workers=2, persistent_workers=True)
    preprocessor = Recording()
    loader = LookAheadLoader(dataloader, preprocessor, 'train', 2)
    first = iter(loader)
    seen = [next(first).item()]
    if way == 'inside':
        assert next(iter(loader)).item() == 0
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
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(9, delay=30), num_workers=1), preprocessor, 'train', 2
    )
    current, _ = first_of(loader, preprocessor)
    assert loader_threads()

    def interrupted(self, within):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LoaderThread, 'stop', interrupted)
        loader.close()
    assert loader_threads()
    loader.close()
    assert not loader_threads() and not multiprocessing.active_children()
    assert list(current) == []


def test_a_thread_that_was_never_started_is_not_waited_for(monkeypatch):
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(9), num_workers=1), preprocessor, 'train', 2)

    def interrupted(self):
        raise KeyboardInterrupt

    current = iter(loader)
    batch = next(current)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(LoaderThread, 'start', interrupted)
        patch.setattr(LoaderThread, 'wake', lambda self: pytest.fail('nothing waits'))
        try:
            preprocessor.model(batch)
        finally:
            loader.close()


def test_who_waits_in_another_thread_is_told_of_the_close():
    preprocessor, ended = Recording(), []
    loader = LookAheadLoader(
        DataLoader(Numbers(9, delay=30), num_workers=1), preprocessor, 'train', 2
    )
    current, _ = first_of(loader, preprocessor)
    waiting = threading.Thread(target=lambda: ended.append(list(current)))
    waiting.start()
    time.sleep(0.1)
    loader.close()
    waiting.join(timeout=30)
    assert ended == [[]]


def test_a_pass_that_is_collected_in_its_own_thread():
    preprocessor, own = Recording(), []
    begin = preprocessor.begin

    def closing(ticket):
        begin(ticket)
        if ticket.batch.item() == 3:
            own[0].close()  # as the collector does, from `__del__`

    preprocessor.begin = closing
    dataloader = DataLoader(Numbers(20), batch_size=1, num_workers=1, persistent_workers=True)
    loader = LookAheadLoader(dataloader, preprocessor, 'train', 2)
    own.append(iter(loader))
    for batch in own[0]:
        preprocessor.model(batch)
    while loader_threads():
        time.sleep(0.01)
    assert preprocessor.due == [] and len(preprocessor.begun) <= 4
    assert not multiprocessing.active_children()


def test_the_dataloaders_timeout_counts_from_the_request():
    """The thread waits for a batch while the step of an earlier one still runs."""
    dataloader = DataLoader(
        Numbers(3, delay=4), batch_size=1, num_workers=1, timeout=2, persistent_workers=True
    )
    preprocessor = Recording()
    loader = LookAheadLoader(dataloader, preprocessor, 'train', 1)
    for _ in range(2):  # the second time with workers that have served already
        current, first = first_of(loader, preprocessor)
        errors, seen = [], [first.item()]
        while len(seen) < 2:  # whoever catches it may go on
            try:
                seen.append(next(current).item())
            except RuntimeError as error:
                errors.append(str(error))
        assert errors and set(errors) == {'DataLoader timed out after 2 seconds'}
        time.sleep(3.5)  # longer than the timeout, as a step may be
        seen += [batch.item() for batch in current]
        assert seen == [0, 1, 2]
        assert dataloader._iterator._timeout == 2
    loader.close()


@pytest.mark.parametrize('workers', [0, 2])
def test_a_hooks_own_pass_takes_nothing_from_the_loop(workers):
    preprocessor = Recording()
    dataloader = DataLoader(Numbers(20), batch_size=1, num_workers=workers)
    loader = LookAheadLoader(dataloader, preprocessor, 'train', 2)
    seen, inner = [], []
    for batch in itertools.islice(loader, 12):
        preprocessor.model(batch)
        seen.append(batch.item())
        if len(seen) in (1, 5):
            time.sleep(0.05)
            passes = []
            for other in loader:
                passes.append(other.item())
                if len(passes) == 6 and len(seen) == 1:
                    break
            inner.append(passes)
    loader.close()
    assert seen == list(range(12))
    assert inner == [list(range(6)), list(range(20))]
    assert len(preprocessor.begun) <= (11 + 2 if workers else 0)


def test_whoever_else_iterates_gets_the_plain_iterator():
    preprocessor = Recording()
    dataloader = DataLoader(Numbers(20), num_workers=1)
    loader = LookAheadLoader(dataloader, preprocessor, 'train', 2)
    first_of_loop = iter(loader)
    assert type(iter(loader)) is type(iter(dataloader))
    del first_of_loop
    gc.collect()
    assert type(iter(loader)) is not type(iter(dataloader))
    loader.close()


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
        preprocessor = Recording()
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
        assert not preprocessor.due


def wait_for(condition):
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize(('workers', 'thread'), [(2, None), (0, True)])
@pytest.mark.parametrize('depth', [1, 2, 5])
def test_depth_is_honoured(workers, thread, depth):
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(20), num_workers=workers), preprocessor, 'train', depth, thread
    )
    for index, batch in enumerate(loader):
        preprocessor.model(batch)
        wanted = min(index + depth, 19)
        wait_for(lambda wanted=wanted: len(preprocessor.begun) >= wanted)
        time.sleep(0.005)
        assert len(preprocessor.begun) == wanted
    loader.close()
    assert preprocessor.most <= depth + 1


@pytest.mark.parametrize(
    ('workers', 'thread', 'ahead'),
    [(0, None, False), (0, False, False), (0, True, True),
     (1, None, True), (1, False, False), (1, True, True)],
)  # fmt: skip
def test_where_there_is_look_ahead(workers, thread, ahead):
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(6), num_workers=workers), preprocessor, 'train', 2, thread
    )
    assert ids(loader, preprocessor) == [[index] for index in range(6)]
    assert preprocessor.threads == ({'mmprefetch-loader'} if ahead else set())
    assert loader.looks_ahead == ahead
    assert [batch.item() for batch in preprocessor.begun] == (list(range(1, 6)) if ahead else [])


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


@pytest.mark.parametrize('error', [KeyboardInterrupt, SystemExit])
def test_interrupts_raised_by_dataset_code_come_at_their_batch(error):
    class Interrupting(Numbers):
        def __getitem__(self, index):
            if index == 4:
                raise error
            return index

    preprocessor, seen = Recording(), []
    loader = LookAheadLoader(DataLoader(Interrupting(9)), preprocessor, 'train', 3, True)
    with pytest.raises(error):
        for batch in loader:
            preprocessor.model(batch)
            seen.append(batch.item())
            time.sleep(0.01)
    assert seen == [0, 1, 2, 3]
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
            batch = next(iterator)
            preprocessor.model(batch)
            seen.append(batch.item())
        except LookupError:
            seen.append('error')
        except StopIteration:
            break
    assert seen == [0, 1, 2, 'error', 4, 5, 6, 7, 8]


def test_close_ends_every_pass():
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(50), num_workers=1), preprocessor, 'train', 2)
    iterator, _ = first_of(loader, preprocessor)
    loader.close()
    assert leftovers() == []
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
    assert not preprocessor.due
    assert ids(loader, preprocessor) == [[index] for index in range(50)]
    loader.close()
    del loader, iterator
    assert leftovers() == []


def test_a_thread_that_waits_for_a_worker_is_woken():
    preprocessor = Recording()
    loader = LookAheadLoader(
        DataLoader(Numbers(4, delay=60), num_workers=1), preprocessor, 'train', 2
    )
    iterator, _ = first_of(loader, preprocessor)
    assert any(thread.name == 'mmprefetch-loader' for thread in threading.enumerate())
    begin = time.monotonic()
    loader.close()
    assert not loader_threads()
    assert next(iterator, None) is None
    assert time.monotonic() - begin < 50  # it did not sleep the item's minute out


def test_an_abandoned_iterator_ends_its_thread():
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(50), num_workers=1), preprocessor, 'train', 2)
    first_of(loader, preprocessor)
    del loader
    assert leftovers() == []
    assert preprocessor.due == []


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


def endless(dataset, **kwargs):
    return DataLoader(dataset, sampler=InfiniteSampler(dataset, shuffle=False), **kwargs)


@pytest.mark.parametrize('workers', [0, 2])
def test_a_loop_that_is_paused_goes_on_without_a_gap(workers):
    preprocessor = Recording()
    loader = LookAheadLoader(endless(Numbers(5), num_workers=workers), preprocessor, 'train', 3)
    current, seen = iter(loader), []
    for _ in range(3):
        for batch in itertools.islice(current, 6):
            preprocessor.model(batch)
            seen.append(batch.item())
        loader.pause()
        assert not loader_threads()
    assert seen == [index % 5 for index in range(18)]
    assert bool(preprocessor.begun) == bool(workers)
    loader.close()
    assert leftovers() == []


@pytest.mark.parametrize('workers', [0, 2])
def test_batches_that_are_passed_over_are_not_begun(workers):
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(20), num_workers=workers), preprocessor, 'train', 3)
    seen = []
    for index, batch in enumerate(loader):
        if index >= 8:
            preprocessor.model(batch)
        seen.append(batch.item())
    assert seen == list(range(20))
    assert [batch.item() for batch in preprocessor.begun] == (list(range(9, 20)) if workers else [])
    assert loader.looks_ahead == bool(workers)
    loader.close()
    assert loader.looks_ahead == bool(workers)


@pytest.mark.parametrize('claimed', [0, 6])
def test_batches_that_are_never_asked_for_end_the_look_ahead(claimed):
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(30), num_workers=1), preprocessor, 'test', 2)
    seen = []
    for index, batch in enumerate(loader):
        if index < claimed:
            preprocessor.model(batch)
        seen.append(batch.item())
    assert seen == list(range(30))
    assert len(preprocessor.begun) <= (claimed + UNCLAIMED_LIMIT + 2 if claimed else 0)
    loader.close()
    assert not loader.looks_ahead
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


def test_an_epoch_is_whole_when_look_ahead_ends_while_a_batch_takes_long(monkeypatch):
    stop = LoaderThread.stop
    monkeypatch.setattr(LoaderThread, 'stop', lambda self, within: stop(self, within / 100))
    preprocessor = Recording()
    loader = LookAheadLoader(DataLoader(Numbers(7, delay=0.3), num_workers=1), preprocessor, 'x', 1)
    seen = []
    for batch in loader:
        if not seen:
            preprocessor.model(batch)
        seen.append(batch.item())
    assert seen == list(range(7))
    assert not loader.looks_ahead


@pytest.mark.parametrize('workers', [0, 1])
def test_an_error_before_the_work_is_begun_loses_no_batch(workers):
    preprocessor = Recording()

    def begin(ticket):
        if ticket.batch.item() in (2, 5):
            ticket.error = OSError('no stream')

    preprocessor.begin = begin
    dataloader = DataLoader(Numbers(9), num_workers=workers)
    current = iter(LookAheadLoader(dataloader, preprocessor, 'train', 2, True))
    seen = []
    while True:
        try:
            batch = next(current)
        except OSError:
            seen.append('error')
        except StopIteration:
            break
        else:
            preprocessor.model(batch)
            seen.append(batch.item())
    assert seen in ([0, 1, 'error', 3, 4, 'error', 6, 7, 8], [0, 1, 'error', 3, 4, 5, 6, 7, 8])
    assert leftovers() == []
