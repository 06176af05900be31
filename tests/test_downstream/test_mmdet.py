# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""mmdet's preprocessors under the wrapper."""

import copy
import random

import numpy as np
import pytest
import torch
import toys
from equality import MEAN, STD, assert_equal, begin, constants, dtypes, few, pixels, sizes
from hypothesis import given
from hypothesis import strategies as st
from mmengine.logging import MessageHub
from mmengine.registry import DefaultScope
from mmengine.structures import InstanceData, PixelData
from packages import load

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.families import family_of
from mmprefetch.families.unfused import TRANSFER

module = load('mmdet.models.data_preprocessors.data_preprocessor')
structures = load('mmdet.structures')
boxes = load('mmdet.structures.bbox')
masks = load('mmdet.structures.mask')


def instances(shape, seed, box_type, mask=None):
    made = InstanceData()
    corners = torch.arange(8.0).view(2, 4) + seed
    made.bboxes = boxes.HorizontalBoxes(corners) if box_type else corners
    made.labels = torch.tensor([seed, 1])
    if mask == 'bitmap':
        made.masks = masks.BitmapMasks(
            np.random.default_rng(seed).integers(0, 2, (2, *shape), dtype=np.uint8), *shape
        )
    elif mask == 'polygon':
        made.masks = masks.PolygonMasks([[np.array([0.0, 0, 1, 0, 1, 1])]] * 2, *shape)
    return made


def samples(shapes, box_type=True, mask=None, seg=False):
    made = []
    for index, shape in enumerate(shapes):
        sample = structures.DetDataSample(
            metainfo=dict(img_id=index, img_shape=shape, scale_factor=(1.5, 0.5))
        )
        sample.gt_instances = instances(shape, index, box_type, mask)
        sample.ignored_instances = instances(shape, index + 1, box_type)
        if seg:
            sample.gt_sem_seg = PixelData(sem_seg=torch.full((1, *shape), index))
        made.append(sample)
    return made


@few
@given(
    shapes=sizes,
    dtype=dtypes,
    values=constants,
    reverse=st.booleans(),
    divisor=st.integers(1, 8),
    box_type=st.booleans(),
    to_tensor=st.booleans(),
    mask=st.sampled_from((None, 'bitmap', 'polygon')),
    seg=st.booleans(),
    pad=st.booleans(),
    training=st.booleans(),
    stacked=st.booleans(),
)
def test_det(
    shapes, dtype, values, reverse, divisor, box_type, to_tensor, mask, seg, pad, training, stacked
):
    if stacked:
        shapes = [shapes[0]] * len(shapes)
    images = [pixels((3, *shape), dtype, i) for i, shape in enumerate(shapes)]
    batch = dict(inputs=torch.stack(images) if stacked else images,
                 data_samples=samples(shapes, box_type, mask, seg))  # fmt: skip
    assert_equal(
        module.DetDataPreprocessor, batch, training, **values, bgr_to_rgb=reverse,
        pad_size_divisor=divisor, pad_value=2.5, boxtype2tensor=to_tensor, pad_mask=pad,
        mask_pad_value=1, pad_seg=pad, seg_pad_value=9,
    )  # fmt: skip


SHAPES = [(6, 9), (7, 5)]


def det_batch(**options):
    return dict(inputs=[pixels((3, *shape), seed=i) for i, shape in enumerate(SHAPES)],
                data_samples=samples(SHAPES, **options))  # fmt: skip


@pytest.mark.parametrize(
    'augment',
    [
        dict(type='BatchFixedSizePad', size=(16, 12), pad_mask=True, pad_seg=True),
        dict(type='BatchResize', scale=(20, 14), pad_size_divisor=4),
        dict(type='BatchSyncRandomResize', random_size_range=(8, 64), interval=1, size_divisor=4),
    ],
)
@pytest.mark.parametrize('training', [True, False])
def test_det_augments(augment, training):
    MessageHub.get_instance('toy').update_info('iter', 6)

    def prepare(made):
        if made.batch_augments is not None and augment['type'] == 'BatchSyncRandomResize':
            made.batch_augments[0].rank = 0

    assert_equal(
        module.DetDataPreprocessor, det_batch(mask='bitmap', seg=True), training, calls=3,
        prepare=prepare, mean=MEAN, std=STD, pad_size_divisor=4, batch_augments=[augment],
    )  # fmt: skip


def test_det_without_samples():
    assert_equal(module.DetDataPreprocessor, dict(inputs=det_batch()['inputs']), False)


def test_iteration_is_read_when_the_batch_is_due():
    augment = dict(type='BatchSyncRandomResize', random_size_range=(8, 64), interval=2,
                   size_divisor=4)  # fmt: skip
    hub = MessageHub.get_instance('toy')
    fields = dict(mean=MEAN, std=STD, batch_augments=[augment])
    stock = module.DetDataPreprocessor(**copy.deepcopy(fields))
    wrapper = PrefetchDataPreprocessor(wraps='mmdet.DetDataPreprocessor', **fields)
    batches = [det_batch() for _ in range(6)]
    copies = copy.deepcopy(batches)
    hub.update_info('iter', 0)
    for raw in copies:  # begun, all of them, before the first step
        begin(wrapper, raw, True)
    sizes_seen = set()
    for iteration, (raw, other) in enumerate(zip(batches, copies, strict=True)):
        hub.update_info('iter', iteration)
        states = []
        for forward, one in ((stock, raw), (wrapper, other)):
            random.seed(iteration)
            states.append(forward(one, True))
        assert toys.same(*states)
        sizes_seen.add(tuple(states[0]['inputs'].shape))
    assert len(sizes_seen) > 1  # so the size did change on the way


def branches():
    """One supervised image and two unsupervised in two views, of different sizes."""
    shapes = dict(sup=[(6, 9), None, None], unsup_teacher=[None, (7, 5), (4, 4)],
                  unsup_student=[None, (3, 8), (9, 2)])  # fmt: skip
    inputs, data_samples = {}, {}
    for branch, sizes_ in shapes.items():
        inputs[branch] = [
            None if size is None else pixels((3, *size), seed=i) for i, size in enumerate(sizes_)
        ]
        made = iter(samples([size for size in sizes_ if size is not None]))
        data_samples[branch] = [None if size is None else next(made) for size in sizes_]
    return dict(inputs=inputs, data_samples=data_samples)


INNER = dict(type='DetDataPreprocessor', mean=MEAN, std=STD, bgr_to_rgb=True, pad_size_divisor=4)


@pytest.mark.parametrize(
    'more',
    [
        dict(),
        dict(batch_augments=[dict(type='BatchSyncRandomResize', random_size_range=(8, 64),
                                  interval=1, size_divisor=4)]),
    ],
)  # fmt: skip
def test_multi_branch(more):
    MessageHub.get_instance('toy').update_info('iter', 6)
    assert_equal(module.MultiBranchDataPreprocessor, branches(), True, calls=2,
                 data_preprocessor={**INNER, **more})  # fmt: skip


def test_multi_branch_testing():
    assert_equal(module.MultiBranchDataPreprocessor, det_batch(), False, data_preprocessor=INNER)


def test_multi_branch_around_a_class_that_is_not_known():
    from mmdet.registry import MODELS

    @MODELS.register_module(force=True)
    class Noisy(module.DetDataPreprocessor):
        def forward(self, data, training=False):
            data = super().forward(data, training)
            data['inputs'] = data['inputs'] + torch.rand(1)
            return data

    assert family_of(Noisy) is TRANSFER
    assert_equal(module.MultiBranchDataPreprocessor, branches(), True, fused=False,
                 data_preprocessor={**INNER, 'type': 'Noisy'})  # fmt: skip


def test_fields_for_the_inner_preprocessor_are_checked():
    with pytest.raises(ValueError, match='std'):
        PrefetchDataPreprocessor(
            wraps='mmdet.MultiBranchDataPreprocessor',
            data_preprocessor={**INNER, 'std': [1.0, 0.0, 1.0]},
        )


@pytest.mark.parametrize('scope', [None, 'mmdet'])
def test_names(scope):
    if scope is not None:
        DefaultScope.get_instance('toy', scope_name=scope)
    name = 'mmdet.DetDataPreprocessor' if scope is None else 'DetDataPreprocessor'
    wrapper = PrefetchDataPreprocessor(wraps=name, mean=MEAN, std=STD)
    assert type(wrapper.wrapped) is module.DetDataPreprocessor
    outer = PrefetchDataPreprocessor(
        wraps='mmdet.MultiBranchDataPreprocessor', data_preprocessor=INNER
    )
    inner = family_of(type(outer.wrapped)).inner_field
    assert type(getattr(outer.wrapped, inner)) is module.DetDataPreprocessor


def test_which_augments_run_ahead():
    resize = dict(type='BatchSyncRandomResize', random_size_range=(8, 64))
    pad = dict(type='BatchFixedSizePad', size=(16, 12))
    family = family_of(module.DetDataPreprocessor)
    for augments, pure in (([], True), ([pad], True), ([resize], False), ([pad, resize], False)):
        made = module.DetDataPreprocessor(batch_augments=copy.deepcopy(augments))
        assert family.is_pure(made, True) is pure and family.is_pure(made, False) is True


def test_subclasses():
    assert family_of(module.BoxInstDataPreprocessor) is TRANSFER
    assert family_of(type('Own', (module.DetDataPreprocessor,), {})) is family_of(
        module.DetDataPreprocessor
    )
    pads_otherwise = type('Own', (module.DetDataPreprocessor,), dict(pad_gt_masks=lambda *_: None))
    assert family_of(pads_otherwise) is TRANSFER


def test_four_channels():
    image = pixels((4, 5, 6))
    wrapper = PrefetchDataPreprocessor(wraps='mmdet.DetDataPreprocessor', mean=[1.0, 2, 3, 4],
                                       std=[2.0] * 4)  # fmt: skip
    out = wrapper(dict(inputs=[image], data_samples=samples([(5, 6)])))
    expected = (image.float() - torch.tensor([1.0, 2, 3, 4]).view(4, 1, 1)) / 2
    assert torch.equal(out['inputs'][0], expected)
    assert out['data_samples'][0].batch_input_shape == (5, 6)
