# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A batch that is loaded early gets memory of its own, and is otherwise the same."""

import copy
import dataclasses
import threading
from collections import UserList
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pytest
import torch
import toys
from hypothesis import given, settings
from mmengine.config import Config
from mmengine.registry import DATASETS
from test_staging import Boxes, batches

from mmprefetch.ownership import own_memory
from mmprefetch.watch import Watch


@settings(deadline=None, max_examples=200)
@given(batches)
def test_same_types_and_values(batch):
    before = copy.deepcopy(batch)
    owned = own_memory(batch)
    assert type(owned) is type(batch)
    assert toys.same(owned, before) and toys.same(batch, before)


def test_nothing_is_shared():
    tensor, array = torch.zeros(2, 3).t(), np.zeros(3)
    batch = dict(a=[tensor], b=(array,), c=Boxes(tensor), d=torch.nn.Parameter(torch.zeros(2)))
    owned = own_memory(batch)
    tensor.fill_(1)
    array.fill(1)
    assert owned['a'][0].sum() == owned['b'][0].sum() == owned['c'].tensor.sum() == 0
    assert owned['a'][0].stride() == tensor.stride()
    assert owned['d'].requires_grad


class Locked:
    def __init__(self, tensor=None):
        self.lock, self.tensor, self.me = threading.Lock(), tensor, self

    def to(self, *args, **kwargs):
        return self if self.tensor is None else Locked(self.tensor.to(*args, **kwargs))


@dataclasses.dataclass(frozen=True)
class Record:
    tensor: torch.Tensor


def test_containers_of_any_kind():
    tensor = torch.zeros(2)
    boxed = np.empty(1, dtype=object)
    boxed[0] = tensor
    batch = dict(
        locked=Locked(), moved=Locked(tensor), record=Record(tensor), user=UserList([tensor]),
        array=boxed, frozen=MappingProxyType(dict(a=tensor)), members=frozenset([1]),
    )  # fmt: skip
    owned = own_memory(batch)
    assert not Watch(batch).changed()
    tensor.fill_(1)
    assert owned['locked'] is batch['locked']
    assert owned['moved'].tensor.sum() == owned['record'].tensor.sum() == 0
    assert owned['user'][0].sum() == owned['array'][0].sum() == owned['frozen']['a'].sum() == 0
    assert type(owned['user']) is UserList and owned['members'] == {1}


@DATASETS.register_module(force=True)
class OneBuffer(toys.ToyImages):
    """Every item is a view of one buffer."""

    def __init__(self, kind, **kwargs):
        super().__init__(**kwargs, ragged=False)
        self.buffer = torch.zeros(3, 6, 7, dtype=torch.uint8)
        if kind == 'numpy':  # what is written through it does not show in the tensor's version
            self.writer = self.buffer.numpy()

    def __getitem__(self, index):
        item = super().__getitem__(index)
        if hasattr(self, 'writer'):
            self.writer[:] = item['inputs'].numpy()
        else:
            self.buffer.copy_(item['inputs'])
        return dict(item, inputs=self.buffer)


@pytest.mark.parametrize('preprocessor', [toys.IMG, None, dict(type='RandomPreprocessor')])
@pytest.mark.parametrize('kind', ['numpy', 'torch'])
def test_a_dataset_that_reuses_its_buffer(tmp_path, kind, preprocessor):
    cfg = toys.config(tmp_path / 'a', batch_size=1, preprocessor=preprocessor)
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader']['dataset'] = dict(type='OneBuffer', kind=kind)
    stock = toys.run(Config(cfg))
    for depth in (1, 3):
        cfg['work_dir'] = str(tmp_path / f'{depth}')
        run = toys.run(toys.prefetching(cfg, depth))
        toys.assert_same_run(stock, run)
        seen = [[then for _, then, _ in record.raw] for _, record in (stock, run)]
        assert toys.same(*seen)


def test_one_object_at_two_places_stays_one():
    tensor, shared = torch.zeros(2), [1]
    owned = own_memory(dict(a=[tensor, shared], b=(tensor, shared)))
    assert owned['a'][0] is owned['b'][0] is not tensor
    assert owned['a'][1] is owned['b'][1] is not shared


def test_what_leads_back_to_itself():
    tree = dict(items=[torch.zeros(1)])
    tree['parent'] = tree
    tree['items'].append(tree['items'])
    owned = own_memory(tree)
    assert owned['parent'] is owned is not tree
    assert owned['items'][1] is owned['items'] is not tree['items']
    assert owned['items'][0] is not tree['items'][0]


def test_sequences_that_cannot_be_made_of_their_items():
    class Text(str):
        pass

    batch = dict(a=range(3), b=Text('ab'), c=bytearray(b'ab'))
    assert own_memory(batch) == batch
    assert type(own_memory(batch)['b']) is Text


def test_items_that_are_made_anew_are_not_mixed_up():
    class Fresh(Mapping):
        def __iter__(self):
            return iter(range(50))

        def __len__(self):
            return 50

        def __getitem__(self, key):
            return np.full(1, key)

    owned = own_memory(Fresh())
    assert [int(owned[key][0]) for key in range(50)] == list(range(50))
