# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Memory is given out again once nobody holds it, and never before."""

import copy
import os
import pickle
import threading
from unittest import mock

import pytest
import torch

from mmprefetch.ops import cpu, normalize_batch, recycle
from mmprefetch.ops.recycle import RecycledMemory

SHAPE = (4, 3, 64, 64)


@pytest.fixture
def pool():
    return RecycledMemory(min_bytes=1)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


def test_this_torch_counts_holders():
    assert recycle._HOLDERS_OF_IDLE is not None


def test_dropped_memory_comes_again(pool):
    first = pool.empty(SHAPE, torch.float32)
    where = address(first)
    del first
    again = pool.empty(SHAPE, torch.float32)
    assert address(again) == where and again.shape == SHAPE and again.is_contiguous()


def double(tensor):
    tensor.requires_grad_()
    return (tensor * tensor).sum()


HOLDERS = {
    'itself': lambda tensor: tensor,
    'view': lambda tensor: tensor.view(-1, 64)[64::2, 3:],
    'detached view': lambda tensor: tensor[0].detach(),
    'data': lambda tensor: tensor.data,
    'array': lambda tensor: tensor.numpy(),
    'array view': lambda tensor: tensor[1].numpy()[..., ::3],
    'memoryview': lambda tensor: memoryview(tensor.numpy()),
    'storage': lambda tensor: tensor.untyped_storage(),
    'typed storage': lambda tensor: torch.storage.TypedStorage(
        wrap_storage=tensor.untyped_storage(), dtype=tensor.dtype, _internal=True
    ),
    'autograd graph': double,
    'parameter': lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
    'dlpack': lambda tensor: torch.utils.dlpack.to_dlpack(tensor),
    'tensor on its storage': lambda tensor: torch.empty(0).set_(tensor.untyped_storage()),
    'closure': lambda tensor: lambda: tensor,
    'shallow copy': lambda tensor: [tensor.view_as(tensor)],
}


@pytest.mark.parametrize('kind', HOLDERS)
def test_held_memory_is_not_given_out(pool, kind):
    tensor = pool.empty(SHAPE, torch.float32).zero_()
    where = address(tensor)
    holder = HOLDERS[kind](tensor)
    del tensor
    others = [pool.empty(SHAPE, torch.float32).fill_(1) for _ in range(3)]
    assert where not in map(address, others)
    del holder
    assert address(pool.empty(SHAPE, torch.float32)) == where


def test_shared_and_resized_memory_is_not_given_out(pool):
    shared = pool.empty(SHAPE, torch.float32).share_memory_()
    resized = pool.empty(SHAPE, torch.float32)
    resized.untyped_storage().resize_(4)
    places = {address(shared), address(resized)}
    del shared, resized
    others = [pool.empty(SHAPE, torch.float32) for _ in range(3)]
    assert not places & set(map(address, others))
    assert all(other.untyped_storage().nbytes() >= other.nbytes for other in others)


def test_every_output_kept_is_what_it_was():
    generator = torch.Generator().manual_seed(0)
    mean, std = torch.tensor([120.0, 110, 100]), torch.tensor([50.0, 60, 70])
    kept, arrays, dropped, reused = [], [], set(), 0
    for step in range(30):
        image = torch.randint(0, 256, (3, 96, 90 + step % 3), generator=generator).byte()
        batch = normalize_batch([image, image], mean, std, size_divisor=32)
        expected = (image.float() - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        reused += address(batch) in dropped
        if step % 3 == 0:
            kept.append((batch[1, :, :, : image.shape[2]], expected))
        elif step % 3 == 1:
            arrays.append((batch[0, 1, :, : image.shape[2]].numpy(), expected[1]))
        else:
            dropped.add(address(batch))
        del batch
    assert all(torch.equal(view, expected) for view, expected in kept)
    assert all(torch.equal(torch.from_numpy(view), expected) for view, expected in arrays)
    assert reused > 0


def test_backward_after_more_batches():
    images = [torch.full((3, 96, 96), 9, dtype=torch.uint8)]
    mean, std = torch.zeros(3), torch.ones(3)
    weight = torch.ones(1, requires_grad=True)
    loss = (normalize_batch(images, mean, std) * weight).sum()
    for value in range(5):
        normalize_batch([torch.full_like(images[0], value)], mean, std)
    loss.backward()
    assert weight.grad.item() == 9 * 3 * 96 * 96


def test_layout_and_size_of_what_is_given_out(pool):
    where = address(pool.empty((4, 3, 64, 64), torch.float32))
    assert address(pool.empty((4, 3, 64, 60), torch.float32)) == where
    small = pool.empty((4, 3, 32, 32), torch.float32)
    assert small.untyped_storage().nbytes() < 1.3 * small.nbytes


@pytest.mark.parametrize('size', [1, 64, 65, 1000, 4097, 38535168])
def test_size_class_is_tight_and_stable(size):
    capacity = recycle._size_class(size)
    assert size <= capacity <= max(size * 1.125, size + 64)
    assert recycle._size_class(capacity) == capacity


def test_bounds():
    pool = RecycledMemory(max_bytes=10_000, max_blocks=3, min_bytes=100)
    held = [pool.empty((1024,), torch.uint8) for _ in range(6)]
    assert len(pool) == 3
    assert len({address(tensor) for tensor in held}) == 6
    held = [pool.empty((4096,), torch.uint8) for _ in range(3)]
    assert pool.nbytes <= 10_000
    known = len(pool)
    pool.empty((20_000,), torch.uint8)
    pool.empty((99,), torch.uint8)
    assert len(pool) == known


def test_sizes_no_longer_asked_for_are_forgotten():
    pool = RecycledMemory(max_age=4, min_bytes=1)
    pool.empty((100_000,), torch.uint8)
    for _ in range(4):
        pool.empty((1024,), torch.uint8)
    assert pool.nbytes == 1024


@pytest.mark.parametrize('again', [copy.deepcopy, lambda pool: pickle.loads(pickle.dumps(pool))])
def test_memory_stays_behind_when_the_owner_is_copied(pool, again):
    kept = pool.empty(SHAPE, torch.float32)
    copied = again(pool)
    assert len(copied) == 0 and len(pool) == 1
    assert copied._bounds == pool._bounds
    assert address(copied.empty(SHAPE, torch.float32)) != address(kept)


def test_without_counts_memory_is_fresh(pool):
    with mock.patch.object(recycle, '_HOLDERS_OF_IDLE', None):
        assert pool.empty(SHAPE, torch.float32).shape == SHAPE
    assert len(pool) == 0
    with mock.patch.object(recycle, '_use_count', None):
        assert recycle._holders_of_idle() is None


def test_counts_that_do_not_tell_are_found_out():
    with mock.patch.object(recycle._Block, 'holders', lambda block: (1, 3)):
        assert recycle._holders_of_idle() is None


def test_threads_never_share(pool):
    errors = []

    def work(value):
        for _ in range(200):
            tensor = pool.empty((1000,), torch.float32).fill_(value)
            view = tensor[10:]
            del tensor
            if not bool((view == value).all()):
                errors.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_forked_child_starts_with_an_empty_unlocked_pool(pool):
    pool.empty(SHAPE, torch.float32)
    pool._lock.acquire()
    child = os.fork()
    if child == 0:
        fine = len(pool) == 0 and pool._lock.acquire(timeout=5)
        os._exit(0 if fine else 1)
    pool._lock.release()
    assert os.waitpid(child, 0)[1] == 0
    assert len(pool) == 1


def test_outputs_and_scratch_come_from_one_pool():
    images = torch.zeros(2, 3, 128, 128, dtype=torch.uint8)
    mean, std = torch.zeros(3), torch.ones(3)
    places = set()
    for _ in range(5):
        places.add(address(normalize_batch(images, mean, std)))
    assert len(places) == 1
    assert len(cpu._memory) > 0
