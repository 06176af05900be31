# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The Triton kernel on CPU tensors, in Triton's interpreter, against the plain reference."""

import os
import subprocess
import sys
from importlib.util import find_spec
from unittest import mock

import pytest
import torch

from mmprefetch import ops

needs_triton = pytest.mark.skipif(find_spec('triton') is None, reason='triton is not installed')


@pytest.fixture(scope='module')
def interpreted():
    """Run the cases below in a process where Triton interprets; return what it printed."""
    environment = {
        **os.environ,
        'TRITON_INTERPRET': '1',
        'PYTHONPATH': os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, __file__], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split(': ', 1) for line in done.stdout.splitlines() if ': ' in line)


def cases():
    """Name -> arguments of `plan_batch` without out."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape):
        return torch.rand(shape, generator=generator) * 120

    mean, std = noise(3, 1, 1), noise(3, 1, 1) + 1
    dtypes = (
        *(torch.uint8, torch.int8, torch.int16, torch.uint16, torch.int32, torch.int64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.bool),
    )
    for dtype in dtypes:
        images = [noise(3, *s).to(dtype) for s in SIZES]
        yield f'ragged {dtype}', (images, mean, std, (2, 1, 0), 4, None, 3)
        stacked = torch.stack([noise(3, 5, 7).to(dtype), images[0]])
        yield f'stacked {dtype}', (stacked, mean, std, (2, 1, 0), 8, None, 3)
    images = [noise(4, *s) for s in SIZES]
    own = noise(2, 4), noise(2, 4) + 1
    rows = noise(4, 200)[:, :105].unbind()
    alike = [row.view(3, 5, 7) for row in rows]
    yield 'at one distance', (alike, mean, std, (2, 1, 0), 4, None, 1)
    uneven = [alike[0], alike[1], alike[3]]
    yield 'at two distances', (uneven, mean, std, (2, 1, 0), 4, None, 1)
    orders = [(2, 1, 0), None]
    pair = [noise(3, *s) for s in SIZES]
    yield 'own orders', (pair, mean, std, orders, 4, None, 1)
    yield 'full', (noise(3, 3, 20, 130).byte(), mean, std, (2, 1, 0), 1, None, 0)
    yield 'own orders stacked', (noise(2, 3, 6, 5), mean, std, orders, 1, None, 0)
    yield 'not normalised', (images, None, None, (3, 1, 0, 2), 1, (9, 11), 114)
    strided = [images[0].mT, images[1].movedim(0, -1).contiguous().movedim(-1, 0)]
    yield 'not contiguous', (strided, *own, None, 1, None, 0)
    yield 'one mean', (images, own[0][0, :1], own[1], None, 1, None, 0)
    order = (2, 1, 0, *range(3, 19))
    many = noise(19), noise(19) + 1
    yield 'many channels', (noise(2, 19, 40, 30), *many, order, 32, None, 0)
    yield 'other order', (noise(2, 19, 4, 3), *many, order[::-1], 1, None, 0)
    videos = [noise(4, 7, 5, 3), noise(4, 3, 8, 9)]
    yield 'ragged videos', (videos, *own, None, 2, None, 1)
    yield 'videos', (noise(2, 4, 5, 6, 7), *own, None, 4, None, 1)
    buffer = noise(400)
    views = [buffer[300:360].view(3, 4, 5), buffer[7:37].view(3, 5, 2)]
    yield 'views of one buffer', (views, mean, std, None, 1, None, 0)


SIZES = ((5, 7), (9, 3))


def layouts(shape, device='cpu'):
    """None, and tensors to be written that are laid out in other ways."""
    last = torch.channels_last_3d if len(shape) == 5 else torch.channels_last
    yield None
    yield torch.empty(shape, device=device, memory_format=last)
    yield torch.empty((*shape, 2), device=device)[..., 1]


@needs_triton
@pytest.mark.parametrize('name', [name for name, _ in cases()])
def test_kernel_equals_reference(interpreted, name):
    assert interpreted[name] == 'same'


@needs_triton
def test_more_samples_than_an_axis_of_the_grid(interpreted):
    assert interpreted['in launches of 3'] == 'same'


@needs_triton
def test_a_variant_that_fails_falls_back_alone_and_says_so_once():
    from mmprefetch.ops import triton
    from mmprefetch.ops.plan import plan_batch

    images = torch.arange(48, dtype=torch.uint8).view(2, 2, 3, 4)
    constants = torch.tensor([1.0, 2]), torch.tensor([3.0, 4])
    plans = [plan_batch(images, *constants), plan_batch(images, *constants, size_divisor=8)]
    with (
        mock.patch.object(triton, '_failed', set()),
        mock.patch.object(triton, '_flat') as flat,
        mock.patch.object(triton, '_tiles') as tiles,
    ):
        flat.__getitem__.side_effect = RuntimeError('no compiler')
        with pytest.warns(UserWarning, match='uint8 images.*no compiler.*plain torch'):
            batch = triton.normalize(plans[0])
        assert torch.equal(batch, ops._reference(plans[0]))
        assert torch.equal(triton.normalize(plans[0]), batch)
        triton.normalize(plans[1])
        assert flat.__getitem__.call_count == tiles.__getitem__.call_count == 1


def test_cuda_without_triton_takes_the_reference():
    image = mock.Mock(dtype=torch.uint8, device=torch.device('cuda', 0))
    with mock.patch.object(ops, '_has_triton', return_value=False):
        assert ops._implementation([image]) is ops._reference


def verdict(arguments):
    from mmprefetch.ops import triton
    from mmprefetch.ops.plan import plan_batch
    from mmprefetch.ops.reference import normalize as reference

    expected = reference(plan_batch(*arguments))
    for out in layouts(expected.shape):
        batch = triton.normalize(plan_batch(*arguments, out))
        if not torch.equal(batch, expected) or (out is not None and batch is not out):
            return f'differs in strides {batch.stride()}'
    return f'the reference did {triton._failed}' if triton._failed else 'same'


def main():
    from mmprefetch.ops import triton

    for name, arguments in cases():
        print(f'{name}: {verdict(arguments)}')
    triton._MOST = 3
    many = torch.rand(7, 3, 4, 5)
    mean = torch.rand(7, 3)
    results = [
        verdict((given, mean, mean + 1, None, divisor, None, 0))
        for given in (many, [image.clone() for image in many])
        for divisor in (1, 8)
    ]
    print('in launches of 3:', ', '.join(sorted(set(results))))


if __name__ == '__main__':
    main()
