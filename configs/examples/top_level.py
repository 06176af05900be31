# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# Three levels: the train split's mean, then the top level's mean and std, then the model's.
_base_ = './common.py'

# The top level counts since the model's preprocessor is this one.
model = dict(data_preprocessor=dict(type='PrefetchDataPreprocessor', wraps='ImgDataPreprocessor'))

data_preprocessor = dict(mean=[127.5] * 3, std=[127.5] * 3, pad_value=127.5)

train_dataloader = dict(dataset=dict(data_preprocessor=dict(_delete_=True, mean=[77.91] * 3)))
val_dataloader = dict(dataset=dict(data_preprocessor=dict(_delete_=True)))
test_dataloader = val_dataloader
