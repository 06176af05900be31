# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Whether a class under the wrapper does what it does by itself."""

import copy
import random
from functools import partial

import numpy as np
import torch
import toys
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.engine import Call, Ticket
from mmprefetch.engine.transfer import Transfer
from mmprefetch.families import passes

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
DTYPES = (torch.uint8, torch.int16, torch.float16, torch.bfloat16, torch.float32)
few = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
sizes = st.lists(st.tuples(st.integers(1, 13), st.integers(1, 13)), min_size=1, max_size=4)
dtypes = st.sampled_from(DTYPES)
constants = st.sampled_from(
    (dict(), dict(mean=MEAN, std=STD), dict(mean=[127], std=[64]), dict(mean=MEAN, std=[2.5]))
)


def pixels(shape, dtype=torch.uint8, seed=0):
    """Images of random pixels."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(dtype)


def _generators():
    """The states of the three global generators."""
    return [random.getstate(), np.random.get_state(), torch.get_rng_state()]


def _seed():
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)


def _call(forward, raw, training):
    """The result, and what else the call did: whose list it returned, what it drew."""
    _seed()
    with torch.no_grad():
        result = forward(raw, training)
    samples = result.get('data_samples')
    returns_raw = samples is not None and samples is raw.get('data_samples')
    return result, [returns_raw, *_generators()]


def _strides(result):
    """Those of the images, which decide which kernels a model's layers run."""
    inputs = result.get('inputs')
    return [each.stride() for each in (inputs if isinstance(inputs, list) else [inputs])
            if isinstance(each, torch.Tensor)]  # fmt: skip


def begin(wrapper, raw, training):
    """Do what the loader thread does with a batch, and hand it out."""
    wrapper.runtime.calls['train'] = Call(training)  # as the model asked for the batch before
    ticket = Ticket(raw, 'train')
    wrapper.preparation('train').begin(ticket)
    wrapper.expect(ticket)


def _transferred(wrapper, raw, training):
    """Both parts of the family's work on a batch that lies in a staging buffer."""
    module, family = wrapper.effective(None)
    begun = family.begin(module, Transfer(raw, wrapper.device).issue(), training)
    return family.finish(module, begun, raw, training)


def assert_equal(cls, batch, training, fused=True, prepare=None, calls=1, **fields):
    """The wrapper's results are the class's own to the bit, and the raw batch is left as the
    class leaves it: called at once, with its work begun ahead, and from a staging buffer.

    Args:
        cls (type): The preprocessor's class.
        batch (dict): A batch; copies of it are used.
        training (bool): The flag.
        fused (bool): Whether the fused pass has to take part.
        prepare (callable, optional): Called with each preprocessor when it is built.
        calls (int): Batches in a row, for what a class keeps from one to the next.
        **fields: The class's arguments.
    """
    counted = []
    original = passes.normalize_batch

    def count(*args, **kwargs):
        counted.append(args)
        return original(*args, **kwargs)

    def build():
        made = cls(**copy.deepcopy(fields))
        if prepare is not None:
            prepare(made)
        return made

    stock = build()
    expected = []
    for _ in range(calls):
        raw = copy.deepcopy(batch)
        expected.append((*_call(stock, raw, training), raw))
    passes.normalize_batch = count
    try:
        for way in ('at once', 'ahead', 'transferred'):
            wrapper = PrefetchDataPreprocessor.around(build(), fields)
            counted.clear()
            for result, state, raw_after in expected:
                raw = copy.deepcopy(batch)
                if way == 'transferred':
                    got, got_state = _call(partial(_transferred, wrapper), raw, training)
                else:
                    if way == 'ahead':
                        _seed()
                        seeded = _generators()
                        begin(wrapper, raw, training)
                        assert toys.same(seeded, _generators()), 'numbers drawn ahead'
                        assert toys.same(raw, batch), 'the raw batch changed before it was due'
                    got, got_state = _call(wrapper, raw, training)
                assert toys.same(got, result), way
                assert _strides(got) == _strides(result), way
                assert toys.same(got_state, state), f'{way}: whose list, or generators'
                if way != 'transferred':  # what is changed in place is in the buffer there
                    assert toys.same(raw, raw_after), f'{way}: the raw batch'
            assert bool(counted) == fused, f'{way}: fused pass ran {len(counted)} times'
    finally:
        passes.normalize_batch = original
