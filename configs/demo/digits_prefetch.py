# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
_base_ = [
    '../_base_/datasets/digits.py',
    '../_base_/models/digits_classifier.py',
    '../_base_/schedules/digits.py',
    '../_base_/default_runtime.py',
]

# mean, std and bgr_to_rgb come from the dataset.
model = dict(data_preprocessor=dict(type='PrefetchDataPreprocessor'))

train_cfg = dict(type='PrefetchLoop')
val_cfg = dict(type='PrefetchValLoop')
test_cfg = dict(type='PrefetchTestLoop')
