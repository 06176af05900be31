# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# Measured on the training images by tools/prepare_demo_data.py (data/digits/stats.json).
digits_normalization = dict(mean=[77.91] * 3, std=[95.87] * 3, bgr_to_rgb=True)

digits_pipeline = [dict(type='LoadImageFromFile'), dict(type='PackImageInputs')]

train_dataloader = dict(
    batch_size=32,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=True),
    dataset=dict(
        type='ImageFolderDataset',
        data_root='data/digits',
        split='train',
        pipeline=digits_pipeline,
        data_preprocessor=digits_normalization,
    ),
)
val_dataloader = dict(
    batch_size=128,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='ImageFolderDataset',
        data_root='data/digits',
        split='val',
        pipeline=digits_pipeline,
        data_preprocessor=digits_normalization,
    ),
)
test_dataloader = val_dataloader

val_evaluator = dict(type='TopOneAccuracy')
test_evaluator = val_evaluator
