# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Memory is given out again once nobody holds it, and never before."""

import copy
import io
import os
import threading

import pytest
import torch

from mmprefetch.ops import cpu, memory, normalize_batch
from mmprefetch.ops.memory import HostMemory

SHAPE = (4, 3, 64, 64)


@pytest.fixture
def pool():
    return HostMemory(min_bytes=1)


def address(tensor):
    return tensor.untyped_storage().data_ptr()


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


def test_shared_memory_is_no_longer_the_block(pool):
    shared = pool.empty(SHAPE, torch.float32).fill_(7).share_memory_()
    others = [pool.empty(SHAPE, torch.float32).fill_(1) for _ in range(3)]
    assert address(shared) not in map(address, others)
    assert shared.is_shared() and bool((shared == 7).all())


def test_storage_is_not_resized_under_a_block(pool):
    tensor = pool.empty(SHAPE, torch.float32)
    for size in (4, 2 * tensor.nbytes):
        with pytest.raises(RuntimeError, match='not resizable'):
            tensor.untyped_storage().resize_(size)


def test_what_another_thread_holds_is_not_given_out(pool):
    tensors, let_go, seen = [pool.empty(SHAPE, torch.float32).fill_(7)], threading.Event(), []
    where = address(tensors[0])

    def hold(tensor):
        let_go.wait(10)
        seen.append(bool((tensor == 7).all()))

    thread = threading.Thread(target=hold, args=tensors)
    thread.start()
    tensors.clear()
    others = [pool.empty(SHAPE, torch.float32).fill_(1) for _ in range(3)]
    assert where not in map(address, others)
    let_go.set()
    thread.join()
    assert seen == [True]
    assert address(pool.empty(SHAPE, torch.float32)) == where


def test_each_thread_has_blocks_of_its_own(pool):
    where, others = address(pool.empty(SHAPE, torch.float32)), []
    thread = threading.Thread(
        target=lambda: others.append((len(pool), pool.empty(SHAPE, torch.float32)))
    )
    thread.start()
    thread.join()
    known, tensor = others[0]
    assert known == 0 and address(tensor) != where and len(pool) == 1


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


@pytest.mark.parametrize('dtype', [torch.uint8, torch.bfloat16, torch.float64])
def test_tensors_are_like_those_of_torch(pool, dtype):
    pool.empty((4, 3, 64, 64), dtype)
    tensor = pool.empty((4, 3, 64, 60), dtype)
    assert len(pool) == 1
    assert tensor.shape == (4, 3, 64, 60) and tensor.is_contiguous() and tensor.dtype is dtype
    assert tensor.data_ptr() % 64 == 0 and tensor.storage_offset() == 0
    assert tensor.untyped_storage().nbytes() == tensor.nbytes
    assert not tensor._is_view() and tensor._base is None and tensor.is_leaf
    file = io.BytesIO()
    torch.save(tensor, file)
    assert file.tell() < tensor.nbytes + 4096
    assert torch.equal(copy.deepcopy(tensor.fill_(3)), tensor)


@pytest.mark.parametrize('size', [1, 64, 65, 1000, 4097, 38535168])
def test_size_class_is_tight_and_stable(size):
    capacity = memory._size_class(size)
    assert size <= capacity <= max(size * 1.125, size + 64)
    assert memory._size_class(capacity) == capacity


def test_bounds():
    pool = HostMemory(max_bytes=10_000, max_blocks=3, min_bytes=100)
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
    pool = HostMemory(max_age=4, min_bytes=1)
    pool.empty((100_000,), torch.uint8)
    for _ in range(4):
        pool.empty((1024,), torch.uint8)
    assert pool.nbytes == 1024


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
def test_forked_child_leaves_held_memory_alone(pool):
    held, dropped = pool.empty(SHAPE, torch.float32).fill_(7), pool.empty(SHAPE, torch.float32)
    idle = address(dropped)
    del dropped
    child = os.fork()
    if child == 0:
        given = [pool.empty(SHAPE, torch.float32).fill_(1) for _ in range(3)]
        places = set(map(address, given))
        fine = idle in places and address(held) not in places and bool((held == 7).all())
        os._exit(0 if fine else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert bool((held == 7).all()) and len(pool) == 2


def test_outputs_and_scratch_come_from_one_pool():
    images = torch.zeros(2, 3, 128, 128, dtype=torch.uint8)
    mean, std = torch.zeros(3), torch.ones(3)
    places = set()
    for _ in range(5):
        places.add(address(normalize_batch(images, mean, std)))
    assert len(places) == 1
    assert len(cpu._memory) > 0
