# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# The same training with mmengine's own loops, to compare with.
_base_ = [
    '../_base_/datasets/digits.py',
    '../_base_/models/digits_classifier.py',
    '../_base_/schedules/digits.py',
    '../_base_/default_runtime.py',
]

# mmengine knows no `data_preprocessor` inside a dataset: take it out, and give it to the model.
for _dataloader in (_base_.train_dataloader, _base_.val_dataloader, _base_.test_dataloader):
    _dataloader.dataset.pop('data_preprocessor', None)
del _dataloader

model = dict(data_preprocessor=dict(type='ImgDataPreprocessor', **_base_.digits_normalization))

train_cfg = dict(by_epoch=True)
