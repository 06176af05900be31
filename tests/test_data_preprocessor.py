# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The wrapper stands where the wrapped preprocessor stood, and hands out what was begun."""

import copy
import pickle
import threading
import time
from collections import namedtuple

import numpy as np
import pytest
import torch
import toys
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement
from torch import nn

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.engine import Preparation, Ticket

IMG = {key: value for key, value in toys.IMG.items() if key != 'type'}


def batch(count=3, seed=0):
    items = [toys.ToyImages()[seed + index] for index in range(count)]
    return dict(
        inputs=[item['inputs'] for item in items],
        data_samples=[item['data_samples'] for item in items],
    )


@pytest.fixture
def wrapper():
    return PrefetchDataPreprocessor(**IMG)


def begin(preprocessor, raw):
    """Take a batch through the loader thread's part of its road, and hand it out."""
    ticket, preparation = Ticket(raw, 'train'), preprocessor.preparation('train')
    thread = threading.Thread(target=preparation.begin, args=[ticket], name='mmprefetch-loader')
    thread.start()
    thread.join()
    preprocessor.expect(ticket)
    return ticket


def test_result_of_begun_work_is_the_stock_result(wrapper):
    raw = batch()
    expected = ImgDataPreprocessor(**IMG)(copy.deepcopy(raw), True)
    begin(wrapper, raw)
    assert toys.same(wrapper(raw, True), expected)
    assert toys.same(wrapper(raw, True), expected)  # the second call is an ordinary one


def expected_of(raw):
    return ImgDataPreprocessor(**IMG)(raw, True)


def test_the_object_itself_is_the_ticket(wrapper):
    raw = batch()
    begin(wrapper, raw)
    ticket = wrapper.runtime.due[0]
    other = copy.copy(raw)
    assert toys.same(wrapper(other, True), expected_of(raw)) and not ticket.claimed
    assert toys.same(wrapper(raw, True), expected_of(raw)) and ticket.claimed
    assert ticket.work is None


def test_a_batch_may_come_twice(wrapper):
    raw = batch()
    for _ in range(2):
        begin(wrapper, raw)
    first, second = wrapper(raw, True), wrapper(raw, True)
    assert toys.same(first, second) and first is not second


def test_a_ticket_that_was_withdrawn_is_not_found(wrapper):
    raw = batch()
    ticket = begin(wrapper, raw)
    wrapper.withdraw(ticket)
    assert toys.same(wrapper(raw), expected_of(raw))
    assert not ticket.claimed


def test_four_and_nineteen_channels():
    for channels in (4, 19):
        mean = [float(index) for index in range(channels)]
        std = [1.5 + index for index in range(channels)]
        image = torch.randint(0, 256, (channels, 8, 8), dtype=torch.uint8)
        wrapper = PrefetchDataPreprocessor(mean=mean, std=std)
        expected = (image.float() - torch.tensor(mean).view(-1, 1, 1)) / torch.tensor(std).view(
            -1, 1, 1
        )
        assert torch.equal(wrapper(dict(inputs=[image]))['inputs'][0], expected)
        assert torch.equal(wrapper(dict(inputs=image[None]))['inputs'][0], expected)


def test_three_values_on_four_channels_name_both_numbers():
    wrapper = PrefetchDataPreprocessor(mean=[1.0] * 3, std=[1.0] * 3)
    with pytest.raises(ValueError, match=r'^data_preprocessor: mean: 3 values .*4 channels.*write'):
        wrapper(dict(inputs=[torch.zeros(4, 8, 8, dtype=torch.uint8)]))


def test_reversal_of_four_channels_drops_none():
    image = torch.arange(4, dtype=torch.uint8).view(4, 1, 1)
    out = PrefetchDataPreprocessor(bgr_to_rgb=True)(dict(inputs=[image]))['inputs']
    assert out.flatten().tolist() == [2.0, 1.0, 0.0, 3.0]


@pytest.mark.parametrize('key', ['bgr_to_rgb', 'rgb_to_bgr', 'to_rgb'])
def test_channel_order(key):
    pixel = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1)
    wrapper = PrefetchDataPreprocessor(mean=[1.0, 2.0, 3.0], std=[1.0] * 3, **{key: True})
    assert wrapper(dict(inputs=[pixel]))['inputs'].flatten().tolist() == [29.0, 18.0, 7.0]


def test_misspelt_channel_order():
    with pytest.raises(ValueError, match=r'bgr_to_rbg.*bgr_to_rgb'):
        PrefetchDataPreprocessor(bgr_to_rbg=True)


@pytest.mark.parametrize('dtype', [torch.uint8, torch.uint16, torch.float16, torch.float32])
@pytest.mark.parametrize('normalize', [False, True])
def test_sixteen_bit_and_float_images(dtype, normalize):
    top = 65535 if dtype is torch.uint16 else 255
    image = torch.from_numpy(np.linspace(0, top, 48).reshape(3, 4, 4)).to(dtype)
    mean, std = [1000.0, 20.5, 3.25], [58.395, 57.12, 57.375]
    wrapper = PrefetchDataPreprocessor(**(dict(mean=mean, std=std) if normalize else {}))
    out = wrapper(dict(inputs=[image]))['inputs'][0]
    expected = image.to(torch.float64)
    if normalize:
        expected = (expected - torch.tensor(mean).double().view(3, 1, 1)) / torch.tensor(
            std
        ).double().view(3, 1, 1)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), expected, rtol=1e-6, atol=1e-6)


Pair = namedtuple('Pair', 'a b')


def test_leaves_that_are_not_tensors():
    element = BaseDataElement(metainfo=dict(path='x', shape=(1, 2)))
    element.boxes = torch.rand(2, 4)
    element.name = 'name'
    raw = dict(
        text='a', raw=b'b', nothing=None, number=3, array=np.arange(3), pair=Pair(1, torch.ones(2)),
        empty=[], element=element, nested=[(1, 'x'), {'k': torch.zeros(0)}],
    )  # fmt: skip
    expected = BaseDataPreprocessor().cast_data(raw)
    wrapper = PrefetchDataPreprocessor(wraps='BaseDataPreprocessor')
    begin(wrapper, raw)
    out = wrapper(raw, True)
    assert toys.same(out, expected)
    assert out['array'] is raw['array']


def test_errors_come_where_the_batch_is_due(wrapper):
    raw = dict(inputs='no image')
    begin(wrapper, raw)
    with pytest.raises(TypeError, match='no image'):
        wrapper(raw, True)


# -- standing in for the wrapped module ------------------------------------------------------


class Stateful(BaseDataPreprocessor):
    """Has everything a module can have."""

    def __init__(self, start=1.0):
        super().__init__()
        self.register_buffer('kept', torch.tensor(start))
        self.register_buffer('dropped', torch.tensor(start), persistent=False)
        self.weight = nn.Parameter(torch.tensor([start]))
        self.inner = nn.BatchNorm1d(2)
        self.augment = None


def test_tables_are_shared():
    module = Stateful()
    model = nn.Module()
    model.pre = module
    names = [list(dict(getattr(model, kind)())) for kind in
             ('named_parameters', 'named_buffers', 'state_dict')]  # fmt: skip
    model.pre = PrefetchDataPreprocessor.around(module)
    assert names == [list(dict(getattr(model, kind)())) for kind in
                     ('named_parameters', 'named_buffers', 'state_dict')]  # fmt: skip
    model.double()
    assert module.kept.dtype == torch.float64 and module.weight.dtype == torch.float64
    model.load_state_dict({**model.state_dict(), 'pre.kept': torch.tensor(7.0)})
    assert module.kept.item() == 7.0
    model.eval()
    assert not module.training and not module.inner.training


def test_attributes_reach_the_wrapped_module():
    module = Stateful()
    wrapper = PrefetchDataPreprocessor.around(module)
    wrapper.augment = 'mixup'
    assert module.augment == 'mixup' and wrapper.augment == 'mixup'
    wrapper.kept = torch.tensor(3.0)
    assert module.kept.item() == 3.0
    del wrapper.augment
    assert not hasattr(module, 'augment')
    with pytest.raises(AttributeError, match='nonsense'):
        _ = wrapper.nonsense


def test_outside_of_any_loop_the_flag_tells_the_split(wrapper):
    raw = batch()
    for split, value in (('train', 1.0), ('val', 2.0), ('test', 3.0)):
        wrapper.bind(split, ImgDataPreprocessor(mean=[value], std=[1.0]))
        wrapper.bindings[split] = None
    mean = [raw['inputs'][0].float()[0, 0, 0] - wrapper(raw, training)['inputs'][0, 0, 0, 0]
            for training in (True, False)]  # fmt: skip
    assert mean == [1.0, 3.0]
    wrapper.split = 'val'
    assert raw['inputs'][0].float()[0, 0, 0] - wrapper(raw)['inputs'][0, 0, 0, 0] == 2.0


def test_a_field_that_changes_makes_begun_work_out_of_date(wrapper):
    raw = batch()
    begin(wrapper, raw)
    wrapper.pad_value = 9
    assert toys.same(wrapper(raw, True), ImgDataPreprocessor(**IMG, pad_value=9)(raw, True))


@pytest.mark.parametrize('clone', [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_leave_streams_and_begun_work_behind(wrapper, clone):
    raw = batch()
    wrapper.bind('val', ImgDataPreprocessor(mean=[5.0], std=[2.0]))
    begin(wrapper, raw)
    twin = clone(wrapper)
    assert twin.runtime.due == []
    assert toys.same(twin(raw), ImgDataPreprocessor(**IMG)(raw))
    twin.split = 'val'
    assert toys.same(twin(raw), ImgDataPreprocessor(mean=[5.0], std=[2.0])(raw))
    twin.split = None
    twin.mean.zero_()
    assert twin.mean.sum() == 0 and twin.wrapped.mean.sum() == 0 and wrapper.mean.sum() != 0


def test_device_is_where_the_tensors_are():
    wrapper = PrefetchDataPreprocessor(**IMG)
    assert wrapper.device == torch.device('cpu')
    wrapper._buffers['mean'] = wrapper.mean.to('meta')  # as a wrapper of models does it
    assert wrapper.device == torch.device('meta')
    bare = PrefetchDataPreprocessor(wraps='BaseDataPreprocessor')
    bare._device = torch.device('meta')
    assert bare.device == torch.device('meta') == bare.wrapped.device


def test_any_module_can_be_wrapped():
    class Plain(nn.Module):
        def forward(self, data, training=False):
            data['seen'] = training
            return data

    wrapper = PrefetchDataPreprocessor.around(Plain())
    raw = dict(inputs=torch.ones(1))
    begin(wrapper, raw)
    assert 'seen' not in raw
    assert wrapper(raw, True) is raw and raw['seen'] is True


@MODELS.register_module(force=True)
class Slow(BaseDataPreprocessor):
    def forward(self, data, training=False):
        self.threads = [*getattr(self, 'threads', []), threading.current_thread().name]
        data = self.cast_data(data)
        time.sleep(0.01)
        scale = 2.0 if torch.is_grad_enabled() else 3.0
        scale += 10 * torch.is_autocast_enabled('cpu')
        return dict(inputs=[image * scale for image in data['inputs']])


def test_an_unknown_preprocessor_runs_when_the_batch_is_due():
    wrapper = PrefetchDataPreprocessor(wraps='Slow')
    raw = batch()
    begin(wrapper, raw)
    wrapper(raw, True)
    assert wrapper.threads == ['MainThread']


def test_prefetch_safe_lets_forward_run_ahead_under_the_modes_of_the_model():
    wrapper = PrefetchDataPreprocessor(wraps='Slow', prefetch_safe=True)
    scales = []
    for _ in range(3):
        raw = dict(inputs=[torch.ones(1)])
        begin(wrapper, raw)
        with torch.no_grad(), torch.autocast('cpu', torch.bfloat16):
            scales.append(wrapper(raw, True)['inputs'][0].item())
    assert scales == [13.0] * 3
    # Nobody knew the model's modes yet when the first was begun: it was done again.
    assert wrapper.threads == ['MainThread', *['mmprefetch-loader'] * 2]


@pytest.mark.parametrize(
    'change',
    [
        lambda p: p.mean.add_(7),
        lambda p: setattr(p.mean, 'data', p.mean.data + 7),
        lambda p: [buffer.mul_(2) for buffer in p.buffers()],
        lambda p: p._buffers.__setitem__('mean', p.mean + 7),
        lambda p: setattr(p.wrapped, 'pad_size_divisor', 16),
    ],
)
def test_a_field_changed_behind_the_wrappers_back(wrapper, change):
    raw = batch()
    begin(wrapper, raw)
    change(wrapper)
    assert toys.same(wrapper(raw, True), wrapper.wrapped(raw, True))


def test_a_field_that_changes_while_work_is_begun(wrapper, monkeypatch):
    raw, inner = batch(), Preparation._begin

    def slow(self, *args):
        made = inner(self, *args)
        wrapper.pad_value = 9  # the other thread's doing
        return made

    monkeypatch.setattr(Preparation, '_begin', slow)
    begin(wrapper, raw)
    assert toys.same(wrapper(raw, True), ImgDataPreprocessor(**IMG, pad_value=9)(raw, True))


def test_a_replaced_forward_counts(wrapper):
    raw = batch()
    begin(wrapper, raw)
    wrapper.forward = lambda data, training=False: 'mine'
    assert wrapper(raw, True) == 'mine'
    begin(wrapper, raw)
    del wrapper.forward
    assert toys.same(wrapper(raw, True), ImgDataPreprocessor(**IMG)(raw, True))


class InPlace(BaseDataPreprocessor):
    def forward(self, data, training=False):
        data = self.cast_data(data)
        return dict(inputs=[image.sub_(1).mul_(2) for image in data['inputs']])


def test_a_safe_forward_may_work_in_place():
    wrapper = PrefetchDataPreprocessor.around(InPlace())
    wrapper.prefetch_safe = True
    for stale in (False, True):
        raw = dict(inputs=[torch.full((2,), 5.0)])
        begin(wrapper, raw)
        if stale:
            wrapper.note = object()
        assert wrapper(raw, True)['inputs'][0].tolist() == [8.0, 8.0]


class Keeping(BaseDataPreprocessor):
    """Keeps what it has seen last, for the model to read."""

    def forward(self, data, training=False):
        self.last = data['inputs'][0].item()
        self.seen = [*getattr(self, 'seen', []), self.last]
        return self.cast_data(data)


def test_state_that_a_safe_forward_keeps_is_that_of_the_batch_in_use():
    wrapper = PrefetchDataPreprocessor.around(Keeping())
    wrapper.prefetch_safe = True
    wrapper(dict(inputs=[torch.tensor(0)]), True)
    raws = [dict(inputs=[torch.tensor(number)]) for number in (1, 2, 3)]
    tickets = [begin(wrapper, raw) for raw in raws]
    for number, raw in enumerate(raws, 1):
        assert wrapper.last == number - 1
        wrapper(raw, True)
        assert wrapper.last == number
    assert all(ticket.claimed for ticket in tickets)


class Counting(BaseDataPreprocessor):
    """Keeps a buffer of the batches that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer('last', torch.zeros(()))

    def forward(self, data, training=False):
        self.last = data['inputs'][0].float()
        return self.cast_data(data)


def test_a_buffer_that_a_safe_forward_sets_is_that_of_the_batch_in_use():
    module = Counting()
    wrapper = PrefetchDataPreprocessor.around(module)
    wrapper.prefetch_safe = True
    wrapper(dict(inputs=[torch.tensor(0)]), True)
    raws = [dict(inputs=[torch.tensor(number)]) for number in (1, 2)]
    for raw in raws:
        begin(wrapper, raw)
    for number, raw in enumerate(raws, 1):
        assert wrapper.last == number - 1 == module.last
        wrapper(raw, True)
        assert wrapper.last == number == module.last == wrapper.state_dict()['last']


class TrainsByDefault(BaseDataPreprocessor):
    def forward(self, data, training=True):
        return dict(inputs=[image + training for image in data['inputs']])


class KnowsNoTraining(nn.Module):
    def forward(self, data):
        return dict(inputs=[image * 2 for image in data['inputs']])


@pytest.mark.parametrize(('cls', 'expected'), [(TrainsByDefault, 4), (KnowsNoTraining, 6)])
def test_a_call_without_training_means_what_it_means_to_the_class(cls, expected):
    wrapper = PrefetchDataPreprocessor.around(cls())
    raw = dict(inputs=[torch.tensor(3)])
    assert wrapper(raw)['inputs'][0] == expected
    begin(wrapper, raw)
    assert wrapper(raw)['inputs'][0] == expected


class FollowsTheMode(BaseDataPreprocessor):
    def forward(self, data, training=False):
        return dict(inputs=[image * (1 + self.training) for image in data['inputs']])


def test_a_safe_forward_that_was_begun_in_another_mode_is_done_again():
    wrapper = PrefetchDataPreprocessor.around(FollowsTheMode())
    wrapper.prefetch_safe = True
    wrapper(dict(inputs=[torch.tensor(0)]), True)
    raw = dict(inputs=[torch.tensor(3)])
    wrapper.eval()
    begin(wrapper, raw)
    wrapper.train()
    assert wrapper(raw, True)['inputs'][0] == 6


def test_a_safe_forward_with_parameters_that_are_trained_does_not_run_ahead():
    class Learned(Stateful):
        def forward(self, data, training=False):
            return dict(inputs=[image * self.weight for image in data['inputs']])

    module = Learned()
    wrapper = PrefetchDataPreprocessor.around(module)
    wrapper.prefetch_safe = True
    assert not wrapper.effective('train')[1].needs_modes
    module.requires_grad_(False)
    assert wrapper.effective('train')[1].needs_modes
