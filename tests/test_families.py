# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What a declaration says of a class, and what becomes of a class without one."""

import copy
import gc
import threading
import warnings
import weakref

import emulated
import pytest
import torch
import toys
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.registry import MODELS

from mmprefetch import PrefetchDataPreprocessor, ops
from mmprefetch.engine import Call, Ticket
from mmprefetch.engine import ticket as tickets
from mmprefetch.engine.mixed import SampleConstants
from mmprefetch.engine.streams import SideStream
from mmprefetch.families import (
    Family,
    FusedFamily,
    ImgFamily,
    StandInFamily,
    SuperFamily,
    cast,
    family_of,
    family_of_module,
    fused,
    passes,
    register_family,
    registry,
    with_samples,
)
from mmprefetch.families.mmdet import MultiBranchFamily
from mmprefetch.families.unfused import SAFE, TRANSFER

IMG = {key: value for key, value in toys.IMG.items() if key != 'type'}


@MODELS.register_module(force=True)
class Extends(ImgDataPreprocessor):
    """Calls mmengine's forward, does something pure, then something that draws."""

    def __init__(self, mix=None, **kwargs):
        super().__init__(**kwargs)
        self.mix = mix
        self.threads = []

    def forward(self, data, training=False):
        sizes = [tuple(image.shape[-2:]) for image in data['inputs']]
        data = super().forward(data, training)
        self.threads.append(threading.current_thread().name)
        for sample, size in zip(data['data_samples'], sizes, strict=True):
            sample.set_metainfo(dict(size=size, training=training))
            sample.double = sample.label * 2
        if training and self.mix is not None:
            data['inputs'] = self.mix(data['inputs'])
        return data


class ExtendsFamily(SuperFamily):
    augments = 'mix'


register_family(Extends, ExtendsFamily())


def noise(images):
    return images * torch.rand(len(images), 1, 1, 1)


@MODELS.register_module(force=True)
class Own(BaseDataPreprocessor):
    """Normalises by itself, and writes into the samples of the raw batch."""

    def __init__(self, mean, std, to_rgb=False):
        super().__init__()
        self.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), False)
        self.register_buffer('std', torch.tensor(std).view(-1, 1, 1), False)
        self._enable_normalize = True
        self.to_rgb = to_rgb

    def forward(self, data, training=False):
        images = self.cast_data(data['inputs'])
        if self.to_rgb:
            images = images.flip(1)
        images = images.float()
        if self._enable_normalize:
            images = (images - self.mean) / self.std
        for sample in data['data_samples']:
            sample.label = sample.label.to(self.device) + 1
            sample.set_metainfo(dict(seen=training))
        return dict(images=images, data_samples=data['data_samples'])


class OwnFamily(FusedFamily):
    off = dict(to_rgb=False, _enable_normalize=False)
    writes = True

    def pixels(self, preprocessor, data, training):
        return fused(preprocessor, data['inputs'], reverse=preprocessor.to_rgb)


register_family(Own, OwnFamily())


def batch(stacked=False, first=0):
    items = [toys.ToyImages(ragged=not stacked)[first + index] for index in range(3)]
    images = [item['inputs'] for item in items]
    return dict(
        inputs=torch.stack(images) if stacked else images,
        data_samples=[item['data_samples'] for item in items],
    )


@pytest.fixture
def counted(monkeypatch):
    """The dtypes of the batches that the fused pass was given."""
    given = []
    original = passes.normalize_batch

    def count(images, *args, **kwargs):
        given.append(images[0].dtype)
        return original(images, *args, **kwargs)

    monkeypatch.setattr(passes, 'normalize_batch', count)
    return given


def ahead(wrapper, raw, training=True):
    """Begin a batch in another thread, and hand it out."""
    wrapper.runtime.calls['train'] = Call(training)  # as the model asked for the batch before
    ticket = Ticket(raw, 'train')
    thread = threading.Thread(target=wrapper.preparation('train').begin, args=(ticket,))
    thread.start()
    thread.join()
    assert ticket.work is not None
    wrapper.expect(ticket)


# -- where the parts run ---------------------------------------------------------------------


def test_the_rest_of_a_known_class_runs_ahead(counted):
    raw, twin = batch(), batch()
    expected = Extends(**IMG)(raw, True)
    wrapper = PrefetchDataPreprocessor(wraps='Extends', **IMG)
    ahead(wrapper, twin)
    assert toys.same(wrapper(twin, True), expected)
    assert counted == [torch.uint8]
    assert len(wrapper.threads) == 1 and wrapper.threads[0] != threading.main_thread().name


def test_images_as_they_came_are_let_go_of_when_nothing_is_left_to_do():
    module = Extends(**IMG)
    data = cast(module, batch())
    image = weakref.ref(data['inputs'][0])
    begun = family_of(Extends).begin(module, data, True)
    del data
    gc.collect()
    assert image() is None
    assert begun['data_samples'][0].double is not None


def test_what_draws_runs_when_due():
    raw, twin = batch(), batch()
    torch.manual_seed(3)
    expected = [Extends(mix=noise, **IMG)(copy.deepcopy(raw), flag) for flag in (True, False)]
    wrapper = PrefetchDataPreprocessor(wraps='Extends', mix=noise, **IMG)
    torch.manual_seed(3)
    for flag, result in zip((True, False), expected, strict=True):
        raw = copy.deepcopy(twin)
        ahead(wrapper, raw, flag)
        assert toys.same(raw, twin)
        assert toys.same(wrapper(raw, flag), result)
    name = threading.main_thread().name
    assert [thread == name for thread in wrapper.threads] == [True, False]


def test_another_flag_than_expected_means_doing_it_again():
    raw = batch()
    wrapper = PrefetchDataPreprocessor(wraps='Extends', **IMG)
    ahead(wrapper, raw, False)
    samples = wrapper(raw, True)['data_samples']
    assert [sample.training for sample in samples] == [True] * 3


def test_what_the_flag_does_not_change_is_kept(counted):
    raw = batch()
    wrapper = PrefetchDataPreprocessor(**IMG)
    ahead(wrapper, raw, False)
    wrapper(raw, True)
    assert len(counted) == 1


def test_the_raw_batch_changes_when_due_as_the_class_changes_it(counted):
    fields = dict(mean=[120.0, 110.0, 100.0], std=[60.0, 50.0, 40.0], to_rgb=True)
    stock, raw = batch(stacked=True), batch(stacked=True)
    expected = Own(**fields)(stock, True)
    wrapper = PrefetchDataPreprocessor(wraps='Own', **fields)
    ahead(wrapper, raw)
    assert toys.same(raw, batch(stacked=True))
    result = wrapper(raw, True)
    assert result['data_samples'] is raw['data_samples']
    assert toys.same(result, expected) and toys.same(raw, stock)
    assert raw['data_samples'][0].metainfo['seen'] is True
    # Once more, at once: what was written is what the class finds.
    assert toys.same(wrapper(raw, True), Own(**fields)(stock, True)) and toys.same(raw, stock)
    assert counted == [torch.uint8] * 2


def test_input_that_the_pass_does_not_take_is_for_the_class(counted):
    def mixed():
        raw = batch()
        raw['inputs'][1] = raw['inputs'][1].float()
        return raw

    wrapper = PrefetchDataPreprocessor(wraps='Extends', **IMG)
    raw = mixed()
    ahead(wrapper, raw)
    assert toys.same(wrapper(raw, True), Extends(**IMG)(mixed(), True))
    assert toys.same(wrapper(raw, True), Extends(**IMG)(mixed(), True))
    assert counted == []


def test_a_class_whose_attributes_are_others_is_run_as_it_is(counted, monkeypatch):
    module = Extends(**IMG)
    del module.pad_value
    monkeypatch.setattr(Extends, 'forward', lambda self, data, training: 'of another version')
    wrapper = PrefetchDataPreprocessor.around(module)
    raw = batch()
    ahead(wrapper, raw)
    assert wrapper(raw, True) == wrapper(raw, True) == 'of another version'
    assert counted == []


@MODELS.register_module(force=True)
class Pads(BaseDataPreprocessor):
    """Pads images and maps in one place."""

    def __init__(self, augments=None):
        super().__init__()
        self._enable_normalize = False
        self.augments = augments

    def forward(self, data, training=False):
        data = self.cast_data(data)
        images = [image.float() for image in data['inputs']]
        height, width = (max(image.shape[dim] for image in images) for dim in (1, 2))
        padded = []
        for image, sample in zip(images, data['data_samples'], strict=True):
            pad = (0, width - image.shape[2], 0, height - image.shape[1])
            padded.append(torch.nn.functional.pad(image, pad))
            sample.map = torch.nn.functional.pad(torch.ones(image.shape[-2:]), pad, value=9)
        images = torch.stack(padded)
        if self.augments is not None:
            images = self.augments(images)
        return dict(inputs=images, data_samples=data['data_samples'])


class PadsFamily(StandInFamily):
    off = dict(_enable_normalize=False, cast_data=lambda data: data)
    augments = 'augments'

    def is_pure(self, preprocessor, training):
        return preprocessor.augments is None

    def pixels(self, preprocessor, data, training):
        return fused(preprocessor, data['inputs'], reverse=False)


register_family(Pads, PadsFamily())


@pytest.mark.parametrize('augments', [None, noise])
def test_images_without_channels_stand_in_for_the_pixels(counted, augments):
    raw = batch()
    torch.manual_seed(2)
    expected = Pads(augments)(batch(), True)
    torch.manual_seed(2)
    wrapper = PrefetchDataPreprocessor(wraps='Pads', augments=augments)
    ahead(wrapper, raw)
    assert toys.same(wrapper(raw, True), expected)
    assert counted == [torch.uint8]


@pytest.mark.parametrize('seed', range(3))
def test_on_an_accelerator_both_parts_are_in_order(monkeypatch, seed):
    raw = [batch(first=3 * number) for number in range(6)]
    stock = Extends(**IMG)
    expected = [stock(copy.deepcopy(one), True) for one in raw]
    device = emulated.Device(seed)
    monkeypatch.setattr(tickets, 'stream_for', lambda _: SideStream(device))
    # What an accelerator without Triton runs; the CPU's own version looks into the constants.
    monkeypatch.setattr(ops, '_implementation', lambda images: ops._reference)
    wrapper = PrefetchDataPreprocessor(wraps='Extends', mix=lambda images: images * 1, **IMG)
    results = []
    with device, warnings.catch_warnings():
        warnings.simplefilter('ignore')  # there is no pinned memory
        for index, one in enumerate(raw):
            # Alternately with its forward ahead, and with its forward when due.
            training = bool(index % 2)
            ahead(wrapper, one, training)
            out = wrapper(one, training)
            doubles = torch.stack([sample.double for sample in out['data_samples']])
            results.append((out['inputs'] + 0, doubles))
    device.synchronize()
    for (images, doubles), right in zip(results, expected, strict=True):
        assert torch.equal(images, right['inputs'])
        assert doubles.tolist() == [sample.double.item() for sample in right['data_samples']]
    assert emulated.races(device) == []


# -- samples with constants of their own -----------------------------------------------------------


def constants(count, channels=3):
    values = torch.arange(2.0 * count * channels).view(2, count, channels) + 1
    return SampleConstants(values, [bool(index % 2) for index in range(count)])


def without_a_field(module, raw):
    del module.pad_value


@pytest.mark.parametrize(
    'change',
    [
        lambda module, raw: list(raw.items()),
        lambda module, raw: dict(images=raw['inputs'], data_samples=raw['data_samples']),
        lambda module, raw: dict(raw, inputs=[raw['inputs'][0].float(), *raw['inputs'][1:]]),
        lambda module, raw: dict(raw, inputs=raw['inputs'][1:]),
        without_a_field,
    ],
)
def test_no_sample_gets_the_constants_of_another(counted, change):
    wrapper = PrefetchDataPreprocessor(wraps='Extends', **IMG)
    raw = batch()
    raw = change(wrapper.wrapped, raw) or raw
    for work_ahead in (True, False):
        ticket = Ticket(raw, 'train', samples=constants(3))
        if work_ahead:
            wrapper.preparation('train').begin(ticket)
        wrapper.expect(ticket)
        with pytest.raises(
            ValueError, match=r'differ in mean, std or channel order.* of 3 samples'
        ):
            wrapper(raw, True)
        wrapper.withdraw(ticket)
    assert counted == [] and wrapper.threads == []


@pytest.mark.parametrize(('drops', 'order'), [(False, [0, 1, 2, 3]), (True, [2, 1, 0, 3])])
def test_which_channels_of_four_a_sample_has_reversed(drops, order):
    module = PrefetchDataPreprocessor().wrapped
    images = torch.rand(2, 4, 3, 3)
    made = fused(with_samples(module, constants(2, 4)), images, reverse=False, drops=drops)
    for index, channels in enumerate(([0, 1, 2, 3], order)):
        mean, std = constants(2, 4).values[:, index, :, None, None]
        assert torch.equal(made[index], (images[index, channels] - mean) / std)


# -- which class is declared -----------------------------------------------------------------


def test_a_subclass_inherits_a_declaration_if_it_overrides_nothing():
    family = family_of(ImgDataPreprocessor)
    made_otherwise = type('Sub', (ImgDataPreprocessor,), dict(__init__=lambda self: None, own=1))
    assert family_of(made_otherwise) is family
    assert family_of(type('SubSub', (made_otherwise,), {})) is family
    for name in ('forward', 'cast_data', 'device', '__call__'):
        assert family_of(type('Sub', (ImgDataPreprocessor,), {name: None})) is TRANSFER
    mixin = type('Mixin', (), dict(cast_data=None))
    assert family_of(type('Sub', (ImgDataPreprocessor, mixin), {})) is TRANSFER
    assert family_of(type('Sub', (mixin, ImgDataPreprocessor), {})) is TRANSFER


def test_a_name_holds_for_its_package_only():
    class Named(BaseDataPreprocessor):
        def forward(self, data, training=False):
            return data

    assert family_of(Named) is TRANSFER
    family = ImgFamily()
    register_family('Named', family, package='elsewhere')
    assert family_of(Named) is TRANSFER
    register_family('Named', family, package=Named.__module__.split('.')[0])
    assert family_of(Named) is family
    with pytest.raises(ValueError, match="package='mmdet'"):
        register_family('Named', family)


def test_a_module_that_somebody_has_put_hands_on_is_called_as_it_is():
    def hooked(module):
        module.register_forward_hook(lambda *args: None)

    def hooked_before(module):
        module.register_forward_pre_hook(lambda *args: None)

    def given_a_method(module):
        module.cast_data = lambda data: data

    def given_a_field(module):
        module.pad_value, module.other = 3, len

    for put, family in ((hooked, TRANSFER), (hooked_before, TRANSFER), (given_a_method, TRANSFER),
                        (given_a_field, family_of(ImgDataPreprocessor))):  # fmt: skip
        module = ImgDataPreprocessor()
        assert family_of_module(module) is family_of(ImgDataPreprocessor)
        put(module)
        assert family_of_module(module) is family_of_module(module, safe=True) is family


def test_what_the_user_says_counts_for_an_unknown_class_only():
    assert family_of_module(toys.RandomPreprocessor()) is TRANSFER
    assert family_of_module(toys.RandomPreprocessor(), safe=True) is SAFE
    known = family_of(ImgDataPreprocessor)
    assert family_of_module(ImgDataPreprocessor(), safe=True) is known


@pytest.mark.parametrize('kind', ['unknown', 'known', 'safe'])
def test_one_line_says_that_a_class_is_not_fused(monkeypatch, kind):
    said = []
    monkeypatch.setattr(registry, 'print_log', lambda text, **kwargs: said.append(text))
    base = ImgDataPreprocessor if kind == 'known' else toys.RandomPreprocessor
    cls = type('Fresh', (base,), {})
    for _ in range(2):
        if kind == 'safe':
            PrefetchDataPreprocessor(wraps=cls, prefetch_safe=True)
        else:
            PrefetchDataPreprocessor(wraps=cls)
    assert len(said) == (kind == 'unknown')
    assert all('Fresh is not fused' in text for text in said)


def test_fields_reach_an_inner_preprocessor():
    assert Family.inner_field is None
    assert MultiBranchFamily.inner_field == 'data_preprocessor'


# -- what is said of constants ---------------------------------------------------------------


@pytest.mark.parametrize('wraps', ['ImgDataPreprocessor', 'Own', 'Extends'])
@pytest.mark.parametrize('zero', [0, 0.0, 1e-60])
def test_a_std_of_zero_is_found_when_the_preprocessor_is_built(wraps, zero):
    with pytest.raises(ValueError, match=r'^model\.data_preprocessor: std=.* a zero.*write 1'):
        PrefetchDataPreprocessor(wraps=wraps, mean=[1.0, 2.0, 3.0], std=[1.0, zero, 1.0])


def test_a_std_of_zero_counts_as_ever_where_only_the_loop_was_switched():
    fields = dict(mean=[1.0, 2.0, 3.0], std=[1.0, 0.0, 1.0])
    wrapper = PrefetchDataPreprocessor.around(ImgDataPreprocessor(**fields), fields)
    raw = dict(inputs=[torch.full((3, 2, 2), 2.5)])
    assert wrapper(raw)['inputs'][0, :, 0, 0].tolist() == [1.5, float('inf'), -0.5]


@pytest.mark.parametrize(
    ('mean', 'dtype', 'count'),
    [
        ([0.5, 0.4, 0.3], torch.uint8, 1),
        ([0.5, 0.4, 0.3], torch.float32, 0),
        ([0.0, 0.0, 0.0], torch.uint8, 0),
        ([0.5, 120.0, 1.0], torch.uint8, 0),
        ([0.5, 0.4, 0.3, 0.2], torch.uint8, 1),
    ],
)
def test_a_mean_within_one_beside_whole_numbers(mean, dtype, count):
    wrapper = PrefetchDataPreprocessor(mean=mean, std=[0.2] * len(mean))
    raw = dict(inputs=[torch.ones(len(mean), 2, 2, dtype=dtype)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter('always')
        for _ in range(3):
            wrapper(raw)
    assert len(caught) == count
    said = f'mean {mean} lies in 0..1 but the images are {dtype}; write'
    assert all(said in str(warning.message) for warning in caught)


# -- the transfer ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    'inputs',
    [
        [torch.ones(3, 2, 2), torch.ones(3, 4, 2)],
        (torch.ones(3, 2, 2), torch.ones(3, 4, 2)),
        torch.ones(2, 3, 2, 2),
        [],
        [torch.ones(1), None, 'text'],
        dict(a=[torch.ones(1)]),
    ],
)
def test_cast_does_what_cast_data_does(inputs):
    preprocessor = BaseDataPreprocessor()
    raw = dict(first=1, inputs=inputs, data_samples=[toys.ToyImages()[0]['data_samples']])
    made = cast(preprocessor, raw)
    assert toys.same(made, preprocessor.cast_data(raw)) and list(made) == list(raw)
    assert made is not raw and (made['inputs'] is not inputs or isinstance(inputs, torch.Tensor))
    assert cast(preprocessor, inputs) is not None


# -- layout, order, messages -----------------------------------------------------------------------


def stacked(shape=(2, 3, 6, 7), layout=torch.channels_last, dtype=torch.uint8):
    images = torch.empty(shape, dtype=dtype, memory_format=layout)
    return images.copy_(torch.randint(0, 256, shape))


@pytest.mark.parametrize('options', [{}, dict(bgr_to_rgb=True)])
@pytest.mark.parametrize(
    'images',
    [
        stacked(),
        stacked((2, 1, 6, 7)),
        stacked((2, 3, 1, 1)),
        stacked(layout=torch.contiguous_format),
        stacked((2, 3, 7, 7)).transpose(2, 3),
        stacked(layout=torch.contiguous_format)[:, :, ::2],
        list(stacked()),
    ],
    ids=range(7),
)
def test_results_have_the_strides_of_the_class(images, options):
    if images[0].shape[0] == 1:
        options = {}  # the class cannot reverse one channel
    fields = dict(mean=[127.0], std=[60.0], **options)
    stock = ImgDataPreprocessor(**fields)
    expected = stock(dict(inputs=images), True)['inputs']
    wrapper = PrefetchDataPreprocessor.around(ImgDataPreprocessor(**fields), fields)
    raw = dict(inputs=images)
    at_once = wrapper(raw, True)['inputs']
    ahead(wrapper, raw)
    begun = wrapper(raw, True)['inputs']
    for made in (at_once, begun):
        assert torch.equal(made, expected) and made.stride() == expected.stride()


@pytest.mark.parametrize('raw', [dict(inputs=1, data_samples=2), dict(data_samples=2, inputs=1),
                                 dict(inputs=1), dict(extra=3, inputs=1)])  # fmt: skip
def test_the_keys_come_in_the_order_of_the_class(raw):
    raw = {**raw, 'inputs': [torch.zeros(3, 4, 4)]}
    wrapper = PrefetchDataPreprocessor.around(ImgDataPreprocessor(), {})
    assert list(wrapper(raw)) == list(ImgDataPreprocessor()(raw))


@pytest.mark.parametrize(
    'images',
    [
        [torch.zeros(3, 4, 4), torch.zeros(1, 4, 4)],
        [torch.zeros(1, 4, 4)],
        [torch.zeros(4, 4)],
    ],
)
def test_an_error_of_the_class_is_the_one_that_is_raised(images):
    fields = dict(mean=[1.0, 2.0, 3.0], std=[1.0, 2.0, 3.0])
    stock = ImgDataPreprocessor(**fields)
    wrapper = PrefetchDataPreprocessor.around(ImgDataPreprocessor(**fields), fields)
    raw = dict(inputs=images)
    with pytest.raises(AssertionError) as expected:
        stock(raw)
    with pytest.raises(AssertionError) as at_once:
        wrapper(raw)
    ahead(wrapper, raw)
    with pytest.raises(AssertionError) as begun:
        wrapper(raw, True)
    assert 'the input tensor should in shape of (3, H, W)' in str(expected.value)
    assert str(at_once.value) == str(begun.value) == str(expected.value)
