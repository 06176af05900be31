# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
# Two folders of digits, each normalised with its own values in the same batch. The second is from
# `python tools/prepare_demo_data.py --out data/digits_b --seed 1`; its channels stay BGR.
_base_ = './common.py'

train_dataloader = dict(
    dataset=dict(
        _delete_=True,
        type='ConcatDataset',
        datasets=[
            _base_.train_dataloader.dataset,
            dict(
                type='ImageFolderDataset',
                data_root='data/digits_b',
                split='train',
                pipeline=_base_.digits_pipeline,
                data_preprocessor=dict(mean=[70.0, 75.0, 80.0], std=[90.0] * 3, bgr_to_rgb=False),
            ),
        ],
    )
)
