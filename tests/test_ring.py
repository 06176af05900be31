# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Staging buffers are used again, but by nobody before the copy out of them has finished."""

import threading

import pytest
import torch

from mmprefetch.ring import PinnedRing


@pytest.fixture
def pageable(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(
        torch, 'empty', lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    )


def test_a_buffer_is_reused_only_after_its_copy(pageable):
    ring = PinnedRing(2)
    waited = []
    first, second = ring.take(100), ring.take(100)
    places = [first.buffer.data_ptr(), second.buffer.data_ptr()]
    first.copied(lambda: waited.append('first'))
    second.copied(lambda: waited.append('second'))
    assert len(set(places)) == 2 and not waited
    again = ring.take(100)
    assert waited == ['first'] and again.buffer.data_ptr() == places[0]
    other = ring.take(100)
    assert waited == ['first', 'second'] and other.buffer.data_ptr() == places[1]


def test_a_buffer_that_is_staged_is_never_given_out(pageable):
    ring = PinnedRing(2)
    leases = [ring.take(100) for _ in range(5)]
    assert len({lease.buffer.data_ptr() for lease in leases}) == 5
    for lease in leases:
        lease.copied(lambda: None)
    assert ring.nbytes == 2 * 128, 'those beyond its slots are not kept'
    for lease in leases:
        lease.copied(lambda: pytest.fail('a buffer is given back once'))
    for _ in range(4):
        ring.take(100).copied(lambda: None)
    assert ring.nbytes == 2 * 128


def test_a_batch_that_is_dropped_gives_its_buffer_back(pageable):
    ring = PinnedRing(2)
    place = ring.take(100).buffer.data_ptr()
    for _ in range(10):
        assert ring.take(100).buffer.data_ptr() == place
    assert ring.nbytes == 128


def test_bounded_over_many_sizes(pageable):
    ring = PinnedRing(4)
    sizes = torch.randint(1, 1 << 16, (10_000,), generator=torch.Generator().manual_seed(0))
    held, leases = [], []
    for size in sizes.tolist():
        leases.append(ring.take(size))
        assert leases[-1].buffer.numel() == size
        if len(leases) == 3:
            leases.pop(0).copied(lambda: None)
        held.append(ring.nbytes)
    assert max(held) <= 4 * (1 << 16)
    assert len(set(held[1000:])) == 1


def test_threads_never_share_a_buffer(pageable):
    ring = PinnedRing(2)
    wrong = []

    def work(value):
        for size in range(1, 400):
            lease = ring.take(size)
            lease.buffer.fill_(value)
            if not (lease.buffer == value).all():
                wrong.append(value)
            if size % 3:
                lease.copied(lambda: None)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_no_pinned_memory_warns_once():
    if torch.accelerator.is_available():
        pytest.skip('pinned memory can be had here')
    ring = PinnedRing(2)
    with pytest.warns(UserWarning, match='pageable memory.*prefetch_depth') as caught:
        for size in (1 << 10, 1 << 12):
            ring.take(size).buffer.fill_(1)
    assert len(caught) == 1
