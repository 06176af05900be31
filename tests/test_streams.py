# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Both directions of the order between side stream and compute stream, without a GPU."""

import copy
import threading
import time

import emulated
import pytest
import torch
import toys
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor

from mmprefetch import PrefetchDataPreprocessor, loading, ops, tickets
from mmprefetch.lookahead import LookAheadLoader
from mmprefetch.ring import PinnedRing
from mmprefetch.streams import (
    AcceleratorAPI,
    AcceleratorStream,
    AcceleratorWork,
    HostStream,
    stream_for,
)

IMG = {key: value for key, value in toys.IMG.items() if key != 'type'}


def batches(count=6, size=3):
    made = []
    for index in range(count):
        items = [toys.ToyImages()[index * size + i] for i in range(size)]
        made.append(
            dict(
                inputs=[item['inputs'] for item in items],
                data_samples=[item['data_samples'] for item in items],
            )
        )
    return made


class Batches(list):
    """A dataloader, to the look-ahead."""

    num_workers = 0


def wrapped(monkeypatch, device, wraps='ImgDataPreprocessor', **fields):
    monkeypatch.setattr(tickets, 'stream_for', lambda _: AcceleratorStream(device))
    # What an accelerator without Triton runs; the CPU's own version looks into the constants.
    monkeypatch.setattr(ops, '_implementation', lambda images: ops._reference)
    empty = torch.empty
    monkeypatch.setattr(
        torch, 'empty', lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
    )
    for owner, name in ((PrefetchDataPreprocessor, 'stage'), (loading.Preparation, 'load')):
        monkeypatch.setattr(owner, name, device.on_host(getattr(owner, name)))
    return PrefetchDataPreprocessor(wraps=wraps, **(fields or IMG))


def trained(device, preprocessor, raw, depth=2):
    """Run a loop whose model adds the inputs up on the compute stream; return the sums."""
    loader = LookAheadLoader(Batches(raw), preprocessor, 'train', depth)
    sums = []
    with device:
        for batch in loader:
            out = preprocessor(batch, True)
            weight = torch.ones(())
            for _ in range(3):
                weight = weight * 1
            sums.append((out['inputs'] * weight).double().sum((1, 2, 3)))
            labels = torch.stack([sample.label for sample in out['data_samples']])
            sums.append(labels + 0)
            del out, batch
            loader.fill()
    device.synchronize()
    loader.close()
    return sums


def expected(raw):
    stock = ImgDataPreprocessor(**IMG)
    sums = []
    for batch in raw:
        out = stock(copy.deepcopy(batch), True)
        sums.append(out['inputs'].double().sum((1, 2, 3)))
        sums.append(torch.stack([sample.label for sample in out['data_samples']]))
    return sums


def right(sums, raw):
    return all(torch.equal(one, other) for one, other in zip(sums, expected(raw), strict=True))


@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('depth', [1, 2, 4])
def test_values_are_right_under_random_schedules(monkeypatch, seed, depth):
    raw = batches()
    device = emulated.Device(seed)
    preprocessor = wrapped(monkeypatch, device)
    sums = trained(device, preprocessor, raw, depth)
    assert right(sums, raw)
    assert emulated.races(device) == []
    # Whatever the compute stream reads of the side stream's memory is marked as in use there.
    sides = {entry[1] for entry in device.log if entry[0] == 'launch'} - {device.compute.id}
    made_aside, read = set(), set()
    for kind, *entry in device.log:
        if kind == 'launch' and entry[0] in sides:
            made_aside |= entry[3]
        elif kind == 'launch':
            read |= entry[2] & made_aside
    assert read and read <= {pointer for pointer, stream in device.recorded}


def test_without_the_readers_wait_values_are_wrong(monkeypatch):
    def wait(self, used):
        return self.value

    monkeypatch.setattr(AcceleratorWork, 'wait', wait)
    raw = batches()
    device = emulated.Device(0, most=0.02)
    preprocessor = wrapped(monkeypatch, device)
    sums = trained(device, preprocessor, raw)
    assert not right(sums, raw)
    assert emulated.races(device)


def test_without_the_wait_before_a_buffer_is_reused_values_are_wrong(monkeypatch):
    give_back = PinnedRing.give_back
    monkeypatch.setattr(
        PinnedRing, 'give_back', lambda self, buffer, wait: give_back(self, buffer, None)
    )
    raw = batches(20)
    device = emulated.Device(0, most=0.02)
    preprocessor = wrapped(monkeypatch, device)
    sums = trained(device, preprocessor, raw)
    assert not right(sums, raw)


def test_without_following_the_compute_stream_constants_are_read_too_early(monkeypatch):
    for follows in (True, False):
        with monkeypatch.context() as patch:
            if not follows:
                patch.setattr(AcceleratorStream, 'follow_compute', lambda self: None)
            device = emulated.Device(0, most=0.02)
            preprocessor = wrapped(patch, device)
            raw = dict(inputs=[torch.full((3, 4, 4), 9, dtype=torch.uint8)])
            with device:
                # Constants that the compute stream is still busy writing.
                device.compute.put(lambda: time.sleep(0.3))
                preprocessor.mean.zero_()
                preprocessor.pad_value = 0
                staged = preprocessor.stage(raw, 'train', 2)
                preprocessor.prefetch(raw, True, 'train', staged)
                out = preprocessor(raw, True)['inputs'] + 0
            device.synchronize()
            right = (torch.full((3, 4, 4), 9.0) / preprocessor.std)[None]
            assert torch.equal(out, right) == follows
            assert bool(emulated.races(device)) != follows


def test_begin_and_collect_never_make_the_host_wait(monkeypatch):
    raw = batches(8)
    device = emulated.Device(0)
    preprocessor = wrapped(monkeypatch, device)
    trained(device, preprocessor, raw, depth=8)
    assert device.host_waits == 0


@pytest.mark.parametrize('wraps', ['BaseDataPreprocessor', 'ImgDataPreprocessor'])
def test_one_copy_for_each_batch(monkeypatch, wraps):
    raw = batches(5)
    device = emulated.Device(0)
    preprocessor = wrapped(monkeypatch, device, wraps, **({'non_blocking': False}))
    with device:
        for batch in raw:
            staged = preprocessor.stage(batch, 'train', 2)
            before = len(device.log)
            preprocessor.prefetch(batch, True, 'train', staged)
            preprocessor(batch, True)
            staging = staged.packed.buffer.untyped_storage().data_ptr()
            host = {t.untyped_storage().data_ptr() for t in batch['inputs']} | {staging}
            crossings = [
                entry for entry in device.log[before:] if entry[0] == 'launch' and entry[3] & host
            ]
            assert [entry[2] for entry in crossings] == ['aten::copy_']
    device.synchronize()


def test_unknown_preprocessors_run_on_the_compute_stream(monkeypatch):
    device = emulated.Device(0)
    preprocessor = wrapped(monkeypatch, device, 'RandomPreprocessor', scale=2.0)
    raw = batches(1)[0]
    with device:
        staged = preprocessor.stage(raw, 'train', 2)
        preprocessor.prefetch(raw, False, 'train', staged)
        aside = [entry for entry in device.log if entry[0] == 'launch']
        assert {entry[1] for entry in aside if entry[2] == 'aten::copy_'} == {
            preprocessor._runtime._stream._side.id
        }
        out = preprocessor(raw, False)
    device.synchronize()
    stock = toys.RandomPreprocessor(scale=2.0)(raw, False)
    assert torch.equal(out['inputs'], stock['inputs'])


# -- the host stream -----------------------------------------------------------------------------


def test_host_stream_is_in_order_and_runs_beside_the_caller():
    stream = HostStream()
    gate, order = threading.Event(), []
    works = [stream.submit(lambda i=i: (gate.wait(10), order.append(i), i)[2]) for i in range(5)]
    assert not any(work.done() for work in works) and order == []
    gate.set()
    assert [work.wait(lambda value: []) for work in works] == list(range(5)) == order
    stream.close()
    assert stream.submit(lambda: 7).wait(lambda value: []) == 7  # it may be used again
    stream.close()
    assert not any(t.name.startswith('mmprefetch-stream') for t in threading.enumerate())


def test_host_stream_may_be_closed_again_after_ctrl_c(monkeypatch):
    stream, release, done = HostStream(), threading.Event(), []
    stream.submit(release.wait)
    stream.submit(lambda: done.append(1))

    def interrupted(fs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr('mmprefetch.streams.futures.wait', interrupted)
        stream.close()
    release.set()
    stream.close()
    assert done == [1]
    assert not [each for each in threading.enumerate() if each.name.startswith('mmprefetch-stream')]


def test_host_stream_keeps_an_error_for_whoever_waits():
    stream = HostStream()

    def fail():
        raise LookupError('lost')

    work = stream.submit(fail)
    work.barrier()()
    assert work.done()
    with pytest.raises(LookupError, match='lost') as caught:
        work.wait(lambda value: [])
    assert caught.traceback[-1].name == 'fail'
    stream.close()


def test_host_stream_gives_right_values_under_random_delays():
    class Delayed(BaseDataPreprocessor):
        def forward(self, data, training=False):
            time.sleep(delays.pop())
            return super().forward(data, training)

    raw = batches(12)
    delays = torch.rand(12).mul_(0.01).tolist()
    preprocessor = PrefetchDataPreprocessor.around(Delayed())
    preprocessor.prefetch_safe = True
    loader = LookAheadLoader(Batches(raw), preprocessor, 'train', 3)
    stock = BaseDataPreprocessor()
    for batch in loader:
        assert toys.same(preprocessor(batch, True), stock(batch, True))
    loader.close()
    preprocessor.close()
    assert not delays


def test_stream_of_a_device():
    assert isinstance(stream_for(torch.device('cpu')), HostStream)
    api = AcceleratorAPI(torch.device('cuda'))
    assert api._module is torch.cuda


def test_one_stream_for_the_loops_life(monkeypatch):
    device = emulated.Device(0)
    preprocessor = wrapped(monkeypatch, device)
    raw = batches(4)
    for _ in range(10):
        trained(device, preprocessor, raw)
        preprocessor.close()
    assert sum(entry[0] == 'stream' for entry in device.log) == 2
    assert len(preprocessor._runtime._rings) == 1
