# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# Validation and test images come from another scanner, and are not padded.
_base_ = './common.py'

val_dataloader = dict(
    dataset=dict(
        data_preprocessor=dict(mean=[80.0] * 3, std=[90.0] * 3, pad_size_divisor=1),
    )
)
test_dataloader = val_dataloader
