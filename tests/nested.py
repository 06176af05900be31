# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Nested batches of every kind that ``cast_data`` knows, and whether two are equal."""

from collections import OrderedDict, namedtuple

import numpy as np
import torch
import toys
from hypothesis import strategies as st
from mmengine.structures import BaseDataElement, InstanceData, PixelData

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
