# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""mmpretrain's preprocessors under the wrapper."""

import pytest
import torch
from equality import DTYPES, MEAN, STD, assert_equal, constants, dtypes, few, pixels, sizes
from hypothesis import given
from hypothesis import strategies as st
from packages import load

from mmprefetch import PrefetchDataPreprocessor

module = load('mmpretrain.models.utils.data_preprocessor')
structures = load('mmpretrain.structures')

MIXUP, CUTMIX = dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)
MIXES = (
    dict(augments=[MIXUP, CUTMIX], probs=[0.6, 0.3]),
    dict(augments=dict(type='Mixup', alpha=0.2)),
    dict(augments=[dict(type='ResizeMix', alpha=1.0)]),
)


def samples(count, labels, score=False):
    made = []
    for index in range(count):
        sample = structures.DataSample(metainfo=dict(img_path=f'{index}.png', ori_shape=(5, index)))
        if labels:
            label = [index % 4] if labels == 1 else [index % 4, (index + 1) % 4]
            sample.set_gt_label(label)
        if score:
            sample.set_gt_score(torch.arange(4) * 0.1 + index)
        made.append(sample)
    return made


@few
@given(
    shapes=sizes,
    dtype=dtypes,
    channels=st.sampled_from((1, 3)),
    values=constants,
    to_rgb=st.booleans(),
    divisor=st.integers(1, 8),
    labels=st.integers(0, 2),
    score=st.booleans(),
    onehot=st.booleans(),
    training=st.booleans(),
    stacked=st.booleans(),
)
def test_cls(
    shapes, dtype, channels, values, to_rgb, divisor, labels, score, onehot, training, stacked
):
    images = [pixels((channels, *shape), dtype, i) for i, shape in enumerate(shapes)]
    if stacked:
        images = torch.stack([images[0]] * len(images))
    batch = dict(inputs=images, data_samples=samples(len(images), labels, score))
    assert_equal(
        module.ClsDataPreprocessor,
        batch,
        training,
        fused=not values or channels == 3 or len(values['mean']) == 1,
        **values,
        to_rgb=to_rgb,
        pad_size_divisor=divisor,
        pad_value=3,
        to_onehot=onehot and labels > 0,
        num_classes=4,
    )


@pytest.mark.parametrize('mix', MIXES)
@pytest.mark.parametrize('training', [True, False])
@pytest.mark.parametrize('score', [True, False])
def test_cls_random_augmentation(mix, training, score):
    batch = dict(inputs=[pixels((3, 9, 8), seed=i) for i in range(4)],
                 data_samples=samples(4, 1, score))  # fmt: skip
    assert_equal(module.ClsDataPreprocessor, batch, training, calls=4, mean=MEAN, std=STD,
                 to_rgb=True, num_classes=4, batch_augments=mix)  # fmt: skip


def test_cls_without_samples():
    assert_equal(module.ClsDataPreprocessor, dict(inputs=pixels((2, 3, 4, 5))), True, to_rgb=True)


def test_cls_multi_task_samples_are_cast():
    made = []
    for _ in range(2):
        sample = structures.MultiTaskDataSample()
        sample.set_field(samples(1, 1)[0], 'task')
        made.append(sample)
    batch = dict(inputs=[pixels((3, 4, 5), seed=i) for i in range(2)], data_samples=made)
    assert_equal(module.ClsDataPreprocessor, batch, True, mean=MEAN, std=STD)


def test_cls_unusual_images_are_for_the_class_itself():
    batch = dict(inputs=[pixels((3, 4, 5)), pixels((3, 4, 5), torch.float32)],
                 data_samples=samples(2, 1))  # fmt: skip
    assert_equal(module.ClsDataPreprocessor, batch, True, fused=False, to_onehot=True,
                 num_classes=4)  # fmt: skip
    batch['inputs'] = pixels((2, 3, 2, 4, 5))
    assert_equal(module.ClsDataPreprocessor, batch, True, fused=False)


views = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=3)


@few
@given(shapes=views, dtype=dtypes, values=constants, to_rgb=st.booleans(), single=st.booleans(),
       training=st.booleans())  # fmt: skip
def test_self_sup(shapes, dtype, values, to_rgb, single, training):
    images = [pixels((2, 3, *shape), dtype, i) for i, shape in enumerate(shapes)]
    batch = dict(inputs=images[0] if single else images, data_samples=samples(2, 1))
    assert_equal(module.SelfSupDataPreprocessor, batch, training, **values, to_rgb=to_rgb)


def test_self_sup_of_four_channels():
    image = pixels((2, 4, 5, 6))
    wrapper = PrefetchDataPreprocessor(
        wraps='mmpretrain.SelfSupDataPreprocessor', mean=[1.0, 2, 3, 4], std=[2.0] * 4, to_rgb=True
    )
    out = wrapper(dict(inputs=[image], data_samples=samples(2, 1)))['inputs'][0]
    expected = (image[:, [2, 1, 0, 3]].float() - torch.tensor([1.0, 2, 3, 4]).view(4, 1, 1)) / 2
    assert torch.equal(out, expected)


@few
@given(shapes=st.tuples(*[st.tuples(st.integers(1, 9), st.integers(1, 9))] * 2), dtype=dtypes,
       values=constants, to_rgb=st.booleans())  # fmt: skip
def test_two_norm(shapes, dtype, values, to_rgb):
    images = [pixels((2, 3, *shape), dtype, i) for i, shape in enumerate(shapes)]
    batch = dict(inputs=images, data_samples=samples(2, 1))
    assert_equal(module.TwoNormDataPreprocessor, batch, True, **values, to_rgb=to_rgb,
                 second_mean=[1.0, 2.0, 3.0], second_std=[255.0] * 3)  # fmt: skip


@few
@given(
    dtype=dtypes,
    values=constants,
    to_rgb=st.booleans(),
    form=st.sampled_from(('NCHW', 'NCTHW')),
    lead=st.lists(st.integers(1, 3), max_size=2),
    count=st.integers(0, 2),
)
def test_video(dtype, values, to_rgb, form, lead, count):
    shape = (*lead, 3, 4, 5) if form == 'NCHW' else (*lead, 3, 2, 4, 5)
    clips = [pixels(shape, dtype, i) for i in range(count)] if count else pixels(shape, dtype)
    batch = dict(inputs=clips, data_samples=samples(2, 1))
    assert_equal(module.VideoDataPreprocessor, batch, False, **values, to_rgb=to_rgb,
                 format_shape=form)  # fmt: skip


@few
@given(
    dtype=st.sampled_from(DTYPES),
    values=constants,
    to_rgb=st.booleans(),
    divisor=st.integers(1, 5),
    channels=st.sampled_from((3, 4)),
    frames=st.integers(0, 3),
)
def test_multi_modal(dtype, values, to_rgb, divisor, channels, frames):
    if channels == 4 and len(values.get('mean', [0])) == 3:
        values = dict(mean=[*MEAN, 5.0], std=[*STD, 2.0])
    images = [pixels((2, channels, 5, 6), dtype, i) for i in range(frames)]
    batch = dict(inputs=images if frames else pixels((2, channels, 5, 6), dtype),
                 data_samples=samples(2, 0))  # fmt: skip
    assert_equal(module.MultiModalDataPreprocessor, batch, True, **values, to_rgb=to_rgb,
                 pad_size_divisor=divisor, pad_value=1)  # fmt: skip


def test_multi_modal_without_images():
    batch = dict(data_samples=samples(2, 0))
    assert_equal(module.MultiModalDataPreprocessor, batch, True, fused=False)


@pytest.mark.parametrize('swap', [None, MIXES[1]])
def test_augments_that_a_hook_swaps_between_batches(swap):
    def prepare(made):
        made.batch_augments = None
        if swap is not None:
            made.batch_augments = module.RandomBatchAugment(**swap)

    batch = dict(inputs=[pixels((3, 6, 6), seed=i) for i in range(4)], data_samples=samples(4, 1))
    assert_equal(module.ClsDataPreprocessor, batch, True, calls=2, prepare=prepare, mean=MEAN,
                 std=STD, num_classes=4, batch_augments=MIXES[0])  # fmt: skip


@pytest.mark.parametrize('to_rgb', [True, False])
@pytest.mark.parametrize('layout', [torch.channels_last, torch.contiguous_format])
def test_results_have_the_strides_of_the_class(layout, to_rgb):
    images = pixels((4, 3, 8, 9)).contiguous(memory_format=layout)
    plain = layout is torch.contiguous_format
    fields = dict(mean=MEAN, std=STD, to_rgb=to_rgb, fused=plain)
    batch = dict(inputs=images, data_samples=None)
    views = dict(inputs=[images, images], data_samples=None)
    assert_equal(module.ClsDataPreprocessor, batch, True, **fields)
    assert_equal(module.VideoDataPreprocessor, batch, True, format_shape='NCHW', **fields)
    assert_equal(module.MultiModalDataPreprocessor, batch, True, **fields)
    assert_equal(module.SelfSupDataPreprocessor, views, True, **fields)


def test_a_mean_in_0_to_1_is_warned_of_in_either_place():
    fields = dict(mean=MEAN, std=STD, second_mean=[0.4] * 3, second_std=[0.2] * 3)
    wrapper = PrefetchDataPreprocessor(wraps='mmpretrain.TwoNormDataPreprocessor', **fields)
    with pytest.warns(UserWarning, match='mean .0.4, 0.4, 0.4. lies in 0..1'):
        wrapper(dict(inputs=[pixels((2, 3, 4, 4))] * 2, data_samples=None), True)


def test_an_error_over_views_is_not_explained_as_one_over_images():
    wrapper = PrefetchDataPreprocessor(
        wraps='mmpretrain.SelfSupDataPreprocessor', mean=MEAN, std=STD
    )
    with pytest.raises(ValueError, match='not enough values to unpack') as caught:
        wrapper(dict(inputs=[pixels((2, 3, 4, 4))] * 2), True)
    assert not hasattr(caught.value, '__notes__')
