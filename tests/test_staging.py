# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What staging delivers is what ``cast_data`` returns, from one buffer, by one copy."""

import copy
from collections import OrderedDict, namedtuple

import numpy as np
import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement, InstanceData, PixelData
from torch.utils._python_dispatch import TorchDispatchMode

from mmprefetch import staging
from mmprefetch.sections import ALIGNMENT
from mmprefetch.staging import stage

CPU = torch.device('cpu')
DTYPES = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16,
          torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool,
          torch.complex64]  # fmt: skip
Pair = namedtuple('Pair', 'first second')


class Boxes:
    """An object with a ``to`` of its own, as box types have."""

    def __init__(self, tensor, label='box'):
        self.tensor, self.label = tensor, label

    def to(self, *args, **kwargs):
        return Boxes(self.tensor.to(*args, **kwargs), self.label)


class Renamed(BaseDataElement):
    """Overrides ``to``; keeps a value behind a property."""

    @property
    def boxes(self):
        return self._boxes

    @boxes.setter
    def boxes(self, value):
        self.set_field(value, '_boxes', dtype=torch.Tensor)

    def to(self, *args, **kwargs):
        moved = super().to(*args, **kwargs)
        moved.set_metainfo(dict(moved=True))
        return moved


class WithProperty(BaseDataElement):
    @property
    def boxes(self):
        return self._boxes

    @boxes.setter
    def boxes(self, value):
        self.set_field(value, '_boxes', dtype=torch.Tensor)


def numbers(shape, dtype, layout, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = torch.randint(0, 2 if dtype is torch.bool else 100, shape, generator=generator)
    tensor = tensor.to(dtype)
    if layout == 'transposed' and tensor.dim() > 1:
        return tensor.transpose(0, -1)
    if layout == 'strided' and tensor.dim() and tensor.shape[0] > 1:
        return tensor[::2]
    if layout == 'expanded':
        return tensor.unsqueeze(0).expand(3, *tensor.shape)
    return tensor


tensors = st.builds(
    numbers,
    st.lists(st.integers(0, 4), max_size=4).map(tuple),
    st.sampled_from(DTYPES),
    st.sampled_from(['contiguous', 'transposed', 'strided', 'expanded']),
    st.integers(0, 99),
)


def element(kind, meta, fields):
    made = kind(metainfo=meta)
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def instances(count, dtype):
    made = InstanceData()
    made.boxes = torch.arange(count * 4, dtype=dtype).view(count, 4)
    made.labels = torch.arange(count)
    made.names = [str(index) for index in range(count)]
    return made


leaves = st.one_of(
    tensors,
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=3),
    st.binary(max_size=3),
    st.builds(lambda n: np.arange(n), st.integers(0, 3)),
    st.builds(Boxes, tensors),
    st.builds(instances, st.integers(0, 3), st.sampled_from([torch.float32, torch.int64])),
    st.builds(lambda t: element(PixelData, {}, dict(seg=t)),
              st.just(torch.ones(1, 2, 3, dtype=torch.uint8))),
    st.builds(lambda t: element(WithProperty, dict(a=[1]), dict(boxes=t)), tensors),
    st.builds(lambda t: element(Renamed, dict(a=[1]), dict(boxes=t)), tensors),
    st.just(torch.eye(3).to_sparse()),
)  # fmt: skip
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(Pair, inner, inner),
        st.dictionaries(st.text('abc', min_size=1, max_size=2), inner, max_size=3),
        st.dictionaries(st.text('abc', min_size=1, max_size=2), inner, max_size=3).map(OrderedDict),
        st.builds(
            lambda meta, a, b: element(BaseDataElement, dict(meta=meta), dict(a=a, b=b)),
            st.lists(st.integers(), max_size=2),
            inner,
            inner,
        ),
    ),
    max_leaves=12,
)


def steps(tensor):
    """The strides that matter: a dimension of one element is never stepped along."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [stride for size, stride in pairs if size > 1 and tensor.numel()]


def equal(one, other):
    if one is other:  # what is not moved stays the same object
        return True
    if isinstance(one, torch.Tensor) and one.layout == torch.sparse_coo:
        return other.layout == one.layout and torch.equal(one.to_dense(), other.to_dense())
    if isinstance(one, torch.Tensor):
        return toys.same(one, other) and steps(one.to(copy=True, device=CPU)) == steps(other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, Boxes):
        return equal(vars(one), vars(other))
    if isinstance(one, BaseDataElement):
        return (
            set(one.all_keys()) == set(other.all_keys())
            and toys.same(one.metainfo, other.metainfo)
            and all(equal(value, other.get(name)) for name, value in one.items())
            and set(vars(one)) == set(vars(other))
        )
    return toys.same(one, other)


@settings(deadline=None, max_examples=300)
@given(batches)
def test_delivers_what_cast_data_returns(batch):
    before = copy.deepcopy(batch)
    expected = BaseDataPreprocessor().cast_data(batch)
    delivered, _ = stage(batch, CPU).deliver()
    assert equal(expected, delivered)
    assert toys.same(before, batch)


@settings(deadline=None, max_examples=100)
@given(st.lists(tensors, max_size=8))
def test_packed_tensors_are_aligned_and_share_nothing_with_the_batch(batch):
    delivered, _ = stage(batch, CPU).deliver()
    for tensor, copied in zip(batch, delivered, strict=True):
        if tensor.numel():
            assert copied.data_ptr() % ALIGNMENT == 0
            assert copied.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr()


def test_a_tensor_that_occurs_twice_arrives_twice():
    tensor = torch.arange(3)
    (first, second), _ = stage([tensor, tensor], CPU).deliver()
    first.zero_()
    assert second.tolist() == [0, 1, 2]


@pytest.mark.parametrize('count', [2, 6])
def test_autograd_sees_separate_tensors(count):
    first, second, *_ = stage([torch.ones(3) for _ in range(count)], CPU).deliver()[0]
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


def test_one_copy_for_a_batch_whatever_it_holds():
    batch = detection_batch()
    meta = torch.device('meta')
    with CopiesToDevice() as stock:
        BaseDataPreprocessor.cast_data(moving_to(meta), batch)
    with CopiesToDevice() as ours:
        moved, blocks = stage(batch, meta).deliver()
    assert stock.copies == 4 + 4 * 4
    assert ours.copies == 1
    assert len(blocks) == 1
    assert moved['data_samples'][1].gt.boxes.device == meta
    assert moved['data_samples'][1].boxes.tensor.device == meta


def test_no_memory_of_the_device_is_held_before_the_transfer():
    staged = stage(detection_batch(), CPU)
    storage = staged._flat.untyped_storage()
    assert storage.nbytes() == 0
    moved, (block,) = staged.deliver()
    assert block.untyped_storage()._cdata == storage._cdata
    assert storage.nbytes() == staged.buffer.numel()
    assert moved['inputs'][0].untyped_storage()._cdata == storage._cdata


def test_where_memory_cannot_follow_views_are_made_at_the_transfer(monkeypatch):
    batch = detection_batch()
    expected = BaseDataPreprocessor().cast_data(batch)
    monkeypatch.setattr(staging, '_memory_may_follow', lambda device: False)
    staged = stage(batch, CPU)
    assert staged._flat is None
    delivered, blocks = staged.deliver()
    assert equal(expected, delivered)
    assert len(blocks) == 1


@pytest.mark.parametrize('raised', [RuntimeError, NotImplementedError, None])
def test_a_device_is_asked_whether_its_memory_may_follow(monkeypatch, raised):
    def resize(storage, size):
        if raised is not None:
            raise raised('not on this device')

    monkeypatch.setattr(torch.UntypedStorage, 'resize_', resize)
    assert staging._memory_may_follow.__wrapped__(CPU) == (raised is None)


def moving_to(device):
    preprocessor = BaseDataPreprocessor()
    preprocessor._device = device
    return preprocessor


def test_large_pinned_tensors_go_from_where_they_lie(monkeypatch):
    large, small = torch.zeros(1 << 20, dtype=torch.uint8), torch.zeros(9, dtype=torch.uint8)
    monkeypatch.setattr(torch.Tensor, 'is_pinned', lambda tensor: tensor is large)
    meta = torch.device('meta')
    staged = stage([large, small], meta)
    assert staged.buffer.numel() == ALIGNMENT
    with CopiesToDevice() as count:
        staged.deliver()
    assert count.copies == 2


@pytest.mark.parametrize('shape', [(2, 1, 4, 5), (2, 3, 1, 1), (1, 3, 1, 4)])
@pytest.mark.parametrize('count', [1, 8])
def test_strides_of_single_elements_are_kept(shape, count):
    plain = [torch.rand(shape) for _ in range(count)]
    last = [each.contiguous(memory_format=torch.channels_last).clone() for each in plain]
    last = [torch.empty(shape, memory_format=torch.channels_last).copy_(each) for each in last]
    batch = [each for pair in zip(plain, last, strict=True) for each in pair]
    for tensor, moved in zip(batch, stage(batch, CPU).deliver()[0], strict=True):
        assert torch.equal(moved, tensor)
        assert moved.stride() == tensor.to('meta').stride()


def test_subclasses_that_do_not_know_whether_they_are_pinned():
    class Unsure(torch.Tensor):
        def is_pinned(self, *args):
            raise TypeError('no implementation')

    tensor = torch.ones(2).as_subclass(Unsure)
    (moved,), _ = stage([tensor], CPU).deliver()
    assert type(moved) is Unsure and torch.equal(moved, tensor)
