# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Both directions of the order between side stream and compute stream, without a GPU."""

import contextlib
import copy
import threading
import time
import weakref

import emulated
import pytest
import torch
import toys
from mmengine.model import ImgDataPreprocessor

from mmprefetch import PrefetchDataPreprocessor, look_ahead, ops
from mmprefetch.engine import Preparation, Ticket, layout, ticket, transfer
from mmprefetch.engine.streams import NoSideStream, SideStream, StreamAPI, stream_for

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
    """A dataloader with worker processes, to the look-ahead."""

    num_workers = 1


def wrapped(monkeypatch, device, wraps='ImgDataPreprocessor', **fields):
    monkeypatch.setattr(ticket, 'stream_for', lambda _: SideStream(device))
    # What an accelerator without Triton runs; the CPU's own version looks into the constants.
    monkeypatch.setattr(ops, '_implementation', lambda images: ops._reference)
    empty = torch.empty

    def pinned_too(*args, pin_memory=False, **kwargs):
        return device.pinned.empty(*args) if pin_memory else empty(*args, **kwargs)

    monkeypatch.setattr(torch, 'empty', pinned_too)
    monkeypatch.setattr(transfer, 'is_on_host', lambda tensor: False)
    return PrefetchDataPreprocessor(wraps=wraps, **(fields or IMG))


def trained(device, preprocessor, raw, depth=2):
    """Run a loop whose model adds the inputs up on the compute stream; return the sums."""
    loader = look_ahead(Batches(raw), preprocessor, depth=depth)
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


def unmarked(device):
    """Memory of side streams that the compute stream reads without a mark of its use there."""
    sides = {entry[1] for entry in device.log if entry[0] == 'launch'} - {device.compute.id}
    made_aside, read = set(), set()
    for kind, *entry in device.log:
        if kind == 'launch' and entry[0] in sides:
            made_aside |= entry[3]
        elif kind == 'launch':
            read |= entry[2] & made_aside
    assert read
    return read - {pointer for pointer, stream in device.recorded}


@pytest.mark.parametrize('seed', range(6))
@pytest.mark.parametrize('depth', [1, 2, 4])
def test_values_are_right_under_random_schedules(monkeypatch, seed, depth):
    raw = batches()
    device = emulated.Device(seed)
    preprocessor = wrapped(monkeypatch, device)
    sums = trained(device, preprocessor, raw, depth)
    assert right(sums, raw)
    assert emulated.races(device) == []
    assert unmarked(device) == set()


def test_without_the_mark_the_memory_could_be_given_out_again(monkeypatch):
    device = emulated.Device(0)
    monkeypatch.setattr(device, 'record_use', lambda tensor, stream: None)
    trained(device, wrapped(monkeypatch, device), batches())
    assert unmarked(device)


def test_without_the_readers_wait_values_are_wrong(monkeypatch):
    monkeypatch.setattr(SideStream, 'collect', lambda self, event, memory: [])
    raw = batches()
    device = emulated.Device(0, most=0.02)
    sums = trained(device, wrapped(monkeypatch, device), raw)
    assert not right(sums, raw)
    assert emulated.races(device)


def test_without_the_hold_pinned_memory_is_written_while_it_is_copied(monkeypatch):
    """A device whose copies do not keep the host's memory, as torch's own allocator does."""
    finish = SideStream.finish
    for holds in (True, False):
        with monkeypatch.context() as patch:
            if not holds:
                patch.setattr(SideStream, 'finish', lambda self, held: finish(self, None))
            raw = batches(20)
            device = emulated.Device(0, most=0.02)
            assert right(trained(device, wrapped(patch, device), raw), raw) == holds


def begun(preprocessor, raw, split='train'):
    """A ticket of a batch that was begun in a thread of its own."""
    made = Ticket(raw, split)
    preparation = preprocessor.preparation(split)
    thread = threading.Thread(target=lambda: preparation.begin(made))
    thread.start()
    thread.join()
    preprocessor.expect(made)
    return made


def test_without_following_the_compute_stream_constants_are_read_too_early(monkeypatch):
    for follows in (True, False):
        with monkeypatch.context() as patch:
            if not follows:
                patch.setattr(SideStream, 'follow', lambda self, stream: None)
            device = emulated.Device(0, most=0.02)
            preprocessor = wrapped(patch, device)
            raw = dict(inputs=[torch.full((3, 4, 4), 9, dtype=torch.uint8)])
            with device:
                # Constants that the compute stream is still busy writing.
                device.compute.put(lambda: time.sleep(0.3))
                preprocessor.mean.zero_()
                begun(preprocessor, raw)
                out = preprocessor(raw, True)['inputs'] + 0
            device.synchronize()
            right = (torch.full((3, 4, 4), 9.0) / preprocessor.std)[None]
            assert torch.equal(out, right) == follows
            assert bool(emulated.races(device)) != follows


def test_constants_that_change_during_the_pass_are_followed(monkeypatch):
    device = emulated.Device(0, most=0.02)
    preprocessor = wrapped(monkeypatch, device)
    raw = [dict(inputs=[torch.full((3, 4, 4), 9, dtype=torch.uint8)]) for _ in range(5)]
    loader, made = look_ahead(Batches(raw), preprocessor, depth=1), []
    with device:
        for index, batch in enumerate(loader):
            device.compute.put(lambda: time.sleep(0.05))
            preprocessor.mean.fill_(index)
            made.append(preprocessor(batch, True)['inputs'] + 0)
    device.synchronize()
    for index, out in enumerate(made):
        assert torch.equal(out, ((torch.full((3, 4, 4), 9.0 - index)) / preprocessor.std)[None])


class DecodedOnDevice(Batches):
    """Makes each image on the device, on the current stream of the thread that loads."""

    def __init__(self, raw, device):
        super().__init__(raw)
        self.device = device

    def __iter__(self):
        for batch in super().__iter__():
            with self.device.use(self.device.current_stream()):
                images = [image + 0 for image in batch['inputs']]
            yield dict(batch, inputs=images)


@pytest.mark.parametrize('own_stream', [True, False])
@pytest.mark.parametrize('follows', [True, False])
def test_tensors_on_the_device_are_ordered_behind_the_stream_that_made_them(
    monkeypatch, follows, own_stream
):
    """Also where the model does not run on the device's default stream."""
    raw = batches()
    device = emulated.Device(0, most=0.02)
    preprocessor = wrapped(monkeypatch, device)
    monkeypatch.setattr(layout, 'is_on_host', lambda tensor: tensor.dim() != 3)
    loader = look_ahead(DecodedOnDevice(raw, device), preprocessor)
    if not follows:
        follow, calls = SideStream.follow, []

        def constants_only(self, stream):
            calls.append(stream)
            if len(calls) == 1:
                follow(self, stream)

        monkeypatch.setattr(SideStream, 'follow', constants_only)
    compute = emulated.Stream(device) if own_stream else device.compute
    sums, seen = [], []
    with device, device.use(compute):
        for index, batch in enumerate(loader):
            seen.append(batch['inputs'][0] + 0)  # as a hook does
            if index == 3:
                batch['note'] = 'changed'  # so that the work is done again
            out = preprocessor(batch, True)
            sums.append((out['inputs'] * 1).double().sum((1, 2, 3)))
            sums.append(torch.stack([sample.label for sample in out['data_samples']]) + 0)
    done = threading.Event()
    compute.put(done.set)
    assert done.wait(60)
    # Without the order the values may come out right by chance.
    assert right(sums, raw) or not follows
    assert bool(emulated.races(device)) != follows
    assert all(torch.equal(one, each['inputs'][0]) for one, each in zip(seen, raw, strict=True))


def test_begin_and_collect_never_make_the_host_wait(monkeypatch):
    raw = batches(8)
    device = emulated.Device(0)
    trained(device, wrapped(monkeypatch, device), raw, depth=8)
    assert device.host_waits == 0


@pytest.mark.parametrize('wraps', ['BaseDataPreprocessor', 'ImgDataPreprocessor'])
def test_one_copy_for_each_batch(monkeypatch, wraps):
    raw = batches(5)
    device = emulated.Device(0)
    preprocessor = wrapped(monkeypatch, device, wraps, **({'non_blocking': False}))
    with device:
        for batch in raw:
            before = len(device.log)
            begun(preprocessor, batch)
            preprocessor(batch, True)
            host = {t.untyped_storage().data_ptr() for t in batch['inputs']}
            host |= device.pinned._storages
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
        begun(preprocessor, raw)
        aside = [entry for entry in device.log if entry[0] == 'launch']
        assert {entry[1] for entry in aside if entry[2] == 'aten::copy_'} == {
            preprocessor.runtime.stream(torch.device('cpu')).stream.id
        }
        out = preprocessor(raw, False)
    device.synchronize()
    stock = toys.RandomPreprocessor(scale=2.0)(raw, False)
    assert torch.equal(out['inputs'], stock['inputs'])


def test_one_stream_for_the_loops_life(monkeypatch):
    device = emulated.Device(0)
    preprocessor = wrapped(monkeypatch, device)
    raw = batches(4)
    for _ in range(10):
        trained(device, preprocessor, raw)
    assert sum(entry[0] == 'stream' for entry in device.log) == 2


# -- devices that can do less ----------------------------------------------------------------------


@pytest.mark.parametrize('depth', [1, 4])
def test_a_device_without_record_stream(monkeypatch, depth):
    raw = batches()
    device = emulated.Device(0, marks=False)
    sums = trained(device, wrapped(monkeypatch, device), raw, depth)
    assert right(sums, raw)
    assert emulated.races(device) == []


def test_without_record_stream_memory_is_held_until_the_step_has_read_it(monkeypatch):
    device = emulated.Device(0, most=0, marks=False)
    preprocessor = wrapped(monkeypatch, device)
    side = preprocessor.runtime.stream(torch.device('cpu'))
    gate = threading.Event()
    first, *others = batches(3)
    with device:
        made = begun(preprocessor, first)
        memory = list(map(weakref.ref, made.work.memory))
        preprocessor(first, True)
        device.compute.put(gate.wait)  # the step
        preprocessor.withdraw(made)
        del made
        device._held.clear()
        begun(preprocessor, others[0])
        assert memory and all(each() is not None for each in memory)
        gate.set()
        device.synchronize()
        preprocessor.withdraw(Ticket(others[1], 'train'))
    device._held.clear()
    assert all(each() is None for each in memory)
    assert side._held  # of the batches that came later


def test_stream_of_a_device():
    assert stream_for(torch.device('cpu')).on_host
    one = stream_for(torch.device('mps'))
    assert type(one) is NoSideStream and not one.on_host
    assert StreamAPI(torch.device('cuda'))._module is torch.cuda


def test_an_unknown_kind_of_device_is_named():
    with pytest.raises(ValueError, match=r"'hpu'.*torch\.hpu.*prefetch_depth=0"):
        stream_for(torch.device('hpu'))


# -- overlap ---------------------------------------------------------------------------------------


class Immediate:
    """The stream functions of a device that does everything at once."""

    device = torch.device('cpu')

    def new_stream(self):
        return self

    new_event = current_stream = new_stream

    def use(self, stream):
        return contextlib.nullcontext()

    def nothing(self, *args):
        return True

    wait_stream = wait_event = record = query = record_use = set_stream = nothing


@toys.HOOKS.register_module(force=True)
class Syncs(toys.Hook):
    """Waits for the device at the end of each iteration, as clip_grad and AMP do."""

    priority = 'VERY_HIGH'

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        outputs['loss'].item()


@pytest.mark.parametrize('accelerator', [True, False])
@pytest.mark.parametrize('split', ['train', 'val', 'test'])
@pytest.mark.parametrize('depth', [1, 2, 4])
def test_the_next_batch_is_begun_before_the_step_ends(
    tmp_path, monkeypatch, split, depth, accelerator
):
    if accelerator:
        monkeypatch.setattr(ticket, 'stream_for', lambda _: SideStream(Immediate()))
        empty = torch.empty
        monkeypatch.setattr(
            torch, 'empty', lambda *args, pin_memory=False, **kwargs: empty(*args, **kwargs)
        )
    cfg = toys.config(tmp_path, workers=2, hooks=[dict(type='Syncs')],
                      train=dict(by_epoch=True, max_epochs=1, val_interval=1))  # fmt: skip
    cfg.update(
        test_dataloader=copy.deepcopy(cfg['val_dataloader']),
        test_cfg=dict(),
        test_evaluator=dict(type='ToyMetric'),
    )
    runner = toys.Runner.from_cfg(toys.prefetching(cfg, depth))
    begun = dict(train=0, val=0, test=0)
    begin = Preparation.begin

    def counted(self, made):
        begin(self, made)
        begun[made.split] += 1

    monkeypatch.setattr(Preparation, 'begin', counted)
    steps = dict(train=0, val=0, test=0)

    def step_of(name):
        real = getattr(type(runner.model), f'{name}_step')

        def step(self, data, *args, **kwargs):
            made = real(self, data, *args, **kwargs)
            steps[name] += 1
            # Four batches; the first is not begun, and is followed by up to `depth` that are.
            wanted = min(steps[name] + depth, 4) - 1
            deadline = time.monotonic() + 20
            while begun[name] < wanted:
                assert time.monotonic() < deadline, (name, steps, begun)
                time.sleep(0.001)
            return made

        monkeypatch.setattr(type(runner.model), f'{name}_step', step)

    for name in steps:
        step_of(name)
    if split == 'test':
        runner.test()
    else:
        runner.train()
    assert steps[split] == 4 and begun[split] == 3
