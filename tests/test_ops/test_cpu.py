# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The compiled pass on CPU: threads, processes, compilation, and what happens without it."""

import multiprocessing
import os
import platform
import re
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from mmprefetch.ops import cpu, normalize_batch, prepare
from mmprefetch.ops.plan import plan_batch
from mmprefetch.ops.reference import normalize as reference

needs_numba = pytest.mark.skipif(find_spec('numba') is None, reason='numba is not installed')

MEAN, STD = torch.tensor([123.675, 116.28, 103.53]), torch.tensor([58.395, 57.12, 57.375])
WORK = dict(size_divisor=32, channel_order=(2, 1, 0), pad_value=3)


def ragged(count=5):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randint(0, 256, (3, 90 + index, 130), dtype=torch.uint8, generator=generator)
        for index in range(count)
    ]


def right(images=None):
    """Whether the pass gives what the reference gives."""
    images = ragged() if images is None else images
    expected = reference(plan_batch(images, MEAN, STD, **WORK))
    return torch.equal(normalize_batch(images, MEAN, STD, **WORK), expected)


@pytest.fixture
def kernel():
    prepare()
    assert cpu._kernels[torch.uint8] is not None
    return cpu._kernels[torch.uint8]


@pytest.fixture
def threads(monkeypatch):
    """Small batches are divided as large ones are."""
    monkeypatch.setattr(cpu, '_LEAST_VALUES', 1)
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def nothing_compiled(monkeypatch):
    monkeypatch.setattr(cpu, '_kernels', {})
    monkeypatch.setattr(cpu, '_compiling', {})


@needs_numba
@pytest.mark.parametrize('count', [1, 2, 3, 100])
def test_planes_are_divided_among_as_many_threads_as_torch_has(monkeypatch, kernel, threads, count):
    parts = []

    def recorded(*arguments):
        parts.append(arguments[-2:])
        kernel(*arguments)

    monkeypatch.setitem(cpu._kernels, torch.uint8, recorded)
    threads(count)
    assert right()
    parts.sort()
    assert len(parts) == min(count, 15)
    assert [start for start, _ in parts[1:]] == [stop for _, stop in parts[:-1]]
    assert (parts[0][0], parts[-1][1]) == (0, 15)


@needs_numba
def test_small_batches_are_not_divided(monkeypatch, kernel):
    monkeypatch.setattr(torch, 'get_num_threads', lambda: 4)
    monkeypatch.setattr(cpu, '_pool', None)
    assert right()


@needs_numba
def test_an_error_in_one_thread_is_raised_when_all_are_done(monkeypatch, kernel, threads):
    done = []

    def failing(*arguments):
        if arguments[-2]:
            done.append(kernel(*arguments))
        else:
            raise RuntimeError('the first part')

    monkeypatch.setitem(cpu._kernels, torch.uint8, failing)
    threads(3)
    with pytest.raises(RuntimeError, match='the first part'):
        right()
    assert len(done) == 2


@needs_numba
def test_several_at_a_time(kernel, threads):
    threads(2)
    batches = [ragged(count) for count in (1, 2, 3, 4)] * 5
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(right, batches))


def _send(connection, threads):
    torch.set_num_threads(threads)
    cpu._LEAST_VALUES = 1
    prepare()
    # Compared by the parent: torch's own threads are not there after a fork.
    connection.send(normalize_batch(ragged(), MEAN, STD, **WORK).numpy().tobytes())


@needs_numba
@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_in_another_process(kernel, threads, method):
    threads(2)
    assert right()  # the threads of this process are there
    context = multiprocessing.get_context(method)
    mine, its = context.Pipe()
    process = context.Process(target=_send, args=(its, 2))
    process.start()
    assert mine.poll(120)
    assert mine.recv() == normalize_batch(ragged(), MEAN, STD, **WORK).numpy().tobytes()
    process.join()


@needs_numba
@pytest.mark.skipif(not hasattr(os, 'fork'), reason='needs fork')
def test_a_fork_waits_for_what_is_being_compiled(nothing_compiled):
    began, go_on = threading.Event(), threading.Event()

    def hold():
        with cpu._lock:
            began.set()
            go_on.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    began.wait()
    threading.Timer(0.2, go_on.set).start()
    child = os.fork()
    if child == 0:
        prepare()
        os._exit(0 if torch.uint8 in cpu._kernels else 1)
    assert go_on.is_set()
    thread.join()
    assert os.waitpid(child, 0)[1] == 0


@needs_numba
def test_nobody_waits_for_the_compiler(monkeypatch, nothing_compiled):
    go_on, asked = threading.Event(), []

    def compiling(dtype):
        asked.append(dtype)
        go_on.wait(10)
        return compiled(dtype)

    from mmprefetch.ops import numba

    compiled = numba.compiled
    monkeypatch.setattr(numba, 'compiled', compiling)
    assert right() and right()
    assert cpu._kernels == {}
    go_on.set()
    cpu._compiling[torch.uint8].join()
    assert right() and cpu._kernels[torch.uint8] is not None
    assert asked == [np.dtype('uint8')]


@needs_numba
def test_what_cannot_be_compiled_is_said_once(monkeypatch, nothing_compiled, capsys):
    from mmprefetch.ops import numba

    def broken(dtype):
        raise OSError('no LLVM')

    monkeypatch.setattr(numba, 'compiled', broken)
    for _ in range(2):
        prepare()
        assert right()
    assert len(re.findall('torch.uint8 images cannot be compiled.*no LLVM', all_of(capsys))) == 1


def all_of(capsys):
    captured = capsys.readouterr()
    return captured.out + captured.err


@needs_numba
def test_without_a_place_on_the_disk_it_is_kept_in_memory(monkeypatch):
    from mmprefetch.ops import numba

    original, tried = numba.njit, []

    def njit(*arguments, cache=False, **options):
        tried.append(cache)
        if cache:
            raise RuntimeError('cannot cache function: no locator available')
        return original(*arguments, **options)

    monkeypatch.setattr(numba, 'njit', njit)
    kernel = numba.compiled(np.dtype('uint8'))
    assert tried == [True, False]
    monkeypatch.setitem(cpu._kernels, torch.uint8, kernel)
    assert right()


def test_without_numba_one_line_says_what_to_install():
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == 'numba' else find(name, *a)
from test_cpu import right
from mmprefetch.ops import prepare
prepare()
assert right() and right() and 'numba' not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, '-c', code],
        env={**os.environ, 'PYTHONPATH': os.pathsep.join([os.path.dirname(__file__), *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count('pip install numba') == 1


@needs_numba
def test_the_division_is_one():
    from mmprefetch.ops import numba

    kernel = numba.njit(**numba._OPTIONS)(numba._planes)
    table, orders = np.zeros((1, 9), np.int64), np.zeros((1, 3), np.int64)
    ones, extent, strides = np.ones((1, 3), np.float32), (3, 1, 1, 1), (0,) * 5
    like, pad_value = np.empty(0, np.uint8), np.float32(0)
    kernel(like, table, ones, ones, orders, 0, extent, strides, pad_value, 0, 0)
    (code,) = kernel.inspect_llvm().values()
    divisions = re.findall(r'= fdiv (.*)', code)
    assert divisions and all(re.match(r'(float|<\d+ x float>) ', each) for each in divisions)
    assert any('x float>' in each for each in divisions)  # of vectors
    (code,) = kernel.inspect_asm().values()
    if platform.machine() == 'x86_64':
        assert 'divps' in code and not re.search('fmadd|fmsub|rcp', code)
