# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""An accelerator emulated on the CPU: its streams are queues, its memory is host memory.

While a :class:`Device` is active, every torch operation that computes is queued on the calling
thread's current stream and returns at once; until it runs, its output holds rubbish. Each stream
has a thread of its own that runs its queue with random delays. So an order that nobody has asked
for does not hold by chance: a missing wait shows as a wrong value.
"""

import contextlib
import queue
import random
import threading
import time

import torch
from torch.utils._python_dispatch import TorchDispatchMode

RUBBISH = 77


class Event:
    def __init__(self, device):
        self.device = device
        self.done = threading.Event()
        self.done.set()
        self.id = device.next_id()
        device.log.append(('event', self.id))

    def record(self, stream):
        done = self.done = threading.Event()
        self.device.log.append(('record', self.id, stream.id))
        stream.put(done.set)

    def query(self):
        return self.done.is_set()

    def synchronize(self):
        self.device.host_waits += 1
        self.done.wait()


class Stream:
    def __init__(self, device):
        self.device = device
        self.id = device.next_id()
        device.log.append(('stream', self.id))
        self.work = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self):
        while (item := self.work.get()) is not None:
            time.sleep(self.device.delay())
            item()

    def put(self, item):
        self.work.put(item)

    def wait_event(self, event):
        self.device.log.append(('wait', event.id, self.id))
        done = event.done
        self.put(done.wait)

    def wait_stream(self, other):
        event = Event(self.device)
        event.record(other)
        self.wait_event(event)


class Device(TorchDispatchMode):
    """The emulated device, and the interface that the engine's streams are written against.

    Args:
        seed (int): Of the delays.
        most (float): The longest delay of an operation, in seconds.
    """

    def __init__(self, seed=0, most=0.002):
        super().__init__()
        self.device = torch.device('cpu')
        self.log = []
        self.recorded = []
        self.host_waits = 0
        self._held = []
        self.most = most
        self._random = random.Random(seed)
        self._ids = 0
        self.compute = Stream(self)
        self._current = self.compute
        self._issuing = threading.get_ident()

    def next_id(self):
        self._ids += 1
        return self._ids

    def delay(self):
        return self._random.random() * self.most if self._random.random() < 0.3 else 0.0

    # -- what the engine asks of a device ----------------------------------------------------

    def new_stream(self):
        return Stream(self)

    def new_event(self):
        return Event(self)

    def current_stream(self):
        return self._current

    @contextlib.contextmanager
    def use(self, stream):
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def on_host(self, function):
        """Make a function work on host memory, at once, whatever stream is current."""

        def wrapped(*args, **kwargs):
            self._issuing, before = None, self._issuing
            try:
                return function(*args, **kwargs)
            finally:
                self._issuing = before

        return wrapped

    def record_use(self, tensor, stream):
        self.recorded.append((tensor.untyped_storage().data_ptr(), stream.id))

    # -- operations ----------------------------------------------------------------------------

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        schema = func._schema
        aliases = [a.alias_info for a in (*schema.arguments, *schema.returns) if a.alias_info]
        written = [alias for alias in aliases if alias.is_write]
        if threading.get_ident() != self._issuing:
            return func(*args, **kwargs)  # the host's own work, as staging in the loader thread
        if aliases and not written:
            return func(*args, **kwargs)  # a view
        name = schema.name
        if name in ('aten::empty', 'aten::empty_strided', 'aten::empty_like', 'aten::detach'):
            return func(*args, **kwargs)
        if name in ('aten::_local_scalar_dense', 'aten::equal'):
            raise AssertionError(f'{name} makes the host wait for the device')
        stream = self._current
        if written:
            targets = [
                value
                for argument, value in zip(schema.arguments, args, strict=False)
                if argument.alias_info and argument.alias_info.is_write
            ] + [
                value
                for key, value in kwargs.items()
                for argument in schema.arguments
                if argument.name == key and argument.alias_info and argument.alias_info.is_write
            ]
            out = kwargs.get('out', targets[0] if targets else args[0])
            self._note(name, stream, (args, kwargs), targets)
            stream.put(lambda: func(*args, **kwargs))
            return out
        out = func(*args, **kwargs)
        outputs = out if isinstance(out, (tuple, list)) else [out]
        outputs = [value for value in outputs if isinstance(value, torch.Tensor)]
        for value in outputs:
            value.fill_(RUBBISH if value.dtype != torch.bool else True)
        self._note(name, stream, (args, kwargs), outputs)

        def run():
            made = func(*args, **kwargs)
            made = made if isinstance(made, (tuple, list)) else [made]
            for value, right in zip(outputs, made, strict=True):
                value.copy_(right)

        stream.put(run)
        return out

    def _note(self, name, stream, inputs, outputs):
        reads = {t.untyped_storage().data_ptr() for t in _tensors(inputs) if t.numel()}
        writes = {t.untyped_storage().data_ptr() for t in outputs if t.numel()}
        self.log.append(('launch', stream.id, name, reads - writes, writes))
        # While memory is held its address means one thing; a device's allocator takes care of
        # memory that is free.
        self._held.append((inputs, outputs))

    def synchronize(self):
        """Wait until all that was queued on the compute stream has run."""
        done = threading.Event()
        self.compute.put(done.set)
        assert done.wait(60)


def _tensors(thing):
    if isinstance(thing, torch.Tensor):
        yield thing
    elif isinstance(thing, (tuple, list)):
        for item in thing:
            yield from _tensors(item)
    elif isinstance(thing, dict):
        for item in thing.values():
            yield from _tensors(item)


def races(device):
    """Check the schedule for accesses that nothing puts in order, as torch's CUDA sanitizer does.

    Returns:
        list: The sanitizer's errors.
    """
    from torch.cuda._sanitizer import EventHandler

    handler = EventHandler()
    found = []
    for kind, *entry in device.log:
        if kind == 'stream':
            handler._handle_stream_creation(entry[0])
        elif kind == 'event':
            handler._handle_event_creation(entry[0])
        elif kind == 'record':
            handler._handle_event_record(*entry)
        elif kind == 'wait':
            handler._handle_event_wait(*entry)
        else:
            stream, name, reads, writes = entry
            names = {pointer: [str(pointer)] for pointer in reads | writes}
            found += handler._handle_kernel_launch(stream, reads, writes, writes, name, names)
    return found
