# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""An accelerator emulated on the CPU: its streams are queues, its memory is host memory.

While a :class:`Device` is active in a thread, every torch operation that computes is queued on
that thread's current stream and returns at once; until it runs, its output holds rubbish. Each
stream has a thread of its own that runs its queue with random delays. So an order that nobody has
asked for does not hold by chance: a missing wait shows as a wrong value. The main thread enters the
device; any other works on host memory, at once, but where it uses a stream.
"""

import contextlib
import queue
import random
import threading
import time
import weakref

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


class _Issue(TorchDispatchMode):
    """Queues what one thread computes."""

    def __init__(self, device):
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.device.dispatch(func, args, kwargs or {})


class PinnedMemory:
    """Pinned memory that is given out again as soon as Python has let go of it, whatever the device
    still reads: unlike torch's own allocator for CUDA."""

    def __init__(self, empty):
        self._empty = empty
        self._free = []
        self._storages = set()

    def empty(self, nbytes):
        whole = next((each for each in self._free if each.numel() >= nbytes), None)
        if whole is None:
            whole = self._empty(1 << max(nbytes - 1, 1).bit_length(), dtype=torch.uint8)
            self._storages.add(whole.untyped_storage().data_ptr())
        else:
            self._free = [each for each in self._free if each is not whole]
        given = whole[:nbytes]
        weakref.finalize(given, self._free.append, whole)
        return given

    def unowned(self, thing):
        """What a queue may hold of its arguments without holding the memory."""
        if isinstance(thing, torch.Tensor):
            pinned = thing.untyped_storage().data_ptr() in self._storages
            return thing.detach() if pinned else thing
        if isinstance(thing, (tuple, list)):
            return type(thing)(map(self.unowned, thing))
        if isinstance(thing, dict):
            return {key: self.unowned(item) for key, item in thing.items()}
        return thing


class Device:
    """The emulated device, and the interface that the engine's streams are written against.

    Args:
        seed (int): Of the delays.
        most (float): The longest delay of an operation, in seconds.
        marks (bool): Whether it can be told who reads memory (``record_stream``).
    """

    def __init__(self, seed=0, most=0.002, marks=True):
        self.device = torch.device('cpu')
        self.log = []
        self.recorded = []
        self.host_waits = 0
        self.marks = marks
        self.pinned = PinnedMemory(torch.empty)
        self._held = []
        self.most = most
        self._random = random.Random(seed)
        self._ids = 0
        self.compute = Stream(self)
        self._of_thread = threading.local()
        self._modes = []

    def __enter__(self):
        self._modes.append(_Issue(self))
        self._modes[-1].__enter__()
        return self

    def __exit__(self, *exception):
        self._modes.pop().__exit__(*exception)

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
        return getattr(self._of_thread, 'stream', self.compute)

    def set_stream(self, stream):
        self._of_thread.stream = stream

    @contextlib.contextmanager
    def use(self, stream):
        before, self._of_thread.stream = self.current_stream(), stream
        main = threading.current_thread() is threading.main_thread()
        try:
            with contextlib.nullcontext() if main else _Issue(self):
                yield
        finally:
            self._of_thread.stream = before

    def record_use(self, tensor, stream):
        if not self.marks:
            raise NotImplementedError('record_stream')
        self.recorded.append((tensor.untyped_storage().data_ptr(), stream.id))

    # -- operations ----------------------------------------------------------------------------

    def dispatch(self, func, args, kwargs):
        args, kwargs = self.pinned.unowned(args), self.pinned.unowned(kwargs)
        schema = func._schema
        aliases = [a.alias_info for a in (*schema.arguments, *schema.returns) if a.alias_info]
        written = [alias for alias in aliases if alias.is_write]
        if aliases and not written:
            return func(*args, **kwargs)  # a view
        name = schema.name
        if name in ('aten::empty', 'aten::empty_strided', 'aten::empty_like', 'aten::detach'):
            return func(*args, **kwargs)
        if name in ('aten::_local_scalar_dense', 'aten::equal'):
            raise AssertionError(f'{name} makes the host wait for the device')
        stream = self.current_stream()
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
        if not outputs:
            return out  # a question, such as whether it is pinned
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
