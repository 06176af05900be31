# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""However a run ends, nothing goes on: no thread, no worker process, no shared memory."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import toys
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mmengine.runner import Runner

ROOT = Path(__file__).parents[1]


@HOOKS.register_module(force=True)
class Raise(Hook):
    def __init__(self, where, error):
        self.where, self.error = where, error

    def _raise(self, runner, here):
        if here == self.where and runner.iter == 5:
            raise self.error

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        self._raise(runner, 'before')
        if self.where == 'step' and runner.iter == 5:
            step = runner.model.train_step

            def failing(*args, **kwargs):
                step(*args, **kwargs)
                raise self.error

            runner.model.train_step = failing

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self._raise(runner, 'after')

    def before_val_iter(self, runner, batch_idx, data_batch=None):
        if self.where == 'val':
            raise self.error


def shared_memory():
    return {name for name in os.listdir('/dev/shm') if name.startswith(('torch_', 'psm_', 'sem.'))}


def running():
    threads = {thread.name for thread in threading.enumerate()}
    return threads, {child.pid for child in multiprocessing.active_children()}


def settled(before):
    """What runs that did not run before, once what is ending has ended."""
    deadline = time.monotonic() + 15
    while True:
        gc.collect()
        threads, children = running()
        left = threads - before[0], children - before[1]
        if left == (set(), set()) or time.monotonic() > deadline:
            return left
        time.sleep(0.1)


@pytest.mark.parametrize('train', [None, dict(by_epoch=False, max_iters=8, val_interval=3)],
                         ids=['epochs', 'iterations'])  # fmt: skip
@pytest.mark.parametrize(
    ('where', 'persistent'),
    [
        ('nowhere', False),
        ('step', False),
        ('before', False),
        ('after', False),
        ('after', True),
        ('val', False),
        ('interrupt', True),
    ],
)
def test_nothing_is_left_in_the_process(tmp_path, where, train, persistent):
    error = KeyboardInterrupt() if where == 'interrupt' else LookupError('as asked')
    place = 'after' if where == 'interrupt' else where
    hook = dict(type='Raise', where=place, error=error)
    cfg = toys.prefetching(toys.config(tmp_path, workers=2, hooks=[hook], train=train))
    for split in ('train', 'val'):
        cfg[f'{split}_dataloader'].persistent_workers = persistent
    before = running()
    runner = Runner.from_cfg(cfg)
    if where == 'nowhere':
        runner.train()
    else:
        with pytest.raises(type(error)):
            runner.train()
    # At once, not when memory is collected.
    assert not {name for name in running()[0] if name.startswith('mmprefetch')}
    del runner, error, hook, cfg
    assert settled(before) == (set(), set())


SCRIPT = """
import atexit, sys, threading
# Runs last of all, since it is registered first.
atexit.register(lambda: print('left:', [
    thread.name for thread in threading.enumerate() if thread.name.startswith('mmprefetch')]))
sys.path[:0] = [{root!r}, {tests!r}]
import time, toys
toys.ToyImages.__getitem__ = (lambda get: lambda self, i: (time.sleep(0.05), get(self, i))[1])(
    toys.ToyImages.__getitem__)
cfg = toys.prefetching(toys.config({work!r}, workers=2, train=dict(by_epoch=True, max_epochs=500)))
runner = toys.Runner.from_cfg(cfg)
if {how!r} == 'exit':
    iterator = iter(runner.train_loop.dataloader)
    batch = next(iterator)
    runner.model.data_preprocessor(batch, True)
    while iterator._thread._ready.empty():
        time.sleep(0.01)  # the thread has run ahead, and waits
    print('training', flush=True)
    sys.exit(0)
print('training', flush=True)
runner.train()
"""


def children_of(group):
    found = []
    for entry in Path('/proc').iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / 'stat').read_text().rsplit(')', 1)[1].split()
            except (FileNotFoundError, ProcessLookupError):
                continue  # it has ended meanwhile
            if int(fields[2]) == group and fields[0] != 'Z':
                found.append(int(entry.name))
    return found


@pytest.mark.parametrize('how', [signal.SIGINT, signal.SIGTERM, 'exit'], ids=str)
def test_nothing_is_left_when_the_process_ends(tmp_path, how):
    script = SCRIPT.format(
        root=str(ROOT), tests=str(ROOT / 'tests'), work=str(tmp_path), how=str(how)
    )
    before = shared_memory()
    process = subprocess.Popen(
        [sys.executable, '-c', script],
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while (line := process.stdout.readline()) and line.strip() != 'training':
        pass
    if how != 'exit':
        # Into an epoch: between two of them there are no workers.
        deadline = time.monotonic() + 60
        while len(children_of(process.pid)) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(children_of(process.pid)) >= 3
        os.killpg(process.pid, how) if how == signal.SIGINT else os.kill(process.pid, how)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == (0 if how == 'exit' else -how if how == signal.SIGTERM else 1) or (
        how == signal.SIGINT and process.returncode in (130, -signal.SIGINT)
    ), errors
    if how != signal.SIGTERM:
        assert 'left: []' in output
    deadline = time.monotonic() + 30
    while children_of(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert children_of(process.pid) == []
    assert shared_memory() - before == set()


LOCKED = """
import os, signal, sys, time
sys.path[:0] = [{root!r}, {tests!r}]
import toys
first = toys.ToyImages.__getitem__
toys.ToyImages.__getitem__ = lambda self, index: (
    time.sleep(600) if os.path.exists({work!r} + '/slow') else first(self, index))
cfg = toys.prefetching(toys.config({work!r}, workers=1))
cfg.train_dataloader.prefetch_factor = 1
runner = toys.Runner.from_cfg(cfg)
dataloader = runner.train_loop.dataloader
passing = iter(dataloader)
batch = next(passing)
open({work!r} + '/slow', 'w').close()
runner.model.data_preprocessor(batch, True)
while passing._thread is None or not passing._thread._ready.empty():
    next(passing)
passing._iterator._data_queue._wlock.acquire()  # as a worker does before it writes
try:
    os.kill(passing._iterator._workers[0].pid, signal.SIGKILL)
    time.sleep(60)
except RuntimeError as error:  # torch's, from its handler of the signal
    assert 'killed by signal' in str(error)
{end}
"""


@pytest.mark.parametrize('end', ['dataloader.close()', 'sys.exit(0)'])
def test_a_worker_killed_as_it_writes_holds_nothing_up(tmp_path, end):
    script = LOCKED.format(root=str(ROOT), tests=str(ROOT / 'tests'), work=str(tmp_path), end=end)
    run = subprocess.run(
        [sys.executable, '-c', script], capture_output=True, text=True, timeout=120
    )
    assert run.returncode == 0, run.stderr
