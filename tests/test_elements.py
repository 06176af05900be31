# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Data elements are copied as mmengine copies them."""

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement, PixelData
from nested import CPU, Boxes, Renamed, WithProperty, batches, element, equal, instances

from mmprefetch.elements import is_ordinary, moved
from mmprefetch.engine.transfer import Transfer
from mmprefetch.families.family import cast


def sample():
    return element(
        BaseDataElement,
        dict(path='a', nested=dict(list=[1, 2])),
        dict(
            gt=instances(2, torch.float32),
            mask=element(PixelData, {}, dict(seg=torch.ones(1, 2, 3))),
            boxes=Boxes(torch.rand(2, 4)),
            renamed=element(Renamed, dict(a=[1]), dict(boxes=torch.ones(1))),
            score=torch.tensor(0.5),
            name='text',
        ),
    )


def test_moved_is_what_to_makes():
    data = sample()
    expected = data.to(CPU)
    made = moved(data, CPU)
    assert equal(expected, made) and made is not data and made.gt is not data.gt
    assert made.score is data.score, 'what is there already stays the same object'
    assert made.renamed.moved, "an element's own `to` is called"
    made.nested['list'].append(3)
    made.gt.labels = torch.zeros(2)
    made.extra = torch.ones(1)
    assert 'extra' not in data
    assert data.nested == dict(list=[1, 2]) and data.gt.labels.dtype == torch.int64


def test_moved_goes_to_the_device():
    made = moved(sample(), torch.device('meta'))
    for tensor in (made.gt.boxes, made.mask.seg, made.boxes.tensor, made.renamed.boxes, made.score):
        assert tensor.device.type == 'meta'


class MetaProperty(BaseDataElement):
    """mmengine's own pattern, for metainfo."""

    @property
    def img_shape(self):
        return self._img_shape

    @img_shape.setter
    def img_shape(self, value):
        self.set_field(value, '_img_shape', dtype=tuple, field_type='metainfo')


class Slotted(BaseDataElement):
    __slots__ = ('label',)


class Elsewhere(BaseDataElement):
    """Keeps a value where no list of fields names it."""

    @property
    def boxes(self):
        return self._boxes

    @boxes.setter
    def boxes(self, value):
        object.__setattr__(self, '_boxes', value)


class Getting(WithProperty):
    """Gives out something else than it holds."""

    @property
    def boxes(self):
        return self._boxes + 1

    @boxes.setter
    def boxes(self, value):
        self.set_field(value, '_boxes')


class Deriving(BaseDataElement):
    def __setattr__(self, name, value):
        super().__setattr__(name, value.double() if isinstance(value, torch.Tensor) else value)


class Hiding(BaseDataElement):
    def __new__(cls, *args, **kwargs):
        made = super().__new__(cls)
        made.__dict__['hidden'] = 1
        return made


class Served(BaseDataElement):
    def __getattr__(self, name):
        if name == 'boxes':
            return self.__dict__['store']
        raise AttributeError(name)


def flat():
    data = PixelData()
    data.set_field(torch.ones(2, 3), 'seg')
    return data


def served():
    data = element(Served, {}, dict(boxes=torch.ones(2)))
    data.__dict__['store'] = data.__dict__.pop('boxes')
    return data


def boxed(kind):
    return element(kind, dict(path='a'), dict(boxes=torch.ones(2, 4)))


@pytest.mark.parametrize(
    ('data', 'ordinary'),
    [
        (boxed(BaseDataElement), True),
        (boxed(WithProperty), True),
        (element(MetaProperty, dict(img_shape=(6, 7)), dict(boxes=torch.ones(2))), True),
        (boxed(Renamed), False),
        (element(Slotted, {}, dict(label=torch.ones(1))), False),
        (boxed(Elsewhere), False),
        (boxed(Getting), False),
        (boxed(Deriving), False),
        (boxed(Hiding), False),
        (served(), False),
        (flat(), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_classes_that_copy_themselves_in_their_own_way(data, ordinary):
    assert is_ordinary(data) == ordinary
    expected = data.to(CPU)
    names = [name for name in ('boxes', 'label', 'img_shape', 'seg', 'path') if name in data]
    assert names
    ways = dict(
        moved=moved(data, CPU),
        cast=cast(BaseDataPreprocessor(), dict(data_samples=[data]))['data_samples'][0],
        transferred=Transfer([data], CPU).issue()[0],
    )
    for way, made in ways.items():
        assert type(made) is type(expected), way
        for name in names:
            assert toys.same(getattr(made, name), getattr(expected, name)), (way, name)
        assert vars(made).keys() == vars(expected).keys(), way


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(['inputs', 'data_samples', 'other']), batches))
def test_cast_is_what_cast_data_makes(batch):
    preprocessor = BaseDataPreprocessor()
    assert equal(preprocessor.cast_data(batch), cast(preprocessor, batch))
