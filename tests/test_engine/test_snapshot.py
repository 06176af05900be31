# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Whatever a hook changes about a batch, or about the preprocessor, is noticed."""

from array import array
from collections import UserDict, UserList, deque
from collections.abc import Sequence

import pytest
import torch
import toys
from mmengine.config import ConfigDict
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor
from mmengine.registry import HOOKS, MODELS
from mmengine.structures import BaseDataElement, InstanceData
from nested import Boxes
from torch import nn

from mmprefetch.engine.snapshot import BatchSnapshot, FieldSnapshot


def batch():
    sample = BaseDataElement(metainfo=dict(path='a'))
    sample.gt = InstanceData(labels=torch.zeros(2))
    sample.boxes = Boxes(torch.zeros(2, 4))
    sample.text = 'x'
    return dict(
        inputs=dict(sup=[torch.zeros(2)], unsup=(torch.zeros(2), [torch.zeros(1)])),
        data_samples=[sample],
        extra=None,
        square=torch.zeros(3, 3),
        queue=deque([torch.zeros(1)]),
        users=UserList([torch.zeros(1)]),
        options=UserDict(scale=torch.zeros(1)),
        config=ConfigDict(scale=torch.zeros(1)),
        numbers=[float(number) for number in range(1000)],
    )


def as_metainfo(sample, name):
    sample.set_field(sample.pop(name), name, field_type='metainfo')


CHANGES = [
    lambda b: b['inputs']['sup'][0].add_(1),
    lambda b: b['inputs']['sup'].__setitem__(0, torch.zeros(2)),
    lambda b: b['inputs']['sup'].append(torch.zeros(2)),
    lambda b: b['inputs']['unsup'][1][0].zero_(),
    lambda b: b.pop('extra'),
    lambda b: b['options'].__setitem__('scale', torch.zeros(1)),
    lambda b: b['options']['scale'].add_(1),
    lambda b: b['config'].__setitem__('scale', torch.zeros(1)),
    lambda b: b['config'].__setitem__('shift', None),
    lambda b: b.__setitem__('new', None),
    lambda b: b.__setitem__('other', b.pop('extra')),
    lambda b: b.__setitem__('extra', 3),
    lambda b: b['data_samples'][0].gt.labels.fill_(1),
    lambda b: b['data_samples'][0].boxes.tensor.fill_(1),
    lambda b: setattr(b['data_samples'][0].boxes, 'tensor', torch.zeros(2, 4)),
    lambda b: setattr(b['data_samples'][0], 'text', 'y'),
    lambda b: setattr(b['data_samples'][0], 'added', 1),
    lambda b: b['data_samples'][0].set_metainfo(dict(path='b')),
    lambda b: b['data_samples'].clear(),
    lambda b: as_metainfo(b['data_samples'][0], 'text'),
    lambda b: setattr(b['inputs']['sup'][0], 'data', torch.ones(2)),
    lambda b: b['inputs']['sup'][0].requires_grad_(),
    lambda b: setattr(b['square'], 'data', b['square'].data[:, :2]),
    lambda b: setattr(b['square'], 'data', b['square'].data.t()),
    lambda b: b['queue'].__setitem__(0, torch.zeros(1)),
    lambda b: b['queue'][0].add_(1),
    lambda b: b['users'].append(torch.zeros(1)),
    lambda b: b['numbers'].__setitem__(500, -1.0),
    lambda b: b['numbers'].append(torch.zeros(1)),
]


@pytest.mark.parametrize('change', CHANGES)
def test_every_change_is_noticed(change):
    raw = batch()
    snapshot = BatchSnapshot(raw)
    assert not snapshot.changed()
    change(raw)
    assert snapshot.changed()


def test_what_leads_back_to_itself_is_seen_once():
    tree = dict(items=[1, 'x'])
    tree['parent'] = tree
    tree['items'].append(tree['items'])
    snapshot = BatchSnapshot(dict(tree=tree))
    assert not snapshot.changed()
    tree['items'][0] = 2
    assert snapshot.changed()


def test_items_that_are_made_anew_each_time_are_no_change():
    class Fresh(Sequence):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            if index >= 2:
                raise IndexError
            return [object()]

    snapshot = BatchSnapshot(dict(a=Fresh(), b=range(10**6, 10**6 + 3), c=array('d', [1.5, 2.5])))
    assert not snapshot.changed()


def test_a_mapping_whose_values_are_no_view():
    raw = ConfigDict(inputs=[1], other=2)
    snapshot = BatchSnapshot(raw)
    assert not snapshot.changed()
    raw['inputs'] = [1]
    assert snapshot.changed()


def test_reading_is_no_change():
    raw = batch()
    snapshot = BatchSnapshot(raw)
    raw['data_samples'][0].gt[0]
    (raw['inputs']['sup'][0] + 1).add_(1)
    raw['data_samples'][0].to('cpu')
    with torch.inference_mode():
        BatchSnapshot(dict(inputs=torch.zeros(1)))
    assert not snapshot.changed()


class Fields(nn.Module):
    def __init__(self):
        super().__init__()
        self.number, self.tensor, self.spare = 1, torch.zeros(2), None
        self.register_buffer('mean', torch.zeros(3))
        self.weight = nn.Parameter(torch.zeros(2))
        self.inner = nn.BatchNorm1d(2)


FIELD_CHANGES = dict(
    attribute=lambda m: setattr(m, 'number', 2),
    added=lambda m: setattr(m, 'other', None),
    deleted=lambda m: delattr(m, 'spare'),
    tensor=lambda m: m.tensor.add_(1),
    buffer_in_place=lambda m: m.mean.add_(1),
    buffer=lambda m: setattr(m, 'mean', torch.zeros(3)),
    buffer_to=lambda m: m.double(),
    parameter=lambda m: setattr(m.weight, 'data', torch.ones(2)),
    requires_grad=lambda m: m.weight.requires_grad_(False),
    submodule=lambda m: setattr(m, 'inner', nn.BatchNorm1d(2)),
    method=lambda m: setattr(m, 'forward', len),
)


@pytest.mark.parametrize('name', FIELD_CHANGES)
@pytest.mark.parametrize('among', [0, 1])
def test_every_change_of_a_field_is_noticed(name, among):
    module = Fields()
    snapshot = FieldSnapshot([nn.Identity(), module] if among else [module])
    assert snapshot.modules[among] is module and not snapshot.changed()
    FIELD_CHANGES[name](module)
    assert snapshot.changed()


def test_fields_of_a_module_inside_count_where_it_is_named():
    module = Fields()
    alone, both = FieldSnapshot([module]), FieldSnapshot([module, module.inner])
    module.inner.running_mean.add_(1)
    assert both.changed() and not alone.changed()


def test_the_mode_is_no_field():
    module = Fields()
    snapshot = FieldSnapshot([module])
    module.eval()
    assert not snapshot.changed()


def test_fields_that_are_going_to_be_written_may_be_left_out():
    module = Fields()
    snapshot = FieldSnapshot([module])
    module.number, module.added = 2, 3
    assert snapshot.changed() and snapshot.changed(but=['number'])
    assert not snapshot.changed(but=['number', 'added'])
    module.mean.add_(1)
    assert snapshot.changed(but=['number', 'added'])


@MODELS.register_module(force=True)
class NestedPreprocessor(BaseDataPreprocessor):
    def forward(self, data, training=False):
        data = self.cast_data(data)
        images = [image.float()[:, :6, :7] / 255 for image in data['inputs']['images']]
        return dict(inputs=torch.stack(images), data_samples=data['data_samples'])


@HOOKS.register_module(force=True)
class ChangesDeeply(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        data_batch['inputs']['images'][0].mul_(0)
        data_batch['data_samples'][1].label = torch.tensor(0)
        data_batch['data_samples'][2].label.fill_(1)


def nested_collate(items):
    return dict(
        inputs=dict(images=[item['inputs'] for item in items]),
        data_samples=[item['data_samples'] for item in items],
    )


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('safe', [False, True])
def test_a_hook_that_changes_the_batch_deep_inside_counts(tmp_path, safe, workers):
    changes = [dict(type='ChangesDeeply')]
    runs = []
    for hooks, prefetch in ((changes, False), (changes, True), ([], False)):
        cfg = toys.config(
            tmp_path / f'{len(runs)}',
            batch_size=7,
            workers=workers,
            hooks=hooks,
            preprocessor=dict(type='NestedPreprocessor'),
            val=False,
        )
        cfg['train_dataloader']['collate_fn'] = nested_collate
        if prefetch and safe:
            cfg['model']['data_preprocessor'] = dict(
                type='PrefetchDataPreprocessor', wraps='NestedPreprocessor', prefetch_safe=True
            )
        runs.append(toys.run(toys.prefetching(cfg) if prefetch else cfg))
        runs[-1][1].raw.clear()
    toys.assert_same_run(*runs[:2])
    assert runs[0][1].losses != runs[2][1].losses
