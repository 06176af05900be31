# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The fused pass on CPU: a compiled kernel, a few threads, recycled memory."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import torch
from mmengine.logging import print_log
from torch import Tensor

from .memory import HostMemory
from .plan import Plan, identity_of, strides_of, table_of
from .reference import normalize as reference

# What the compiler knows; others, such as bfloat16, go through the reference.
_KINDS = {
    getattr(torch, name): np.empty(0, name)
    for name in ('uint8', 'int8', 'int16', 'uint16', 'int32', 'int64', 'float32', 'float64')
}
# Values of each thread; for fewer, a further one costs more than it does.
_LEAST_VALUES = 1 << 19

_memory = HostMemory()
_kernels: dict[torch.dtype, Callable | None] = {}
_compiling: dict[torch.dtype, threading.Thread] = {}
# A process that forked while another thread of it imports or compiles could do neither any more.
_lock = threading.RLock()
if hasattr(os, 'register_at_fork'):
    os.register_at_fork(
        before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_lock.release
    )


def normalize(plan: Plan) -> Tensor:
    """Do a batch. As long as the kernel is being compiled, the reference does it.

    Args:
        plan: The checked batch; the images are on CPU.

    Returns:
        The batch.
    """
    if plan.out is None:
        plan = plan._replace(out=_memory.empty(plan.shape, torch.float32))
    kernel = _kernel(plan.images[0].dtype)
    if kernel is None:
        with torch.no_grad():
            return reference(plan)
    _run(kernel, plan)
    return plan.out


def prepare(dtype: torch.dtype = torch.uint8) -> None:
    """Compile the kernel for images of a dtype, unless that has been done; wait for it.

    Args:
        dtype: Of the images.
    """
    with _lock:
        if dtype in _kernels or dtype not in _KINDS or not _has_numba():
            return
        try:
            from .numba import compiled

            _kernels[dtype] = compiled(_KINDS[dtype].dtype)
        except Exception as error:  # numba, LLVM and what they import share no base class
            _kernels[dtype] = None
            print_log(
                f'The fused pass for {dtype} images cannot be compiled ({error!r}): they are '
                'normalised by plain torch, to the same values in more time.',
                logger='current',
                level=logging.WARNING,
            )


def _kernel(dtype: torch.dtype) -> Callable | None:
    """The kernel for a dtype, None if there is none or none yet: no step waits for a compiler."""
    if dtype not in _kernels and dtype in _KINDS and _has_numba():
        thread = _compiling.get(dtype)
        if thread is None or not thread.is_alive():
            thread = threading.Thread(target=prepare, args=(dtype,), name='compile')
            _compiling[dtype] = thread
            thread.start()
    return _kernels.get(dtype)


def _run(kernel: Callable, plan: Plan) -> None:
    out, channels = plan.out, plan.shape[1]
    if plan.mean is None:  # x - 0 and x / 1 are x
        mean, std = np.zeros((1, channels), np.float32), np.ones((1, channels), np.float32)
    else:
        mean, std = (np.ascontiguousarray(each.detach().numpy()) for each in (plan.mean, plan.std))
    fixed = (
        _KINDS[plan.images[0].dtype],
        table_of(plan),
        mean,
        std,
        np.array(plan.orders or [plan.order or identity_of(channels)], np.int64),
        out.data_ptr(),
        (channels, *(plan.shape[2:] if len(plan.shape) == 5 else (1, *plan.shape[2:]))),
        (out.stride(0), *strides_of(out.stride()[1:])),
        np.float32(plan.pad_value),
    )
    planes = out.shape[:-2].numel()
    threads = min(torch.get_num_threads(), planes, max(out.numel() // _LEAST_VALUES, 1))
    if threads == 1:
        kernel(*fixed, 0, planes)
        return
    cuts = [planes * part // threads for part in range(threads + 1)]
    pool = _pool(os.getpid())
    others = [pool.submit(kernel, *fixed, *part) for part in pairwise(cuts[1:])]
    try:
        kernel(*fixed, 0, cuts[1])
    finally:
        for other in others:  # the memory has to be there until the last one is done
            other.result()


@cache
def _pool(process: int) -> ThreadPoolExecutor:
    """The threads of a process. A forked one has none of those that its parent had."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix='normalize')


@cache
def _has_numba() -> bool:
    if find_spec('numba') is not None:
        return True
    print_log(
        'numba is not installed: on the CPU, images are normalised by plain torch, to the same '
        'values in several times the time. Install it with `pip install numba`, or mmprefetch '
        'with its extra `cpu`.',
        logger='current',
        level=logging.WARNING,
    )
    return False
