# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Fields are bound to the preprocessor that the model calls."""

import copy

import pytest
import torch
import toys
from mmengine.config import Config
from mmengine.model import BaseDataPreprocessor, BaseTTAModel, ImgDataPreprocessor
from mmengine.registry import MODELS
from mmengine.runner import Runner
from torch import nn

DATASET = dict(mean=[9.0, 8.0, 7.0], std=[2.0, 3.0, 4.0])
IMG = {key: value for key, value in toys.IMG.items() if key != 'type'}


@MODELS.register_module(force=True)
class MergingTTA(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        merged = []
        for samples in data_samples_list:
            sample = samples[0].new()
            sample.score = sum(one.score for one in samples) / len(samples)
            merged.append(sample)
        return merged


@toys.DATASETS.register_module(force=True)
class Flipped(toys.ToyImages):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        image, sample = item['inputs'], item['data_samples']
        return dict(inputs=[image, image.flip(-1)], data_samples=[sample, sample.clone()])


def tta_config(work_dir, bound, preprocessor):
    cfg = toys.config(work_dir, batch_size=1, preprocessor=preprocessor)
    test = copy.deepcopy(cfg['val_dataloader'])
    test['dataset']['type'] = 'Flipped'
    if bound:
        test['dataset']['data_preprocessor'] = dict(DATASET)
    cfg.update(
        model=dict(type='MergingTTA', module=cfg['model']),
        test_dataloader=test,
        test_cfg=dict(),
        test_evaluator=dict(type='ToyMetric'),
    )
    for name in ('train_dataloader', 'train_cfg', 'val_dataloader', 'val_cfg', 'val_evaluator',
                 'optim_wrapper', 'param_scheduler'):  # fmt: skip
        cfg.pop(name)
    return cfg


@pytest.mark.parametrize('opted_in', [False, True])
def test_each_augmentation_is_normalised_once_with_the_datasets_values(tmp_path, opted_in):
    plain = dict(toys.IMG, **DATASET)
    ours = dict(toys.IMG)
    if opted_in:
        ours = dict(IMG, type='PrefetchDataPreprocessor')
    results = []
    for made in (
        Config(tta_config(tmp_path / 'a', False, plain)),
        toys.prefetching(tta_config(tmp_path / 'b', True, ours)),
    ):
        torch.manual_seed(0)
        runner = Runner.from_cfg(made)
        runner.model.module.init_weights()
        results.append(runner.test())
    assert results[0] == results[1]


@MODELS.register_module(force=True)
class Distiller(toys.ToyModel):
    """Asks its own preprocessor and its teacher's for each batch."""

    def __init__(self, teacher, **kwargs):
        super().__init__(**kwargs)
        self.teacher = MODELS.build(teacher)

    def train_step(self, data, optim_wrapper):
        own, teacher = self.data_preprocessor(data, True), self.teacher.data_preprocessor(data)
        loss = self._run_forward(own, 'loss')['loss']
        with torch.no_grad():
            scores = self.teacher(teacher['inputs'].float()[..., :6, :7])
        loss = loss + scores.square().mean()
        optim_wrapper.update_params(loss)
        return dict(loss=loss)


def distiller(work_dir, teacher, own, bound, workers=0):
    cfg = toys.config(work_dir, val=False, workers=workers, preprocessor=own)
    cfg['model'].update(type='Distiller', teacher=dict(type='ToyModel', data_preprocessor=teacher))
    if bound:
        cfg['train_dataloader']['dataset']['data_preprocessor'] = dict(DATASET)
    return cfg


@pytest.mark.parametrize('workers', [0, 1])
def test_two_that_are_called_get_the_same_fields(tmp_path, workers):
    teacher = dict(toys.IMG, pad_value=3)
    plain = [dict(each, **DATASET) for each in (teacher, toys.IMG)]
    stock = toys.run(distiller(tmp_path / 'a', *plain, False, workers))
    cfg = distiller(tmp_path / 'b', teacher, dict(toys.IMG), True, workers)
    toys.assert_same_run(stock, toys.run(toys.prefetching(cfg)))


@pytest.mark.parametrize('workers', [0, 1])
def test_two_that_are_called_without_bound_fields(tmp_path, workers):
    teacher = dict(type='RandomPreprocessor', scale=2.0)
    stock = toys.run(distiller(tmp_path / 'a', teacher, dict(toys.IMG), False, workers))
    cfg = distiller(tmp_path / 'b', teacher, dict(toys.IMG), False, workers)
    toys.assert_same_run(stock, toys.run(toys.prefetching(cfg)))


def test_one_that_is_called_and_does_not_know_the_fields_is_named(tmp_path):
    teacher = dict(type='RandomPreprocessor', scale=2.0)
    cfg = distiller(tmp_path, teacher, dict(toys.IMG), True)
    with pytest.raises(ValueError, match=r'teacher\.data_preprocessor .*RandomPreprocessor.*mean'):
        toys.run(toys.prefetching(cfg))


def test_one_that_is_not_called_need_not_know_them(tmp_path):
    class Idle(toys.ToyModel):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.inner = nn.Module()
            self.inner.data_preprocessor = BaseDataPreprocessor()

    MODELS.register_module(module=Idle, force=True)
    stock = toys.run(toys.config(tmp_path / 'a', preprocessor=dict(toys.IMG, **DATASET)))
    cfg = toys.config(tmp_path / 'b')
    cfg['model']['type'] = 'Idle'
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader']['dataset']['data_preprocessor'] = dict(DATASET)
    toys.assert_same_run(stock, toys.run(toys.prefetching(cfg)))


def test_a_model_without_one_is_told_which_to_have(tmp_path):
    cfg = toys.config(tmp_path, preprocessor=None)
    cfg['train_dataloader']['dataset']['data_preprocessor'] = dict(DATASET)
    with pytest.raises(ValueError, match=r"model\.data_preprocessor.*type='ImgDataPreprocessor'"):
        toys.run(toys.prefetching(cfg))


def test_one_part_without_mean_and_std(tmp_path):
    class Whole(toys.ToyImages):
        def full_init(self):
            pass

    toys.DATASETS.register_module(module=Whole, force=True)
    cfg = toys.config(tmp_path, val=False, preprocessor=dict(type='ImgDataPreprocessor'))
    cfg['train_dataloader']['dataset'] = dict(
        type='ConcatDataset',
        datasets=[dict(type='Whole', data_preprocessor=DATASET), dict(type='Whole')],
    )
    with pytest.raises(
        ValueError, match=r'datasets\.1.*neither mean nor std.*datasets\.0'
    ) as caught:
        toys.run(toys.prefetching(cfg))
    assert 'mean=[0], std=[1]' in str(caught.value)


# -- a preprocessor inside another -----------------------------------------------------------------


@MODELS.register_module(force=True)
class Branches(BaseDataPreprocessor):
    """A preprocessor that gives its batch to the one inside, as mmdet's for several branches."""

    def __init__(self, data_preprocessor):
        super().__init__()
        self.data_preprocessor = MODELS.build(data_preprocessor)

    def forward(self, data, training=False):
        return self.data_preprocessor(data, training)

    def to(self, device, *args, **kwargs):
        return self.data_preprocessor.to(device, *args, **kwargs)


@pytest.mark.parametrize('nested', [False, True])
@pytest.mark.parametrize('opted_in', [False, True])
@pytest.mark.parametrize('workers', [0, 1])
def test_fields_reach_the_preprocessor_inside(tmp_path, nested, opted_in, workers):
    inner = dict(toys.IMG, pad_size_divisor=8)
    own = dict(type='Branches', data_preprocessor=dict(inner, **DATASET))
    stock = toys.run(toys.config(tmp_path / 'a', preprocessor=own, workers=workers))
    own = dict(type='Branches', data_preprocessor=inner)
    if opted_in:
        own.update(type='PrefetchDataPreprocessor', wraps='Branches')
    cfg = toys.config(tmp_path / 'b', preprocessor=own, workers=workers)
    fields = dict(data_preprocessor=DATASET) if nested else DATASET
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader']['dataset']['data_preprocessor'] = dict(fields)
    runner, record = toys.run(toys.prefetching(cfg))
    toys.assert_same_run(stock, (runner, record))
    module = runner.model.data_preprocessor.of_split('train')
    assert type(module) is Branches
    assert type(module.data_preprocessor) is ImgDataPreprocessor
    assert module.data_preprocessor.pad_size_divisor == 8


def test_a_field_that_neither_knows(tmp_path):
    own = dict(type='Branches', data_preprocessor=dict(toys.IMG))
    cfg = toys.config(tmp_path, preprocessor=own)
    cfg['train_dataloader']['dataset']['data_preprocessor'] = dict(meen=[1.0])
    with pytest.raises(ValueError, match=r"meen.*did you mean 'mean'"):
        toys.run(toys.prefetching(cfg))
