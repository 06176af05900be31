# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What makes begun work out of date, and what does not."""

import pytest
import torch
import toys
from mmengine.dataset import pseudo_collate
from mmengine.model import ImgDataPreprocessor
from torch import nn
from torch.utils.data import DataLoader

from mmprefetch import PrefetchDataPreprocessor, look_ahead
from mmprefetch.families import register_family
from mmprefetch.families.mmdet import DetFamily


class KeepsBooks(nn.Module):
    """A batch augmentation that writes its current size into itself, as mmdet's does."""

    def __init__(self):
        super().__init__()
        self.register_buffer('calls', torch.zeros(()))
        self.size = 0

    def forward(self, inputs):
        self.calls += 1
        if self.calls % 2 == 0:
            self.size = self.size + 1
        return inputs + self.size


class Augmenting(ImgDataPreprocessor):
    def __init__(self, batch_augments=None, **kwargs):
        super().__init__(**kwargs)
        self.batch_augments = batch_augments

    def forward(self, data, training=False):
        data = super().forward(data, training)
        if training and self.batch_augments is not None:
            for augment in self.batch_augments:
                data['inputs'] = augment(data['inputs'])
        return data


register_family(Augmenting, DetFamily())


def loaded():
    return DataLoader(
        toys.ToyImages(length=30), batch_size=3, num_workers=1, collate_fn=pseudo_collate
    )


@pytest.mark.parametrize('changes', ['nothing', 'augment', 'pad_value'])
def test_what_an_augmentation_writes_into_itself_is_no_change(monkeypatch, changes):
    at_once, run = [], DetFamily.run
    monkeypatch.setattr(
        DetFamily, 'run', lambda self, *args: (at_once.append(1), run(self, *args))[1]
    )
    preprocessor = PrefetchDataPreprocessor.around(Augmenting(nn.ModuleList([KeepsBooks()])))
    stock = Augmenting(nn.ModuleList([KeepsBooks()]))
    for index, batch in enumerate(look_ahead(loaded(), preprocessor)):
        for each in (preprocessor, stock):
            if changes == 'augment' and index == 5:
                each.batch_augments[0] = KeepsBooks()
            if changes == 'pad_value' and index == 5:
                each.pad_value = 3
        assert toys.same(preprocessor(batch, True), stock(batch, True))
    assert preprocessor.batch_augments[0].size == (5 if changes != 'augment' else 2)
    # The first is not begun; what was begun before a change is done again.
    assert len(at_once) == 1 if changes == 'nothing' else 1 < len(at_once) <= 4
