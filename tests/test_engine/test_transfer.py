# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What a transfer makes of a batch is what ``cast_data`` returns, from one buffer, by one copy."""

import copy
import warnings

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement
from nested import CPU, Boxes, batches, element, equal, instances, tensors
from torch.utils._python_dispatch import TorchDispatchMode

from mmprefetch.engine import transfer
from mmprefetch.engine.transfer import ALIGNMENT, Transfer, memory_of

META = torch.device('meta')


@pytest.fixture
def pageable(monkeypatch):
    """Staging buffers are pageable, whatever the machine has."""
    original = transfer._staging_buffer
    monkeypatch.setattr(transfer, '_staging_buffer', lambda nbytes, pinned: original(nbytes, False))


@settings(deadline=None, max_examples=300)
@given(batches)
def test_delivers_what_cast_data_returns(batch):
    before = copy.deepcopy(batch)
    expected = BaseDataPreprocessor().cast_data(batch)
    delivered = Transfer(batch, CPU).issue()
    assert equal(expected, delivered)
    assert toys.same(before, batch)


@settings(deadline=None, max_examples=100)
@given(st.lists(tensors, max_size=8))
def test_packed_tensors_are_aligned_and_share_nothing_with_the_batch(batch):
    delivered = Transfer(batch, CPU).issue()
    for tensor, copied in zip(batch, delivered, strict=True):
        if tensor.numel():
            assert copied.data_ptr() % ALIGNMENT == 0
            assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_a_tensor_that_occurs_twice_arrives_twice():
    tensor = torch.arange(3)
    first, second = Transfer([tensor, tensor], CPU).issue()
    first.zero_()
    assert second.tolist() == [0, 1, 2]


@pytest.mark.parametrize('count', [2, 6])
def test_autograd_sees_separate_tensors(count):
    first, second, *_ = Transfer([torch.ones(3) for _ in range(count)], CPU).issue()
    weight = torch.ones(3, requires_grad=True)
    loss = (weight * first).sum()
    second.add_(1)
    loss.backward()
    assert first._version == 0 and second._version == 1
    second.mul_(weight)
    assert second.requires_grad and not first.requires_grad


class CopiesToDevice(TorchDispatchMode):
    """Counts copies from host memory to another device."""

    def __init__(self):
        super().__init__()
        self.copies = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func is torch.ops.aten._to_copy.default:
            self.copies += args[0].device.type == 'cpu' and result.device.type != 'cpu'
        elif func is torch.ops.aten.copy_.default:
            self.copies += args[1].device.type == 'cpu' and result.device.type != 'cpu'
        return result


def detection_batch(count=4):
    samples = [
        element(BaseDataElement, dict(path=str(index)), dict(
            gt=instances(index, torch.float32), boxes=Boxes(torch.rand(index, 4)),
            mask=torch.zeros(1, 5, 5, dtype=torch.uint8)))
        for index in range(1, count + 1)
    ]  # fmt: skip
    return dict(inputs=[torch.zeros(3, 4 + i, 5, dtype=torch.uint8) for i in range(count)],
                data_samples=samples)  # fmt: skip


def test_one_copy_for_a_batch_whatever_it_holds(pageable):
    batch = detection_batch()
    with CopiesToDevice() as stock:
        BaseDataPreprocessor.cast_data(moving_to(META), batch)
    with CopiesToDevice() as ours:
        moved = Transfer(batch, META).issue()
    assert stock.copies == 4 + 4 * 4
    assert ours.copies == 1
    assert moved['data_samples'][1].gt.boxes.device == META
    assert moved['data_samples'][1].boxes.tensor.device == META


@pytest.mark.filterwarnings('ignore:No pinned memory')
@settings(deadline=None, max_examples=100)
@given(batches)
def test_a_copy_leaves_the_staging_buffer_free(batch):
    moving = Transfer(batch, CPU, copies=True)
    delivered = moving.issue()
    moving.buffer.fill_(77)
    assert equal(BaseDataPreprocessor().cast_data(batch), delivered)


def moving_to(device):
    preprocessor = BaseDataPreprocessor()
    preprocessor._device = device
    return preprocessor


def test_large_pinned_tensors_go_from_where_they_lie(monkeypatch, pageable):
    large, small = torch.zeros(1 << 20, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, 'is_pinned', lambda tensor: tensor is large)
    moving = Transfer([large, small], META)
    assert moving.buffer.numel() == ALIGNMENT
    with CopiesToDevice() as count:
        moving.issue()
    assert count.copies == 2


@pytest.mark.parametrize('shape', [(2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 1, 4)])
@pytest.mark.parametrize('count', [1, 8])
def test_strides_of_single_elements_are_kept(shape, count):
    plain = [torch.rand(shape) for _ in range(count)]
    last = [each.contiguous(memory_format=torch.channels_last).clone() for each in plain]
    last = [torch.empty(shape, memory_format=torch.channels_last).copy_(each) for each in last]
    batch = [each for pair in zip(plain, last, strict=True) for each in pair]
    for tensor, moved in zip(batch, Transfer(batch, CPU).issue(), strict=True):
        assert torch.equal(moved, tensor)
        assert moved.stride() == tensor.to('meta').stride()


def test_subclasses_that_do_not_know_whether_they_are_pinned():
    class Unsure(torch.Tensor):
        def is_pinned(self, *args):
            raise TypeError('no implementation')

    tensor = torch.ones(2).as_subclass(Unsure)
    (moved,) = Transfer([tensor], CPU).issue()
    assert type(moved) is Unsure and torch.equal(moved, tensor)


def test_what_is_on_an_accelerator_already_stays_there():
    there, here = torch.zeros(2, device='meta'), torch.zeros(2)
    moving = Transfer(dict(a=there, b=[here]), CPU)
    assert moving.on_device == [there] and moving.buffer.numel() == ALIGNMENT


def test_no_pinned_memory_warns_once(monkeypatch):
    empty = torch.empty

    def refuse(*args, pin_memory=False, **kwargs):
        if pin_memory:
            raise RuntimeError('none left')
        return empty(*args, **kwargs)

    monkeypatch.setattr(torch, 'empty', refuse)
    transfer._warn_of_pageable.cache_clear()
    with pytest.warns(UserWarning, match='none left.*pageable memory.*prefetch_depth') as caught:
        for size in (1 << 10, 1 << 12):
            assert Transfer([torch.ones(size)], META).buffer.numel() == 4 * size
    transfer._warn_of_pageable.cache_clear()
    assert len(caught) == 1


def test_an_empty_batch_needs_no_buffer():
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        moved = Transfer(dict(a=[], b=None), META).issue()
    assert moved == dict(a=[], b=None)


@pytest.mark.filterwarnings('ignore:(Sparse|The PyTorch API of nested)')
def test_memory_of_finds_each_block_once(monkeypatch):
    assert memory_of([torch.zeros(2)]) == []  # the host's
    monkeypatch.setattr(transfer, 'is_on_host', lambda tensor: False)
    plain, boxed = torch.zeros(4, 2), torch.zeros(3)
    sparse = torch.eye(3).to_sparse()
    rows = torch.eye(3).to_sparse_csr()
    columns = torch.eye(3).to_sparse_csc()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    value = dict(a=[plain, plain[1:]], b=(Boxes(boxed), 'text', 3), c=[sparse, rows, columns])
    value['d'] = element(BaseDataElement, dict(m=1), dict(f=boxed.view(1, 3), g=nested))
    value['itself'] = value
    parts = [plain, boxed, sparse._indices(), sparse._values(), rows.crow_indices(),
             rows.col_indices(), rows.values(), columns.ccol_indices(), columns.row_indices(),
             columns.values(), nested.values()]  # fmt: skip
    found = [tensor.untyped_storage().data_ptr() for tensor in memory_of(value)]
    assert len(found) == len(set(found))
    assert set(found) == {part.untyped_storage().data_ptr() for part in parts}
