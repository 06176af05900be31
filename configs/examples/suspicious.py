# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# Wrong on purpose: values of 0 to 1 for uint8 images, RGB values for channels that stay BGR, and a
# top level that has no effect beside the model's own preprocessor.
_base_ = './common.py'

data_preprocessor = dict(mean=[127.5] * 3, std=[127.5] * 3)

train_dataloader = dict(dataset=dict(data_preprocessor=dict(mean=[0.306] * 3, std=[0.376] * 3)))
val_dataloader = dict(
    dataset=dict(
        data_preprocessor=dict(
            mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375], bgr_to_rgb=False
        )
    )
)
test_dataloader = val_dataloader
