# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Whatever model, binding, dataloader and loop: equal to stock, to the bit."""

import copy
import itertools
import tempfile

import pytest
import torch
import toys
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from mmengine.config import Config
from mmengine.model import BaseTTAModel, ImgDataPreprocessor
from mmengine.registry import DATASETS, MODELS
from mmengine.runner import Runner
from torch import nn

FIRST = dict(mean=[123.0, 116.5, 103.25], std=[58.5, 57.0, 57.25])
SECOND = dict(mean=[20.0, 30.0, 40.0], std=[7.0, 8.0, 9.0])
ITERS = dict(by_epoch=False, max_iters=7, val_interval=3)

_names = itertools.count()


@DATASETS.register_module(force=True)
class Half(toys.ToyImages):
    """Half of a concatenation; draws from the generator that dropout draws from."""

    def __init__(self, number=0, draws=False, **kwargs):
        super().__init__(**kwargs)
        self.number, self.draws = number, draws

    def full_init(self):
        pass

    def __getitem__(self, index):
        item = super().__getitem__(index)
        item['data_samples'].set_metainfo(dict(number=self.number))
        image = item['inputs']
        if self.draws:
            image = image // int(torch.randint(1, 4, ()))
        # A view, as a crop is.
        item['inputs'] = nn.functional.pad(image, (2, 3, 1, 1))[:, 1:-1, 2:-3]
        return item


@DATASETS.register_module(force=True)
class TwoViewsOf(Half):
    def __getitem__(self, index):
        item = super().__getitem__(index)
        image, sample = item['inputs'], item['data_samples']
        return dict(inputs=[image, image.flip(-1)], data_samples=[sample, sample.clone()])


@MODELS.register_module(force=True)
class EachItsOwn(ImgDataPreprocessor):
    """What a mixed split is compared with: normalises each sample with its part's values."""

    def __init__(self, **kwargs):
        super().__init__()
        self.of_part = [ImgDataPreprocessor(**fields) for fields in (FIRST, SECOND)]

    def forward(self, data, training=False):
        data = self.cast_data(data)
        data['inputs'] = [
            self.of_part[sample.number](dict(inputs=[image]))['inputs'][0]
            for image, sample in zip(data['inputs'], data['data_samples'], strict=True)
        ]
        return super().forward(data, training)


@MODELS.register_module(force=True)
class Remembers(ImgDataPreprocessor):
    """Unknown to mmprefetch; keeps state for the model."""

    def forward(self, data, training=False):
        self.last = len(data['inputs'])
        return super().forward(data, training)


class Plain(toys.ToyModel):
    pass


class Undoes(toys.ToyModel):
    def forward(self, inputs, data_samples=None, mode='tensor'):
        dp = self.data_preprocessor
        return super().forward((inputs * dp.std + dp.mean) / 255, data_samples, mode)


class ReadsLast(toys.ToyModel):
    def forward(self, inputs, data_samples=None, mode='tensor'):
        return super().forward(inputs * self.data_preprocessor.last, data_samples, mode)


class Two(toys.ToyModel):
    """Asks a second preprocessor for each batch as well."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.second = nn.Module()
        self.second.data_preprocessor = copy.deepcopy(self.data_preprocessor)

    def train_step(self, data, optim_wrapper):
        first, second = self.data_preprocessor(data, True), self.second.data_preprocessor(data)
        loss = self._run_forward(first, 'loss')['loss'] + self._run_forward(second, 'loss')['loss']
        optim_wrapper.update_params(loss)
        return dict(loss=loss)


class SeesStrides(toys.ToyModel):
    """Works on the images as they came, and on how they lie in memory."""

    def forward(self, inputs, data_samples=None, mode='tensor'):
        images = [image.float()[:, :6, :7] / (255 + image.stride(0) % 7) for image in inputs]
        return super().forward(torch.stack(images), data_samples, mode)


class StepsItself(toys.ToyModel):
    """Asks for a batch twice."""

    def train_step(self, data, optim_wrapper):
        losses = [self._run_forward(self.data_preprocessor(data, True), 'loss')['loss']
                  for _ in range(2)]  # fmt: skip
        loss = sum(losses)
        optim_wrapper.update_params(loss)
        return dict(loss=loss)


MODEL_KINDS = [Plain, Undoes, ReadsLast, Two, SeesStrides, StepsItself]
for _kind in MODEL_KINDS:
    MODELS.register_module(module=_kind, name=f'Generated{_kind.__name__}', force=True)


@MODELS.register_module(force=True)
class GeneratedTTA(BaseTTAModel):
    def merge_preds(self, data_samples_list):
        merged = []
        for samples in data_samples_list:
            sample = samples[0].new()
            sample.score = sum(one.score for one in samples) / len(samples)
            merged.append(sample)
        return merged


def configs(work_dir, kind, binding, workers, by_epoch, draws, shuffle):
    """The configs of a stock and of a prefetching run that have to be equal."""
    type_ = 'Remembers' if kind is ReadsLast else 'ImgDataPreprocessor'
    if kind is SeesStrides:
        binding = 'none'
    made = []
    for prefetch in (False, True):
        cfg = toys.config(f'{work_dir}/{prefetch}', workers=workers, batch_size=3,
                          train=None if by_epoch else ITERS)  # fmt: skip
        cfg['train_dataloader']['sampler']['shuffle'] = shuffle
        part = dict(type='Half', length=7, draws=draws)
        preprocessor = dict(type=type_, pad_size_divisor=4, **SECOND)
        if kind is SeesStrides:
            preprocessor = dict(type='BaseDataPreprocessor')
        if binding == 'mixed':
            dataset = dict(type='ConcatDataset', datasets=[
                dict(part, data_preprocessor=FIRST), dict(part, number=1, data_preprocessor=SECOND)
            ])  # fmt: skip
            if not prefetch:
                preprocessor = dict(type='EachItsOwn')
                for each in dataset['datasets']:
                    del each['data_preprocessor']
            else:
                preprocessor = dict(type=type_)
        else:
            dataset = dict(part, length=14)
            if binding != 'none':
                if not prefetch or binding == 'model':
                    preprocessor.update(FIRST)
                elif binding == 'dataset':
                    dataset['data_preprocessor'] = dict(FIRST)
                elif binding == 'top':
                    preprocessor.update(type='PrefetchDataPreprocessor', wraps=type_)
                    cfg['data_preprocessor'] = dict(FIRST)
        for split in ('train', 'val'):
            cfg[f'{split}_dataloader']['dataset'] = copy.deepcopy(dataset)
        cfg['model'] = dict(type=f'Generated{kind.__name__}', data_preprocessor=preprocessor)
        cfg['experiment_name'] = f'generated-{next(_names)}'
        made.append(cfg)
    return made


def outcome(cfg):
    try:
        return toys.run(cfg), None
    except Exception as error:
        return None, error


@settings(max_examples=12, deadline=None, derandomize=True,
          suppress_health_check=list(HealthCheck))  # fmt: skip
@given(
    kind=st.sampled_from(MODEL_KINDS),
    binding=st.sampled_from(['none', 'model', 'top', 'dataset', 'mixed']),
    workers=st.sampled_from([0, 2]),
    by_epoch=st.booleans(),
    draws=st.booleans(),
    shuffle=st.booleans(),
    depth=st.sampled_from([0, 1, 2]),
)
@example(Undoes, 'dataset', 0, True, False, True, 2)
@example(Undoes, 'top', 2, False, False, True, 2)
@example(SeesStrides, 'none', 0, True, True, True, 2)
def test_equal_to_stock(kind, binding, workers, by_epoch, draws, shuffle, depth):
    with tempfile.TemporaryDirectory() as work_dir:
        stock, ours = configs(work_dir, kind, binding, workers, by_epoch, draws, shuffle)
        torch.manual_seed(0)
        expected, stock_error = outcome(Config(stock))
        torch.manual_seed(0)
        found, error = outcome(toys.prefetching(ours, depth))
        if binding == 'mixed' and kind in (Undoes, ReadsLast):
            # There is no one value to be read, and no way to give each sample its own.
            assert isinstance(error, ValueError)
        elif stock_error is not None:
            assert type(error) is type(stock_error), error
        else:
            if error is not None:
                raise error
            toys.assert_same_run(expected, found)


@pytest.mark.parametrize('binding', ['none', 'dataset'])
@pytest.mark.parametrize('workers', [0, 1])
@pytest.mark.parametrize('depth', [0, 2])
def test_test_time_augmentation(tmp_path, binding, workers, depth):
    results = []
    for prefetch in (False, True):
        cfg = configs(tmp_path, Plain, binding, workers, True, False, False)[prefetch]
        test = cfg['val_dataloader']
        test['dataset']['type'], test['batch_size'] = 'TwoViewsOf', 1
        cfg.update(
            model=dict(type='GeneratedTTA', module=cfg['model']),
            test_dataloader=test,
            test_cfg=dict(),
            test_evaluator=dict(type='ToyMetric'),
        )
        for name in ('train_dataloader', 'train_cfg', 'val_dataloader', 'val_cfg',
                     'val_evaluator', 'optim_wrapper', 'param_scheduler'):  # fmt: skip
            cfg.pop(name)
        torch.manual_seed(0)
        runner = Runner.from_cfg(toys.prefetching(cfg, depth) if prefetch else Config(cfg))
        runner.model.module.init_weights()
        results.append(runner.test())
    assert results[0] == results[1]
