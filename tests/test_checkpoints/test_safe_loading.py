# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import os
import zipfile
from pickle import UnpicklingError

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.logging import HistoryBuffer
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from mmengine.runner import Runner
from torch.utils.data import Dataset

from mmprefetch.checkpoints.safe_loading import (
    _VALUE_DTYPES,
    allow_checkpoint_types,
    checkpoint_types,
)


class TinyModel(BaseModel):
    def __init__(self, data_preprocessor=None):
        super().__init__(data_preprocessor)
        self.linear = torch.nn.Linear(2, 1)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        out = self.linear(torch.stack(inputs) if isinstance(inputs, list) else inputs)
        return dict(loss=out.square().mean()) if mode == 'loss' else [out]


class ArrayMetaDataset(Dataset):
    """Six points, with metainfo of every kind that a dataset may carry."""

    def __init__(self, nested):
        arrays = {name: np.ones(2, dtype=name) for name in _VALUE_DTYPES}
        self.metainfo = dict(
            classes=('cat', 'dog'), weight=np.float32(0.5), arrays=arrays, nested=nested
        )

    def __len__(self):
        return 6

    def __getitem__(self, index):
        return dict(inputs=torch.full((2,), float(index)), data_samples=index)


class HalfMetric(BaseMetric):
    def process(self, data_batch, data_samples):
        self.results.append(1)

    def compute_metrics(self, results):
        return dict(half=np.float32(0.5))


@pytest.fixture(scope='module')
def registered():
    modules = [(MODELS, TinyModel), (DATASETS, ArrayMetaDataset), (METRICS, HalfMetric)]
    for registry, module in modules:
        registry.register_module(module=module)
    yield
    for registry, module in modules:
        registry._module_dict.pop(module.__name__)


def make_cfg(work_dir, **options):
    loader = dict(
        dataset=dict(type='ArrayMetaDataset', nested=dict(keypoints=dict(nose=0))),
        batch_size=2,
        num_workers=0,
        sampler=dict(type='DefaultSampler', shuffle=False),
    )
    cfg = dict(
        model=dict(type='TinyModel'),
        work_dir=str(work_dir),
        experiment_name=os.path.basename(work_dir),
        default_scope='mmengine',
        log_level='WARNING',
        train_dataloader=loader,
        val_dataloader=loader,
        val_evaluator=dict(type='HalfMetric'),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        val_cfg=dict(),
        optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1, momentum=0.9)),
        param_scheduler=dict(type='OneCycleLR', eta_max=0.1, total_steps=6, by_epoch=False),
        custom_hooks=[dict(type='EMAHook')],
        default_hooks=dict(
            checkpoint=dict(type='CheckpointHook', interval=1, save_best='half', rule='greater')
        ),
    )
    cfg.update(options)
    return Config(cfg)


@pytest.fixture(scope='module')
def checkpoint(tmp_path_factory, registered):
    """A checkpoint as mmengine's Runner writes it, holding all that one may hold."""
    work_dir = tmp_path_factory.mktemp('checkpoint')
    Runner.from_cfg(make_cfg(work_dir)).train()
    return work_dir / 'epoch_1.pth'


def as_numpy_one(checkpoint, path):
    """Copy a checkpoint with numpy's functions under the names that numpy 1 wrote."""
    with zipfile.ZipFile(checkpoint) as source, zipfile.ZipFile(path, 'w') as target:
        for name in source.namelist():
            content = source.read(name)
            if name.endswith('data.pkl'):
                content = content.replace(b'cnumpy._core.', b'cnumpy.core.')
            target.writestr(name, content)
    return path


@pytest.fixture
def no_globals():
    """Begin with an empty allow-list, and put the former one back."""
    former = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    yield
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals(former)


def test_refused_without_the_allow_list(checkpoint, no_globals):
    with pytest.raises(UnpicklingError, match='Weights only load failed'):
        torch.load(checkpoint)


def test_loads_with_the_allow_list(checkpoint, no_globals):
    allow_checkpoint_types()
    loaded = torch.load(checkpoint)
    meta = loaded['meta']['dataset_meta']
    assert meta['weight'] == np.float32(0.5) and meta['weight'].dtype == np.float32
    assert meta['nested'] == dict(keypoints=dict(nose=0))
    assert list(meta['arrays']) == list(_VALUE_DTYPES)
    for name, array in meta['arrays'].items():
        expected = np.ones(2, dtype=name)
        assert array.dtype == expected.dtype and (array == expected).all()
    history = loaded['message_hub']['log_scalars']['train/loss']
    assert len(history.data[0]) == 3
    assert history.statistics('current') == history.data[0][-1]


def test_loads_what_numpy_one_wrote(checkpoint, no_globals, tmp_path):
    allow_checkpoint_types()
    loaded = torch.load(as_numpy_one(checkpoint, tmp_path / 'old.pth'))
    assert loaded['meta']['dataset_meta']['weight'] == np.float32(0.5)


@pytest.mark.parametrize('index', range(len(checkpoint_types())))
def test_every_allowed_type_is_needed(checkpoint, no_globals, tmp_path, index):
    types = checkpoint_types()
    left_out = types.pop(index)
    old = isinstance(left_out, tuple) and left_out[1].startswith('numpy.core.')
    path = as_numpy_one(checkpoint, tmp_path / 'old.pth') if old else checkpoint
    torch.serialization.add_safe_globals(types)
    with pytest.raises(UnpicklingError):
        torch.load(path)


class CallsByName:
    def __init__(self, function, *args):
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


@pytest.mark.parametrize(
    'gadget',
    [
        CallsByName(os.system, 'true'),
        CallsByName(eval, '1'),
        CallsByName(getattr, torch.Tensor, '__init__'),
        CallsByName(getattr, np.ndarray, 'tofile'),
        CallsByName(np.load, 'x.npy'),
        np.array([CallsByName(os.system, 'true')], dtype=object),
        np.array([1], dtype=object),
    ],
    ids=[
        'system',
        'eval',
        'getattr-torch',
        'getattr-numpy',
        'np-load',
        'in-object-array',
        'object',
    ],
)
def test_anything_else_is_still_refused(gadget, no_globals, tmp_path):
    allow_checkpoint_types()
    torch.save(dict(state_dict={}, meta=gadget), tmp_path / 'bad.pth')
    with pytest.raises(UnpicklingError):
        torch.load(tmp_path / 'bad.pth')


def test_getattr_of_a_history_buffer_is_limited_to_its_statistics(no_globals, tmp_path):
    allow_checkpoint_types()
    torch.save(CallsByName(getattr, HistoryBuffer, 'mean'), tmp_path / 'good.pth')
    assert torch.load(tmp_path / 'good.pth') is HistoryBuffer.mean
    torch.save(CallsByName(getattr, HistoryBuffer, '__init__'), tmp_path / 'bad.pth')
    with pytest.raises(UnpicklingError, match="attribute '__init__'"):
        torch.load(tmp_path / 'bad.pth')


def test_importing_mmprefetch_is_enough_to_resume(checkpoint, registered, tmp_path):
    import mmprefetch  # noqa: F401

    runner = Runner.from_cfg(make_cfg(tmp_path, load_from=str(checkpoint), resume=True))
    runner.train()
    assert (runner.epoch, runner.iter) == (2, 6)
    cfg = make_cfg(tmp_path / 'second', load_from=str(checkpoint), custom_hooks=[])
    runner = Runner.from_cfg(cfg)
    runner.load_or_resume()
    loaded = torch.load(checkpoint)['state_dict']
    assert loaded and all(
        torch.equal(runner.model.state_dict()[key], value) for key, value in loaded.items()
    )
