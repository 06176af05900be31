# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass against mmengine's own preprocessor, and against plain formulas elsewhere."""

import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.model import ImgDataPreprocessor
from mmengine.model.utils import stack_batch

from mmprefetch import ops
from mmprefetch.ops import normalize_batch, reversal
from mmprefetch.ops.plan import plan_batch
from mmprefetch.ops.reference import normalize as reference

DTYPES = (
    *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
    *(torch.float16, torch.bfloat16, torch.float32, torch.float64),
)
MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)


@pytest.fixture(scope='module', autouse=True)
def all_compiled():
    for dtype in DTYPES:
        ops.prepare(dtype)


def pixels(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.rand(shape, generator=generator) * 300 - 20).to(dtype)
    low, high = max(torch.iinfo(dtype).min, -70000), min(torch.iinfo(dtype).max, 70000)
    return torch.randint(low, high + 1, shape, generator=generator).to(dtype)


def scattered(tensor, how):
    """The same values in memory that is not contiguous."""
    if how == 'transposed':
        return tensor.mT.contiguous().mT
    if how == 'channels last':
        return tensor.movedim(0, -1).contiguous().movedim(-1, 0)
    if how == 'cut out':
        wide = torch.zeros((*tensor.shape[:-1], tensor.shape[-1] + 3), dtype=tensor.dtype)
        wide[..., 1:-2] = tensor
        return wide[..., 1:-2]
    return tensor


def naive(images, mean, std, order, height, width, pad_value):
    """Each sample by the formula, in float32; mean and std: (N, C)."""
    out = torch.full((len(images), images[0].shape[0], height, width), float(pad_value))
    for index, image in enumerate(images):
        image = torch.stack([image[channel] for channel in order]).float()
        image = (image - mean[index][:, None, None]) / std[index][:, None, None]
        out[index, :, : image.shape[1], : image.shape[2]] = image
    return out


sizes = st.lists(st.tuples(st.integers(1, 19), st.integers(1, 19)), min_size=1, max_size=5)
layouts = st.sampled_from(('contiguous', 'transposed', 'channels last', 'cut out'))


@settings(deadline=None, max_examples=150)
@given(
    shapes=sizes,
    dtype=st.sampled_from(DTYPES),
    layout=layouts,
    swap=st.booleans(),
    constants=st.sampled_from((None, (MEAN, STD), ((127,), (60,)), (MEAN, (2,)))),
    divisor=st.integers(1, 33),
    pad_value=st.sampled_from((0, 114, -1.7)),
)
def test_list_equals_mmengine(shapes, dtype, layout, swap, constants, divisor, pad_value):
    images = [scattered(pixels((3, *s), dtype, i), layout) for i, s in enumerate(shapes)]
    mean, std = constants or (None, None)
    stock = ImgDataPreprocessor(mean, std, divisor, pad_value, bgr_to_rgb=swap)
    if dtype == torch.uint16 and swap:
        # torch cannot index 16-bit unsigned tensors with a list; the float values are the same.
        expected = stock({'inputs': [image.float() for image in images]})['inputs']
    else:
        expected = stock({'inputs': images})['inputs']
    got = normalize_batch(
        images,
        getattr(stock, 'mean', None),
        getattr(stock, 'std', None),
        channel_order=reversal(3) if swap else None,
        size_divisor=divisor,
        pad_value=pad_value,
    )
    assert got.dtype == expected.dtype == torch.float32
    assert torch.equal(got, expected)


@settings(deadline=None, max_examples=80)
@given(
    shape=st.tuples(st.integers(1, 5), st.just(3), st.integers(1, 19), st.integers(1, 19)),
    dtype=st.sampled_from(tuple(d for d in DTYPES if d != torch.uint16)),
    swap=st.booleans(),
    normalized=st.booleans(),
    divisor=st.integers(1, 33),
)
def test_tensor_equals_mmengine(shape, dtype, swap, normalized, divisor):
    images = pixels(shape, dtype)
    mean, std = (MEAN, STD) if normalized else (None, None)
    stock = ImgDataPreprocessor(mean, std, divisor, 7, rgb_to_bgr=swap)
    got = normalize_batch(
        images,
        getattr(stock, 'mean', None),
        getattr(stock, 'std', None),
        channel_order=reversal(3) if swap else None,
        size_divisor=divisor,
        pad_value=7,
    )
    assert torch.equal(got, stock({'inputs': images})['inputs'])


@settings(deadline=None, max_examples=150)
@given(data=st.data(), channels=st.sampled_from((1, 3, 4, 19)), shapes=sizes, layout=layouts)
def test_any_channels_own_constants(data, channels, shapes, layout):
    dtype = data.draw(st.sampled_from(DTYPES))
    images = [scattered(pixels((channels, *s), dtype, i), layout) for i, s in enumerate(shapes)]
    order = data.draw(st.permutations(range(channels)))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    rows = len(images) if data.draw(st.booleans()) else 1
    columns = channels if data.draw(st.booleans()) else 1
    mean = torch.rand(rows, columns, generator=generator) * 100
    std = torch.rand(rows, columns, generator=generator) * 50 + 1
    fixed = data.draw(st.sampled_from((None, (19, 23))))
    height, width = fixed or (max(s[0] for s in shapes), max(s[1] for s in shapes))
    got = normalize_batch(
        images,
        mean if rows > 1 else mean[0],
        std if rows > 1 else std[0],
        channel_order=order,
        size=fixed,
        pad_value=3,
    )
    full = (len(images), channels)
    expected = naive(images, mean.expand(full), std.expand(full), order, height, width, 3)
    assert got.is_contiguous() and torch.equal(got, expected)


@settings(deadline=None, max_examples=60)
@given(
    shapes=st.lists(st.tuples(*(st.integers(1, 7),) * 3), min_size=1, max_size=3),
    divisor=st.integers(1, 4),
    own=st.booleans(),
)
def test_videos_equal_stack_batch(shapes, divisor, own):
    videos = [pixels((3, *s), torch.uint8, i) for i, s in enumerate(shapes)]
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    if own:
        mean, std = (torch.stack([c + i for i in range(len(videos))]) for c in (mean, std))
    rows = [(mean[i], std[i]) if own else (mean, std) for i in range(len(videos))]
    done = [
        (video.flip(0).float() - m.view(3, 1, 1, 1)) / s.view(3, 1, 1, 1)
        for video, (m, s) in zip(videos, rows, strict=True)
    ]
    got = normalize_batch(
        videos, mean, std, channel_order=reversal(3), size_divisor=divisor, pad_value=5
    )
    assert torch.equal(got, stack_batch(done, divisor, 5))


@pytest.mark.parametrize('layout', [None, torch.channels_last_3d])
def test_video_tensor_is_padded_in_height_and_width_alone(layout):
    videos = pixels((2, 3, 5, 6, 7), torch.uint8)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    out = layout and torch.empty((2, 3, 5, 8, 8), memory_format=layout)
    got = normalize_batch(videos, mean, std, size_divisor=4, out=out)
    assert got.shape == (2, 3, 5, 8, 8) and (got is out or got.is_contiguous())
    expected = (videos.float() - mean.view(3, 1, 1, 1)) / std.view(3, 1, 1, 1)
    assert torch.equal(got[..., :6, :7], expected)
    assert not got[..., 6:, :].any() and not got[..., 7:].any()


@pytest.mark.parametrize('dtype', [torch.uint8, torch.uint16, torch.float16, torch.float32])
@pytest.mark.parametrize('normalized', [False, True])
def test_within_float32_rounding_of_float64(dtype, normalized):
    image = pixels((3, 8, 8), dtype)
    if dtype == torch.uint16:
        image = torch.full_like(image, 65535)
    mean, std = (torch.tensor(MEAN), torch.tensor(STD)) if normalized else (None, None)
    got = normalize_batch([image], mean, std)[0]
    exact = image.double()
    if normalized:
        exact = (exact - mean.double().view(3, 1, 1)) / std.double().view(3, 1, 1)
    torch.testing.assert_close(got.double(), exact, rtol=2**-22, atol=2**-18)


def test_division_by_zero_is_that_of_torch():
    images = torch.tensor([0, 9], dtype=torch.uint8).view(1, 1, 1, 2)
    got = normalize_batch(images, torch.zeros(1), torch.zeros(1)).flatten()
    assert got[0].isnan() and got[1] == float('inf')


def test_channel_reversal_by_hand():
    pixel = torch.tensor([10, 20, 30], dtype=torch.uint8).view(3, 1, 1)
    got = normalize_batch(
        [pixel], torch.tensor([1.0, 2, 3]), torch.ones(3), channel_order=reversal(3)
    )
    assert got.flatten().tolist() == [29, 18, 7]


def test_reversal_keeps_every_channel():
    assert [reversal(c) for c in (1, 2, 3, 5)] == [None, None, (2, 1, 0), (2, 1, 0, 3, 4)]


@pytest.mark.parametrize('shape', [(3,), (3, 1, 1), (2, 3)])
def test_shapes_of_constants(shape):
    images = pixels((2, 3, 5, 5), torch.uint8)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    expected = (images.float() - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    shaped = [c.repeat(2, 1) if shape == (2, 3) else c.reshape(shape) for c in (mean, std)]
    got = normalize_batch(images, *shaped)
    assert torch.equal(got, expected)


@pytest.mark.parametrize('layout', [torch.contiguous_format, torch.channels_last])
def test_out_is_written_and_returned(layout):
    images = [pixels((3, 5, 7), torch.uint8), pixels((3, 9, 3), torch.uint8)]
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    out = torch.full((2, 3, 9, 7), float('nan')).contiguous(memory_format=layout)
    got = normalize_batch(images, mean, std, pad_value=2, out=out)
    assert got is out
    assert torch.equal(out, normalize_batch(images, mean, std, pad_value=2))


def test_images_that_share_one_buffer_are_left_as_they_are():
    buffer = pixels((400,), torch.uint8)
    kept = buffer.clone()
    images = [buffer[7 : 7 + 60].view(3, 4, 5), buffer[200:260].view(3, 4, 5)]
    got = normalize_batch(images, torch.tensor(MEAN), torch.tensor(STD))
    copies = [image.clone() for image in images]
    assert torch.equal(got, normalize_batch(copies, torch.tensor(MEAN), torch.tensor(STD)))
    assert torch.equal(buffer, kept)


@pytest.mark.parametrize('target', [(4, 4), (9, 4), (12, 12)])
def test_size_keeps_a_larger_image(target):
    images = [pixels((3, 9, 7), torch.uint8, i) for i in range(2)]
    got = normalize_batch(images, size=target, pad_value=1)
    height, width = max(9, target[0]), max(7, target[1])
    assert got.shape == (2, 3, height, width)
    assert torch.equal(got[:, :, :9, :7], torch.stack(images).float())
    assert (got[:, :, 9:] == 1).all() and (got[..., 7:] == 1).all()


def test_gradient_reaches_the_images():
    images = [torch.rand(3, 4, 5, requires_grad=True), torch.rand(3, 6, 2, requires_grad=True)]
    std = torch.tensor(STD)
    batch = normalize_batch(images, torch.tensor(MEAN), std, channel_order=reversal(3))
    batch.sum().backward()
    for image in images:
        expected = (1 / std).flip(0).view(3, 1, 1).expand_as(image)
        torch.testing.assert_close(image.grad, expected)


def test_same_values_from_threads_under_any_mode():
    images = [pixels((3, 40, 30 + i % 2), torch.uint8, i) for i in range(6)]
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    expected = reference(plan_batch(images, mean, std, (2, 1, 0), 8, None, 1))
    kept, errors = [], []

    def work(mode):
        try:
            for _ in range(5):
                with mode():
                    kept.append(
                        normalize_batch(
                            images,
                            mean,
                            std,
                            channel_order=(2, 1, 0),
                            size_divisor=8,
                            pad_value=1,
                        )
                    )
        except Exception as error:
            errors.append(error)

    modes = (
        torch.enable_grad,
        torch.inference_mode,
        lambda: torch.autocast('cpu', dtype=torch.bfloat16),
    )
    threads = [threading.Thread(target=work, args=(mode,)) for mode in modes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(kept) == 15 and all(torch.equal(batch, expected) for batch in kept)


@pytest.mark.parametrize('stacked', [False, True])
@pytest.mark.parametrize('implementation', [ops._cpu, ops._reference])
def test_each_sample_in_its_own_order(monkeypatch, implementation, stacked):
    monkeypatch.setattr(ops, '_implementation', lambda images: implementation)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 5, 4), dtype=torch.uint8, generator=generator)
    orders = [None, (2, 1, 0), (2, 1, 0), (1, 0, 2), None, (0, 1, 2)]
    mean = torch.rand(6, 3, generator=generator)
    std = mean + 1
    given = images if stacked else list(images)
    batch = normalize_batch(given, mean, std, channel_order=orders)
    for index, order in enumerate(orders):
        one = normalize_batch(images[index : index + 1], mean[index], std[index],
                              channel_order=order)  # fmt: skip
        assert torch.equal(batch[index], one[0])


def test_number_of_orders():
    with pytest.raises(ValueError, match=r'channel_order: orders for 2 samples.* has 3'):
        normalize_batch(torch.zeros(3, 3, 2, 2), channel_order=[None, (2, 1, 0)])
