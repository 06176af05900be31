# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Data elements are copied as mmengine copies them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.model import BaseDataPreprocessor
from mmengine.structures import BaseDataElement, PixelData
from test_staging import Boxes, Renamed, WithProperty, batches, element, equal, instances

from mmprefetch.elements import is_ordinary, moved
from mmprefetch.families.family import cast

CPU = torch.device('cpu')


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


@pytest.mark.parametrize(('kind', 'ordinary'), [(WithProperty, True), (Renamed, False)])
def test_a_class_that_copies_itself_in_its_own_way_is_not_ordinary(kind, ordinary):
    assert is_ordinary(kind) == ordinary


@settings(deadline=None, max_examples=200)
@given(st.dictionaries(st.sampled_from(['inputs', 'data_samples', 'other']), batches))
def test_cast_is_what_cast_data_makes(batch):
    preprocessor = BaseDataPreprocessor()
    assert equal(preprocessor.cast_data(batch), cast(preprocessor, batch))
