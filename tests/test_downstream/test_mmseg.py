# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""mmsegmentation's preprocessor under the wrapper."""

import torch
from equality import MEAN, STD, assert_equal, constants, dtypes, few, pixels, sizes
from hypothesis import given
from hypothesis import strategies as st
from mmengine.structures import PixelData
from packages import load

module = load('mmseg.models.data_preprocessor')
structures = load('mmseg.structures')


def samples(shapes, fields):
    made = []
    for index, shape in enumerate(shapes):
        sample = structures.SegDataSample(metainfo=dict(img_path=f'{index}.png', img_shape=shape))
        for field in fields:
            data = torch.arange(shape[0] * shape[1]).view(1, *shape) % 19 + index
            sample.set_data({field: PixelData(data=data)})
        made.append(sample)
    return made


maps = st.lists(
    st.sampled_from(('gt_sem_seg', 'gt_edge_map', 'gt_depth_map')), unique=True, max_size=3
)


@few
@given(
    shapes=sizes,
    dtype=dtypes,
    channels=st.sampled_from((1, 3, 4)),
    values=constants,
    reverse=st.booleans(),
    size=st.sampled_from((None, (13, 13), (20, 13))),
    divisor=st.sampled_from((1, 4, 7)),
    fields=maps,
)
def test_training(shapes, dtype, channels, values, reverse, size, divisor, fields):
    if len(values.get('mean', [0])) == 3 and channels != 3:
        values = dict(mean=[5.0] * channels, std=[2.0] * channels)
    batch = dict(
        inputs=[pixels((channels, *shape), dtype, i) for i, shape in enumerate(shapes)],
        data_samples=samples(shapes, fields),
    )
    assert_equal(module.SegDataPreProcessor, batch, True, **values, bgr_to_rgb=reverse, size=size,
                 size_divisor=None if size else divisor, pad_val=-1.5, seg_pad_val=7)  # fmt: skip


@few
@given(
    count=st.integers(1, 3),
    dtype=dtypes,
    values=constants,
    test=st.sampled_from((None, dict(size=(8, 9)), dict(size_divisor=4), dict(size=(3, 9)))),
    stacked=st.booleans(),
)
def test_testing(count, dtype, values, test, stacked):
    images = [pixels((3, 5, 6), dtype, i) for i in range(count)]
    batch = dict(inputs=torch.stack(images) if stacked else images,
                 data_samples=samples([(5, 6)] * count, ['gt_sem_seg']))  # fmt: skip
    assert_equal(module.SegDataPreProcessor, batch, False, **values, rgb_to_bgr=True,
                 size=(40, 40), test_cfg=test)  # fmt: skip


def test_augments_run_when_due():
    def prepare(made):
        made.batch_augments = lambda images, samples: (
            images * torch.rand(len(images), 1, 1, 1), samples[::-1]
        )  # fmt: skip

    batch = dict(inputs=[pixels((3, 5, 6), seed=i) for i in range(3)],
                 data_samples=samples([(5, 6)] * 3, ['gt_sem_seg']))  # fmt: skip
    assert_equal(module.SegDataPreProcessor, batch, True, calls=3, prepare=prepare, mean=MEAN,
                 std=STD, size=(8, 8))  # fmt: skip
