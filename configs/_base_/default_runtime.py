# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
default_scope = 'mmengine'

custom_imports = dict(imports=['mmprefetch', 'mmprefetch.demo'], allow_failed_imports=False)

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=20),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(
        type='CheckpointHook',
        interval=1,
        max_keep_ckpts=3,
        save_best='accuracy/top1',
        rule='greater',
    ),
    sampler_seed=dict(type='DistSamplerSeedHook'),
)

env_cfg = dict(
    cudnn_benchmark=False,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
randomness = dict(seed=0, deterministic=True)

log_level = 'INFO'
load_from = None
resume = False
