# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='SGD', lr=0.05, momentum=0.9, weight_decay=5e-4)
)
param_scheduler = dict(type='CosineAnnealingLR', T_max=10, convert_to_iter_based=True)

train_cfg = dict(max_epochs=10, val_interval=1)
val_cfg = dict()
test_cfg = dict()

auto_scale_lr = dict(base_batch_size=32)
