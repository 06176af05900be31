# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# What the examples share: the digits, and a model that brings the values of its pretrained weights.
_base_ = [
    '../_base_/datasets/digits.py',
    '../_base_/models/digits_classifier.py',
    '../_base_/schedules/digits.py',
    '../_base_/default_runtime.py',
]

model = dict(
    data_preprocessor=dict(
        type='ImgDataPreprocessor',
        mean=[123.675, 116.28, 103.53],
        std=[58.395, 57.12, 57.375],
        bgr_to_rgb=True,
        pad_size_divisor=16,
    )
)

train_cfg = dict(type='PrefetchLoop')
val_cfg = dict(type='PrefetchValLoop')
test_cfg = dict(type='PrefetchTestLoop')
