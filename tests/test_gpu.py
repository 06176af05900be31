# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The engine on a GPU: copies, synchronisation, order, memory, equality."""

import os

# Read when CUDA starts; without it deterministic runs refuse to multiply matrices.
os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')

import contextlib
import copy
import gc
import sys
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import toys
from mmengine.dataset import pseudo_collate
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.structures import BaseDataElement, InstanceData
from torch.utils.data import DataLoader

from mmprefetch import PrefetchDataPreprocessor, look_ahead, ops
from mmprefetch.engine import Preparation, Ticket
from mmprefetch.engine.streams import SideStream, StreamAPI
from mmprefetch.engine.ticket import Work
from mmprefetch.engine.transfer import Transfer

sys.path += [str(Path(__file__).parent / 'test_ops'), str(Path(__file__).parents[1] / 'tools')]
import gpu_check_trace
import test_triton

SANITIZED = 'TORCH_CUDA_SANITIZER' in os.environ

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason='there is no CUDA device')
breaks_order = pytest.mark.skipif(SANITIZED, reason='breaks the order on purpose')
profiles = pytest.mark.skipif(SANITIZED, reason='the sanitizer adds nothing to what is counted')
forks = pytest.mark.skipif(
    SANITIZED, reason="the sanitizer's mode survives the fork, and starts CUDA in the workers"
)

DEVICE = torch.device('cuda', 0)
IMG = {key: value for key, value in toys.IMG.items() if key != 'type'}
SLEEP = 200_000_000
"""Cycles, some 100 ms: far longer than the host takes to launch what a test launches meanwhile."""
RUBBISH = 77

handed_out = []
"""The ends of the work that was handed out as it was begun, in order."""


@pytest.fixture(autouse=True)
def note_what_is_handed_out(monkeypatch):
    """Let tests see that work was used and not done again, which gives the same values."""
    collect = Work.collect

    def noted(self):
        handed_out.append(self.event)
        return collect(self)

    monkeypatch.setattr(Work, 'collect', noted)
    handed_out.clear()
    yield
    handed_out.clear()


@pytest.fixture(autouse=True)
def show_all_to_the_sanitizer(monkeypatch):
    """The sanitizer sees what torch dispatches on the main thread: let it see the loader thread,
    too, and have torch do what Triton does."""
    if not SANITIZED:
        return
    from torch.cuda import _sanitizer
    from torch.utils._python_dispatch import TorchDispatchMode

    class InThread(_sanitizer.CUDASanitizerDispatchMode):
        def __init__(self):
            TorchDispatchMode.__init__(self)
            self.event_handler = _sanitizer.cuda_sanitizer.dispatch.event_handler

    enter = Preparation.enter_thread

    def entered(self):
        enter(self)
        InThread().__enter__()  # until the thread ends

    monkeypatch.setattr(Preparation, 'enter_thread', entered)
    monkeypatch.setattr(ops, '_has_triton', lambda: False)


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
    """A dataloader with worker processes, to the look-ahead."""

    num_workers = 1


def batches_of(count, **kwargs):
    return Batches(detection_batch(seed, **kwargs) for seed in range(count))


def wrapped(wraps='BaseDataPreprocessor'):
    return PrefetchDataPreprocessor(wraps=wraps, **fields_of(wraps)).to(DEVICE)


def fields_of(wraps):
    return IMG if wraps == 'ImgDataPreprocessor' else {}


def stock(batch, wraps='BaseDataPreprocessor', training=True, **fields):
    """What mmengine makes of a batch, in host memory."""
    kinds = dict(BaseDataPreprocessor=BaseDataPreprocessor, ImgDataPreprocessor=ImgDataPreprocessor)
    made = kinds[wraps](**{**fields_of(wraps), **fields}).to(DEVICE)
    return on_host(made(copy.deepcopy(batch), training))


def on_host(thing):
    """A copy of a nested batch in host memory."""
    return BaseDataPreprocessor().cast_data(thing)


def begin(preprocessor, *batches, split='train'):
    """Begin work on batches in a thread of its own, as the loader thread does."""
    tickets = [Ticket(batch, split) for batch in batches]
    preparation = preprocessor.preparation(split)

    def work():
        preparation.enter_thread()
        for ticket in tickets:
            preparation.begin(ticket)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(work).result()
    return tickets


def collect(preprocessor, ticket):
    """Ask for a batch as the model does, and go on to the next."""
    before = len(handed_out)
    preprocessor.expect(ticket)
    result = preprocessor(ticket.batch, True)
    preprocessor.withdraw(ticket)
    assert len(handed_out) == before + 1
    return result


def warm_up(preprocessor, *batches):
    """What happens once only: kernels are compiled and loaded, buffers allocated."""
    for batch in batches:
        for _ in range(2):
            collect(preprocessor, *begin(preprocessor, batch))
    torch.cuda.synchronize()


def device_events(work):
    """What a device did for a function, by the profiler."""
    events = gpu_check_trace.trace(work)
    if events is None:
        pytest.skip('the profiler does not see the device here')
    return [event for event in events if event.kind != 'call']


def copies(events):
    return gpu_check_trace.of_kind(events, 'copy', 'HtoD')


def kernels(events):
    return [event.name for event in gpu_check_trace.of_kind(events, 'kernel')]


def forget_garbage():
    gc.collect()
    torch.cuda.synchronize()
    # It also sees which of the freed memory no stream reads any more.
    torch.cuda.empty_cache()


def wait_until(holds):
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@contextlib.contextmanager
def no_host_wait():
    """Raises where a thread makes the host wait for the device."""
    torch.cuda.set_sync_debug_mode('error')
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode('default')


@pytest.fixture
def slow_side_stream(monkeypatch):
    """Work on the side stream runs late, on memory that holds rubbish until then."""
    issue = SideStream.issue

    @contextlib.contextmanager
    def late(self):
        with issue(self):
            rubbish = [
                torch.full((size,), RUBBISH, dtype=torch.uint8, device=DEVICE)
                for size in (1 << 14, 1 << 16, 1 << 18, 1 << 20)
                for _ in range(4)
            ]
            del rubbish
            torch.cuda._sleep(SLEEP)
            yield

    monkeypatch.setattr(SideStream, 'issue', late)


# -- one copy, no wait -----------------------------------------------------------------------------


@profiles
def test_one_copy_for_a_batch_whatever_it_holds():
    preprocessor = wrapped()
    batches = batches_of(4)
    warm_up(preprocessor, batches[0])

    def work():
        for ticket in begin(preprocessor, *batches):
            collect(preprocessor, ticket)

    assert len(copies(device_events(work))) == len(batches)


@profiles
def test_one_copy_and_one_kernel_for_images_of_one_size():
    pytest.importorskip('triton')
    preprocessor = wrapped('ImgDataPreprocessor')
    images = torch.zeros(4, 3, 32, 32, dtype=torch.uint8)
    for inputs in (images, list(images)):
        batch = dict(inputs=inputs, data_samples=None)
        warm_up(preprocessor, batch)

        def work(batch=batch):
            collect(preprocessor, *begin(preprocessor, batch))

        events = device_events(work)
        assert len(copies(events)) == 1
        assert len(kernels(events)) == 1, kernels(events)


@pytest.mark.parametrize('wraps', ['BaseDataPreprocessor', 'ImgDataPreprocessor'])
@pytest.mark.parametrize('sizes', [((64, 96), (60, 80)), ((64, 96), (64, 96))])
def test_neither_begin_nor_collect_makes_the_host_wait(wraps, sizes):
    preprocessor = wrapped(wraps)
    batches = batches_of(4, sizes=sizes)
    warm_up(preprocessor, *batches)
    with no_host_wait():
        tickets = begin(preprocessor, *batches)
        results = [collect(preprocessor, ticket) for ticket in tickets]
    for batch, result in zip(batches, results, strict=True):
        assert toys.same(on_host(result), stock(batch, wraps))


@pytest.mark.parametrize('depth', [1, 3])
def test_the_host_never_waits_once_a_loop_is_under_way(depth):
    preprocessor = wrapped('ImgDataPreprocessor')
    batches = batches_of(8)
    warm_up(preprocessor, *batches)
    handed_out.clear()
    results = []
    with contextlib.ExitStack() as stack:
        for batch in look_ahead(batches, preprocessor, depth=depth):
            results.append(preprocessor(batch, True))
            if len(results) == 1:  # the first is not begun ahead: its tensors are pageable
                stack.enter_context(no_host_wait())
    assert len(handed_out) == len(batches) - 1
    for batch, result in zip(batches, results, strict=True):
        assert toys.same(on_host(result), stock(batch, 'ImgDataPreprocessor'))


def test_begin_and_collect_return_before_the_copy_is_done(slow_side_stream):
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, batch)
    (ticket,) = begin(preprocessor, batch)
    event = ticket.work.event
    assert not event.query()
    result = collect(preprocessor, ticket)
    assert not event.query()
    torch.cuda.synchronize()
    assert event.query()
    assert toys.same(on_host(result), batch)


def test_packing_takes_no_memory_of_the_device():
    batch = detection_batch()
    on_host(torch.ones(1, device=DEVICE))
    forget_garbage()
    before = torch.cuda.memory_allocated(DEVICE)
    transfer = Transfer(batch, DEVICE)
    assert transfer.buffer.is_pinned()
    assert torch.cuda.memory_allocated(DEVICE) == before
    moved = transfer.issue()
    assert torch.cuda.memory_allocated(DEVICE) > before
    assert toys.same(on_host(moved), batch)


# -- order -----------------------------------------------------------------------------------------


def read_late(preprocessor, batch):
    """Begin and collect a batch, and read it on the compute stream."""
    result = collect(preprocessor, *begin(preprocessor, batch))
    return [image + 0 for image in result['inputs']]


def test_the_reader_waits_for_the_copy(slow_side_stream):
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, detection_batch(seed=1))
    for _ in range(3):
        assert toys.same(on_host(read_late(preprocessor, batch)), batch['inputs'])


@breaks_order
def test_without_the_readers_wait_values_are_wrong(slow_side_stream, monkeypatch):
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, detection_batch(seed=1))
    monkeypatch.setattr(SideStream, 'collect', lambda self, event, memory: [])
    read = read_late(preprocessor, batch)
    torch.cuda.synchronize()
    assert not toys.same(on_host(read), batch['inputs'])


def test_staging_buffers_are_not_written_while_they_are_copied(slow_side_stream):
    preprocessor = wrapped()
    warm_up(preprocessor, detection_batch(seed=99))
    batches = batches_of(6)
    results = [collect(preprocessor, ticket) for ticket in begin(preprocessor, *batches)]
    assert not handed_out[-1].query()
    for batch, result in zip(batches, results, strict=True):
        assert toys.same(on_host(result), batch)


@pytest.mark.parametrize('follows', [True, pytest.param(False, marks=breaks_order)])
def test_the_side_stream_waits_for_changed_constants(monkeypatch, follows):
    preprocessor = wrapped('ImgDataPreprocessor')
    batch = detection_batch()
    warm_up(preprocessor, batch)
    if not follows:
        monkeypatch.setattr(SideStream, 'follow', lambda self, stream: None)
    rubbish = [torch.full((3, 1, 1), float(RUBBISH), device=DEVICE) for _ in range(64)]
    del rubbish
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    preprocessor.mean = preprocessor.mean + 5
    result = collect(preprocessor, *begin(preprocessor, batch))
    mean = [value + 5 for value in IMG['mean']]
    torch.cuda.synchronize()
    assert toys.same(on_host(result), stock(batch, 'ImgDataPreprocessor', mean=mean)) == follows


class DecodedOnDevice(Batches):
    """Makes each image on the device, late, on the current stream of the thread that loads.

    Args:
        batches (Batches): In host memory.
        stream (torch.cuda.Stream | None): To be made the loader thread's current stream.
    """

    def __init__(self, batches, stream):
        super().__init__(batches)
        self.stream = stream
        self.decoded = [[image.to(DEVICE) for image in batch['inputs']] for batch in batches]
        torch.cuda.synchronize()

    def __iter__(self):
        for batch, decoded in zip(super().__iter__(), self.decoded, strict=True):
            if self.stream and threading.current_thread() is not threading.main_thread():
                torch.cuda.set_stream(self.stream)
            rubbish = [torch.full_like(image, RUBBISH) for image in decoded]
            del rubbish
            torch.cuda._sleep(SLEEP)
            yield dict(batch, inputs=[image + 0 for image in decoded])


@pytest.mark.parametrize('wraps', ['BaseDataPreprocessor', 'ImgDataPreprocessor'])
@pytest.mark.parametrize('own_stream', [True, False])
def test_tensors_on_the_device_are_ordered_behind_the_stream_that_made_them(wraps, own_stream):
    batches = batches_of(5)
    loader = DecodedOnDevice(batches, torch.cuda.Stream(DEVICE) if own_stream else None)
    preprocessor = wrapped(wraps)
    warm_up(preprocessor, batches[0])
    handed_out.clear()
    results = []
    for batch in look_ahead(loader, preprocessor):
        results.append(preprocessor(batch, True))
    assert len(handed_out) == len(batches) - 1
    for batch, result in zip(batches, results, strict=True):
        assert toys.same(on_host(result), stock(batch, wraps))


@breaks_order
@pytest.mark.parametrize('own_stream', [True, False])
def test_without_that_wait_they_are_read_too_early(monkeypatch, own_stream):
    batches = batches_of(5)
    loader = DecodedOnDevice(batches, torch.cuda.Stream(DEVICE) if own_stream else None)
    preprocessor = wrapped('ImgDataPreprocessor')
    warm_up(preprocessor, batches[0])
    follow, calls = SideStream.follow, []

    def constants_only(self, stream):
        calls.append(stream)
        if len(calls) == 1:
            follow(self, stream)

    monkeypatch.setattr(SideStream, 'follow', constants_only)
    results = [preprocessor(batch, True) for batch in look_ahead(loader, preprocessor)]
    torch.cuda.synchronize()
    assert not all(
        toys.same(on_host(result), stock(batch, 'ImgDataPreprocessor'))
        for batch, result in zip(batches, results, strict=True)
    )


# -- memory ----------------------------------------------------------------------------------------


def read_of_freed_memory(preprocessor, batch):
    """Queue a read of a batch behind other work, free it, and have the side stream write over
    whatever memory it is given meanwhile. Returns what was read."""
    side = preprocessor.runtime.stream(preprocessor.device)
    result = collect(preprocessor, *begin(preprocessor, batch))
    size = result['inputs'][0].untyped_storage().nbytes()
    torch.cuda.synchronize()
    torch.cuda._sleep(SLEEP)
    read = [image + 0 for image in result['inputs']]
    del result
    with side.api.use(side.stream):
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


@breaks_order
def test_without_the_mark_freed_memory_is_rewritten(monkeypatch):
    preprocessor = wrapped()
    batch = detection_batch()
    warm_up(preprocessor, batch)
    monkeypatch.setattr(StreamAPI, 'record_use', lambda self, tensor, stream: None)
    assert not toys.same(read_of_freed_memory(preprocessor, batch), batch['inputs'])


@pytest.mark.parametrize('depth', [1, 2, 4])
def test_as_many_batches_on_the_device_as_promised(depth, monkeypatch):
    begun = []
    begin_one = Preparation.begin

    def counted(self, ticket):
        begin_one(self, ticket)
        begun.append(None)

    monkeypatch.setattr(Preparation, 'begin', counted)
    preprocessor = wrapped()
    size = 1 << 20
    batches = Batches(dict(inputs=[torch.zeros(size, dtype=torch.uint8)]) for _ in range(12))
    forget_garbage()
    before = torch.cuda.memory_allocated(DEVICE)
    loader, held = look_ahead(batches, preprocessor, depth=depth), []
    for index, batch in enumerate(loader):
        result = preprocessor(batch, True)
        # The first is not begun; behind those that are, the loader thread waits for a permit.
        wanted = min(index + depth, len(batches) - 1)
        wait_until(lambda wanted=wanted: len(begun) == wanted)
        forget_garbage()
        held.append(round((torch.cuda.memory_allocated(DEVICE) - before) / size, 2))
        del result
    loader.close()
    forget_garbage()
    assert max(held) == depth + 1, held
    assert torch.cuda.memory_allocated(DEVICE) == before


def test_reserved_memory_is_flat_over_short_epochs():
    preprocessor = wrapped('ImgDataPreprocessor')
    batches = batches_of(5)
    loaders = [look_ahead(batches, preprocessor, split) for split in ('train', 'val')]
    reserved = []
    for _ in range(40):
        for loader in loaders:
            for batch in loader:
                preprocessor(batch, loader is loaders[0])['inputs'].sum().item()
            loader.close()
        reserved.append(torch.cuda.memory_reserved(DEVICE))
    # Which memory is free again when the loader thread asks for some is a matter of time, so a
    # segment (2 MiB) more may come late. A stream for each epoch would cost one in each.
    assert max(reserved[10:]) - max(reserved[:10]) <= 2 * (2 << 20), reserved


# -- overlap ---------------------------------------------------------------------------------------


@profiles
@pytest.mark.parametrize('depth', [1, 2])
def test_copies_run_beside_the_step(depth):
    preprocessor = wrapped()
    batches = batches_of(8, sizes=((1024, 1024),) * 4, boxes=1)

    def work():
        for batch in look_ahead(batches, preprocessor, depth=depth):
            result = preprocessor(batch, True)
            torch.cuda._sleep(SLEEP)
            torch.stack([image.sum() for image in result['inputs']]).sum().item()

    work()
    events = device_events(work)
    busy = defaultdict(list)
    for event in gpu_check_trace.of_kind(events, 'kernel'):
        busy[event.place].append(event)
    compute = max(busy, key=lambda stream: sum(each.end - each.start for each in busy[stream]))
    aside = [each for each in copies(events) if each.place != compute]
    assert len(aside) == len(batches) - 1
    step = gpu_check_trace.Busy(busy[compute])
    beside = [each for each in aside if step.during(each) > 0]
    # Those that are begun along with the first batch come before there is any step.
    assert len(beside) >= len(aside) - depth, (aside, step.spans)


# -- equality --------------------------------------------------------------------------------------

LOADERS = [
    pytest.param(0, None, id='no workers'),
    pytest.param(0, True, id='thread without workers'),
    pytest.param(2, None, id='workers', marks=forks),
]


@pytest.mark.parametrize(('workers', 'thread'), LOADERS)
@pytest.mark.parametrize('wrapper', ['OptimWrapper', 'AmpOptimWrapper'])
def test_training_equals_stock(tmp_path, workers, thread, wrapper):
    cfg = toys.config(tmp_path, workers=workers, optim=dict(type=wrapper))
    expected = toys.run(copy.deepcopy(cfg))
    assert next(expected[0].model.parameters()).is_cuda
    for depth in (1, 3):
        handed_out.clear()
        ahead = toys.prefetching(cfg, depth, loader_thread=thread)
        ahead.val_cfg.update(loader_thread=thread)
        toys.assert_same_run(expected, toys.run(ahead))
        # Of two epochs of four batches, and as many of validation, all but the first of each.
        assert len(handed_out) == (12 if workers or thread else 0)


@pytest.mark.parametrize(('workers', 'thread'), LOADERS)
def test_a_plain_loop_with_look_ahead_learns_the_same(workers, thread):
    torch.use_deterministic_algorithms(True)

    def trained(depth):
        torch.manual_seed(0)
        made = dict(type='PrefetchDataPreprocessor', **IMG)
        model = toys.ToyModel(data_preprocessor=made).to(DEVICE).train()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = DataLoader(toys.ToyImages(), 4, True, num_workers=workers,
                            collate_fn=pseudo_collate)  # fmt: skip
        preprocessor = model.data_preprocessor
        for _ in range(2):
            for batch in look_ahead(loader, preprocessor, depth=depth, loader_thread=thread):
                loss = model(**preprocessor(batch, True), mode='loss')['loss']
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return on_host(dict(model.state_dict()))

    expected = trained(0)
    assert not handed_out
    assert toys.same(trained(2), expected)
    assert len(handed_out) == (6 if workers or thread else 0)


def test_loader_threads_of_training_and_validation_at_once():
    preprocessor = wrapped('ImgDataPreprocessor')
    batches = dict(train=batches_of(12), val=batches_of(12, sizes=((40, 30), (20, 70))))
    loaders = {split: look_ahead(batches[split], preprocessor, split) for split in batches}
    results = dict(train=[], val=[])

    def threads():
        return {each for each in threading.enumerate() if each.name == 'mmprefetch-loader'}

    before = threads()
    for batch in loaders['train']:
        results['train'].append(preprocessor(batch, True))
        if len(results['train']) == 3:
            for other in loaders['val']:
                results['val'].append(preprocessor(other, False))
                if len(results['val']) == 2:
                    assert len(threads() - before) == 2
    assert len(handed_out) == 22
    for split, made in results.items():
        for batch, result in zip(batches[split], made, strict=True):
            assert toys.same(on_host(result), stock(batch, 'ImgDataPreprocessor', split == 'train'))


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
    expected = ops._reference(ops.plan_batch(*arguments))
    for out in test_triton.layouts(expected.shape, DEVICE):
        batch = triton.normalize(ops.plan_batch(*arguments, out))
        assert out is None or batch is out
        assert torch.equal(batch, expected)
    assert not triton._failed  # what fails is done by the reference


@profiles
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
    names = kernels(device_events(work))
    assert len(names) == 1, names
