# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Preprocessors of packages of which only these files are used."""

import pytest
import torch
from equality import MEAN, STD, assert_equal, constants, dtypes, few, pixels, sizes
from hypothesis import given
from hypothesis import strategies as st
from mmengine.structures import BaseDataElement
from packages import load, load_alone
from torch import nn


def samples(count):
    made = []
    for index in range(count):
        sample = BaseDataElement(metainfo=dict(index=index, img_shape=(4, index)))
        sample.label = torch.tensor([index])
        made.append(sample)
    return made


class Noise(nn.Module):
    def forward(self, images, data_samples):
        return images + torch.rand(len(images), *[1] * (images.dim() - 1)), data_samples


@pytest.fixture(scope='module')
def pose():
    return load_alone('mmpose.models.data_preprocessors.data_preprocessor').PoseDataPreprocessor


@few
@given(shapes=sizes, dtype=dtypes, values=constants, reverse=st.booleans(),
       divisor=st.integers(1, 8), training=st.booleans(), stacked=st.booleans())  # fmt: skip
def test_pose(pose, shapes, dtype, values, reverse, divisor, training, stacked):
    images = [pixels((3, *shape), dtype, i) for i, shape in enumerate(shapes)]
    if stacked:
        images = torch.stack([images[0]] * len(images))
    batch = dict(inputs=images, data_samples=samples(len(images)))
    assert_equal(pose, batch, training, **values, bgr_to_rgb=reverse, pad_size_divisor=divisor)


def test_pose_augments(pose):
    batch = dict(inputs=[pixels((3, 4, 5), seed=i) for i in range(2)], data_samples=samples(2))

    def prepare(made):
        made.batch_augments = nn.ModuleList([Noise()])

    assert_equal(pose, batch, True, prepare=prepare, calls=2, mean=MEAN, std=STD)


@pytest.fixture(scope='module')
def action():
    name = 'mmaction.models.data_preprocessors.data_preprocessor'
    return load_alone(name).ActionDataPreprocessor


@few
@given(
    dtype=dtypes,
    values=constants,
    to_rgb=st.booleans(),
    form=st.sampled_from(('NCHW', 'NCTHW')),
    shapes=sizes,
    training=st.booleans(),
)
def test_action(action, dtype, values, to_rgb, form, shapes, training):
    lead = (2, 3) if form == 'NCHW' else (2, 3, 2)
    batch = dict(inputs=[pixels((*lead, *shape), dtype, i) for i, shape in enumerate(shapes)],
                 data_samples=samples(len(shapes)))  # fmt: skip
    assert_equal(action, batch, training, **values, to_rgb=to_rgb, format_shape=form)


def test_action_blending(action):
    def prepare(made):
        made.blending = Noise()

    batch = dict(inputs=[pixels((2, 3, 4, 5), seed=i) for i in range(2)], data_samples=samples(2))
    assert_equal(action, batch, True, prepare=prepare, calls=2, mean=MEAN, std=STD)


def test_action_several_data_sets_at_once(action):
    batch = dict(inputs=[pixels((2, 3, 2, 4, 5))], data_samples=samples(1))
    assert_equal(action, batch, True, fused=False, format_shape='MIX2d3d', mean=MEAN, std=STD)


@pytest.fixture(scope='module')
def yolo():
    load('mmdet.models')
    name = 'mmyolo.models.data_preprocessors.data_preprocessor'
    return load_alone(name).YOLOv5DetDataPreprocessor


@few
@given(count=st.integers(1, 3), dtype=dtypes, values=constants, reverse=st.booleans())
def test_yolo_packed(yolo, count, dtype, values, reverse):
    images = pixels((count, 3, 8, 6), dtype)
    boxes = dict(bboxes_labels=torch.rand(5, 6), masks=torch.ones(1, 8, 6))
    # With whole numbers as mean, float16 and bfloat16 images stay what they are.
    whole = values.get('mean') == [127] and dtype in (torch.float16, torch.bfloat16)
    batch = dict(inputs=images, data_samples=boxes)
    assert_equal(yolo, batch, True, fused=bool(values) and not whole, **values, bgr_to_rgb=reverse)


def test_yolo_augments(yolo):
    def prepare(made):
        made.batch_augments = nn.ModuleList([Noise()])

    batch = dict(inputs=pixels((2, 3, 8, 6)), data_samples=dict(bboxes_labels=torch.rand(5, 6)))
    assert_equal(yolo, batch, True, prepare=prepare, calls=2, mean=MEAN, std=STD)


@few
@given(shapes=sizes, dtype=dtypes, values=constants, divisor=st.integers(1, 8))
def test_yolo_testing(yolo, shapes, dtype, values, divisor):
    batch = dict(inputs=[pixels((3, *shape), dtype, i) for i, shape in enumerate(shapes)],
                 data_samples=samples(len(shapes)))  # fmt: skip
    assert_equal(yolo, batch, False, **values, bgr_to_rgb=True, pad_size_divisor=divisor)
