# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The engine on a GPU: copies, synchronisation, order, memory, equality."""

import os

# Read when CUDA starts; without it deterministic runs refuse to multiply matrices.
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

import copy
import sys
from pathlib import Path

import pytest
import torch
import toys
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.structures import BaseDataElement, InstanceData
from torch.autograd import DeviceType

from mmprefetch import PrefetchDataPreprocessor, ops
from mmprefetch.lookahead import LookAheadLoader
from mmprefetch.streams import AcceleratorAPI, AcceleratorStream, AcceleratorWork

sys.path.append(str(Path(__file__).parent / 'test_ops'))
import test_triton

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='there is no CUDA device')
sanitized = pytest.mark.skipif(
    'TORCH_CUDA_SANITIZER' in os.environ, reason='breaks the order on purpose'
)

DEVICE = torch.device('cuda', 0)
IMG = {key: value for key, value in toys.IMG.items() if key != 'type'}
SLEEP = 100_000_000
"""Cycles, some 50 ms: far longer than the host takes to launch what a test launches meanwhile."""
RUBBISH = 77


def detection_batch(seed=0, sizes=((64, 96), (60, 80)), boxes=10):
    """Pageable tensors in dicts, lists, data samples and instance data."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape):
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)

    samples = []
    for size in sizes:
        sample = BaseDataElement(metainfo=dict(img_shape=size))
        sample.gt_instances = InstanceData(
            bboxes=noise(boxes, 4).float(),
            labels=noise(boxes).long(),
            masks=noise(boxes, *size) > 9,
        )
        samples.append(sample)
    return dict(inputs=[noise(3, *size) for size in sizes], data_samples=samples)


class Batches(list):
    """A dataloader, to the look-ahead."""

    num_workers = 0


def wrapped(wraps='BaseDataPreprocessor'):
    fields = IMG if wraps == 'ImgDataPreprocessor' else {}
    return PrefetchDataPreprocessor(wraps=wraps, **fields).to(DEVICE)


def begin(preprocessor, batch, depth=2):
    """Stage and begin a batch, as the look-ahead does."""
    preprocessor.prefetch(batch, True, 'train', preprocessor.stage(batch, 'train', depth))


def warm_up(preprocessor, *batches):
    """What happens once only: kernels are compiled and loaded, buffers allocated."""
    for batch in batches:
        for _ in range(3):
            begin(preprocessor, batch)
            preprocessor(batch, True)
    torch.cuda.synchronize()


def on_host(thing):
    """A copy of a nested batch in host memory."""
    return BaseDataPreprocessor().cast_data(thing)


def device_events(work):
    """What a device did for a function, by the profiler; None where it cannot see that."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        torch.ones(1).to(DEVICE)
        torch.cuda.synchronize()
        work()
        torch.cuda.synchronize()
    events = [event for event in profile.events() if event.device_type == DeviceType.CUDA]
    events.sort(key=lambda event: event.time_range.start)
    first = next((event for event in events if 'HtoD' in event.name), None)
    if first is None:
        pytest.skip('the profiler does not see the device here')
    events.remove(first)
    return events


def copies(events):
    return [event for event in events if 'HtoD' in event.name]


def kernels(events):
    return [event for event in events if not event.name.startswith(('Memcpy', 'Memset'))]


@pytest.fixture
def works(monkeypatch):
    """The work submitted to side streams, in order."""
    submit = AcceleratorStream.submit
    submitted = []

    def spied(self, work):
        submitted.append(submit(self, work))
        return submitted[-1]

    monkeypatch.setattr(AcceleratorStream, 'submit', spied)
    return submitted


@pytest.fixture
def slow_side_stream(monkeypatch):
    """Work on the side stream runs late, on memory that holds rubbish until then."""
    submit = AcceleratorStream.submit

    def delayed(self, work):
        with self.api.use(self._side):
            rubbish = [
                torch.full((size,), RUBBISH, dtype=torch.uint8, device=DEVICE)
                for size in (1 << 14, 1 << 16, 1 << 18, 1 << 20)
                for _ in range(4)
            ]
            del rubbish
            torch.cuda._sleep(SLEEP)
        return submit(self, work)

    monkeypatch.setattr(AcceleratorStream, 'submit', delayed)


# -- one copy, no wait -----------------------------------------------------------------------------


def test_one_copy_for_a_batch_whatever_it_holds():
    preprocessor = wrapped()
    batches = [detection_batch(seed) for seed in range(4)]
    warm_up(preprocessor, batches[0])

    def work():
        for batch in batches:
            begin(preprocessor, batch)
            preprocessor(batch, True)

    assert len(copies(device_events(work))) == len(batches)


def test_one_copy_and_one_kernel_for_stacked_images():
    pytest.importorskip('triton')
    preprocessor = wrapped('ImgDataPreprocessor')
    batch = dict(inputs=torch.zeros(4, 3, 32, 32, dtype=torch.uint8), data_samples=None)
    warm_up(preprocessor, batch)

    def work():
        begin(preprocessor, batch)
        preprocessor(batch, True)

    events = device_events(work)
    assert len(copies(events)) == 1
    assert len(kernels(events)) == 1


@pytest.mark.parametrize('wraps', ['BaseDataPreprocessor', 'ImgDataPreprocessor'])
@pytest.mark.parametrize('sizes', [((64, 96), (60, 80)), ((64, 96), (64, 96))])
def test_host_never_waits_in_steady_state(wraps, sizes):
    preprocessor = wrapped(wraps)
    batches = [detection_batch(seed, sizes) for seed in range(4)]
    warm_up(preprocessor, *batches)
    staged = [preprocessor.stage(batch, 'train', 2) for batch in batches]
    results = []
    torch.cuda.set_sync_debug_mode('error')
    try:
        for batch, each in zip(batches, staged, strict=True):
            preprocessor.prefetch(batch, True, 'train', each)
            results.append(preprocessor(batch, True))
    finally:
        torch.cuda.set_sync_debug_mode('default')
    stock = dict(BaseDataPreprocessor=BaseDataPreprocessor, ImgDataPreprocessor=ImgDataPreprocessor)
    fields = IMG if wraps == 'ImgDataPreprocessor' else {}
    for batch, result in zip(batches, results, strict=True):
        expected = stock[wraps](**fields).to(DEVICE)(batch, True)
        assert toys.same(on_host(result), on_host(expected))


def test_neither_begin_nor_collect_blocks(works, slow_side_stream):
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, batch)
    begin(preprocessor, batch)
    assert not works[-1].done()
    result = preprocessor(batch, True)
    assert not works[-1].done()
    torch.cuda.synchronize()
    assert works[-1].done()
    assert toys.same(on_host(result), batch)


def test_a_staged_batch_holds_no_memory_of_the_device():
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, batch)
    before = torch.cuda.memory_allocated(DEVICE)
    staged = preprocessor.stage(batch, 'train', 2)
    assert torch.cuda.memory_allocated(DEVICE) == before
    preprocessor.prefetch(batch, True, 'train', staged)
    assert torch.cuda.memory_allocated(DEVICE) > before
    assert toys.same(on_host(preprocessor(batch, True)), batch)


# -- order -----------------------------------------------------------------------------------------


def read_late(preprocessor, batch):
    """Begin and collect a batch, and read it on the compute stream."""
    begin(preprocessor, batch)
    result = preprocessor(batch, True)
    return [image + 0 for image in result['inputs']]


def test_reader_waits_for_the_copy(slow_side_stream):
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, detection_batch(seed=1))
    for _ in range(3):
        assert toys.same(on_host(read_late(preprocessor, batch)), batch['inputs'])


@sanitized
def test_without_the_readers_wait_values_are_wrong(slow_side_stream, monkeypatch):
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, detection_batch(seed=1))
    monkeypatch.setattr(AcceleratorWork, 'wait', lambda self, used: self.value)
    read = read_late(preprocessor, batch)
    torch.cuda.synchronize()
    assert not toys.same(on_host(read), batch['inputs'])


def test_side_stream_waits_for_changed_constants():
    preprocessor = wrapped('ImgDataPreprocessor')
    batch = detection_batch()
    warm_up(preprocessor, batch)
    torch.cuda._sleep(SLEEP)
    preprocessor.mean = preprocessor.mean + 5
    begin(preprocessor, batch)
    result = preprocessor(batch, True)
    fields = {**IMG, 'mean': [value + 5 for value in IMG['mean']]}
    expected = ImgDataPreprocessor(**fields).to(DEVICE)(batch, True)
    assert toys.same(on_host(result), on_host(expected))


# -- memory ----------------------------------------------------------------------------------------


def read_of_freed_memory(preprocessor, batch):
    """Queue a read of a batch behind other work, free it, and have the side stream write over
    whatever memory it is given meanwhile. Returns what was read."""
    stream = preprocessor._runtime.stream(preprocessor.device)
    begin(preprocessor, batch)
    result = preprocessor(batch, True)
    size = result['inputs'][0].untyped_storage().nbytes()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    read = [image + 0 for image in result['inputs']]
    del result
    with stream.api.use(stream._side):
        poison = [torch.full((size,), RUBBISH, dtype=torch.uint8, device=DEVICE) for _ in range(16)]
    torch.cuda.synchronize()
    del poison
    return on_host(read)


def test_freed_memory_is_not_rewritten_while_it_is_read():
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, batch)
    for _ in range(3):
        assert toys.same(read_of_freed_memory(preprocessor, batch), batch['inputs'])


@sanitized
def test_without_the_mark_freed_memory_is_rewritten(monkeypatch):
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, batch)
    monkeypatch.setattr(AcceleratorAPI, 'record_use', lambda self, tensor, stream: None)
    assert not toys.same(read_of_freed_memory(preprocessor, batch), batch['inputs'])


@pytest.mark.parametrize('depth', [1, 2, 4])
def test_as_many_batches_on_the_device_as_promised(depth):
    preprocessor = wrapped()
    size = 1 << 20
    batches = Batches(dict(inputs=[torch.zeros(size, dtype=torch.uint8)]) for _ in range(12))
    loader = LookAheadLoader(batches, preprocessor, 'train', depth)
    before = torch.cuda.memory_allocated(DEVICE)
    held = []
    for batch in loader:
        result = preprocessor(batch, True)
        torch.cuda.synchronize()
        loader.fill()
        held.append((torch.cuda.memory_allocated(DEVICE) - before) / size)
        del result
    loader.close()
    torch.cuda.empty_cache()  # sees which of the freed memory nobody reads any more
    assert max(held) == depth + 1
    assert torch.cuda.memory_allocated(DEVICE) == before


def test_reserved_memory_is_flat_over_short_epochs():
    preprocessor = wrapped('ImgDataPreprocessor')
    batches = Batches(detection_batch(seed) for seed in range(5))
    loaders = [LookAheadLoader(batches, preprocessor, split, 2) for split in ('train', 'val')]
    reserved = []
    for _ in range(40):
        for loader in loaders:
            for batch in loader:
                loss = preprocessor(batch, loader is loaders[0])['inputs'].sum()
                loader.fill()
                loss.item()
            loader.close()
        reserved.append(torch.cuda.memory_reserved(DEVICE))
    assert set(reserved[2:]) == {reserved[1]}


# -- overlap ---------------------------------------------------------------------------------------


def test_copies_run_beside_the_step():
    preprocessor = wrapped()
    sizes = ((512, 512),) * 4
    batches = Batches(detection_batch(seed, sizes, boxes=1) for seed in range(6))
    loader = LookAheadLoader(batches, preprocessor, 'train', 2)

    def work():
        for batch in loader:
            result = preprocessor(batch, True)
            torch.cuda._sleep(SLEEP)
            loss = torch.stack([image.sum() for image in result['inputs']]).sum()
            loader.fill()
            loss.item()
        loader.close()

    work()
    events = device_events(work)
    busy = [(event.time_range.start, event.time_range.end) for event in kernels(events)]
    _, *others = copies(events)
    assert len(others) == len(batches) - 1
    for each in others:
        start, end = each.time_range.start, each.time_range.end
        assert any(start < stop and begun < end for begun, stop in busy)


# -- equality --------------------------------------------------------------------------------------


@pytest.mark.parametrize('workers', [0, 2])
@pytest.mark.parametrize('wrapper', ['OptimWrapper', 'AmpOptimWrapper'])
def test_training_equals_stock(tmp_path, workers, wrapper):
    cfg = toys.config(tmp_path, workers=workers, optim=dict(type=wrapper))
    stock = toys.run(copy.deepcopy(cfg))
    assert next(stock[0].model.parameters()).is_cuda
    for depth in (1, 3):
        toys.assert_same_run(stock, toys.run(toys.prefetching(cfg, depth)))


# -- the kernel ------------------------------------------------------------------------------------


def moved(arguments):
    images, *rest = arguments
    if isinstance(images, torch.Tensor):
        images = images.to(DEVICE)
    else:
        images = [image.to(DEVICE) for image in images]
    rest = [value.to(DEVICE) if isinstance(value, torch.Tensor) else value for value in rest]
    return images, *rest


@pytest.mark.parametrize('name', [name for name, _ in test_triton.cases()])
def test_kernel_equals_reference(name):
    pytest.importorskip('triton')
    from mmprefetch.ops import triton

    arguments = moved(dict(test_triton.cases())[name])
    assert triton.usable(DEVICE)
    expected = ops._reference(ops.plan_batch(*arguments))
    for out in test_triton.layouts(expected.shape, DEVICE):
        batch = triton.normalize(ops.plan_batch(*arguments, out))
        assert out is None or batch is out
        assert torch.equal(batch, expected)


@pytest.mark.parametrize('ragged', [False, True])
def test_one_kernel_for_a_batch(ragged):
    pytest.importorskip('triton')
    images = torch.zeros(4, 3, 32, 48, dtype=torch.uint8, device=DEVICE)
    if ragged:
        images = [image[:, : 20 + index] for index, image in enumerate(images)]
    mean, std = torch.rand(2, 3, device=DEVICE) + 1

    def work():
        ops.normalize_batch(images, mean, std, size_divisor=32, channel_order=(2, 1, 0))

    work()
    assert len(kernels(device_events(work))) == 1
