# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import copy
import math

import compare_weights
import pytest
import torch
from compare_weights import compare


@pytest.fixture
def checkpoint():
    state = {0: dict(step=torch.tensor(3.0), exp_avg=torch.rand(2, 3))}
    return dict(
        state_dict=dict(weight=torch.rand(2, 3), bias=torch.tensor([0.0, math.nan])),
        optimizer=dict(state=state, param_groups=[dict(lr=0.1, params=[0])]),
        meta=dict(time='now'),
    )


def test_equal_but_for_the_meta(checkpoint):
    other = copy.deepcopy(checkpoint)
    other['meta']['time'] = 'later'
    assert compare(checkpoint, other) == []


@pytest.mark.parametrize(
    ('path', 'value'),
    [
        ('state_dict.bias', torch.tensor([-0.0, math.nan])),
        ('state_dict.weight', torch.rand(2, 3)),
        ('state_dict.weight', torch.rand(6)),
        ('state_dict.weight', torch.rand(2, 3).double()),
        ('optimizer.state.0.exp_avg', torch.rand(2, 3)),
        ('optimizer.param_groups.0.lr', 0.2),
    ],
    ids=['sign of zero', 'value', 'shape', 'dtype', 'optimizer tensor', 'optimizer value'],
)
def test_names_what_differs(checkpoint, path, value):
    other = copy.deepcopy(checkpoint)
    node = other
    *parents, last = [int(part) if part.isdigit() else part for part in path.split('.')]
    for part in parents:
        node = node[part]
    node[last] = value
    assert compare(checkpoint, other) == [path]


def test_names_what_only_one_has(checkpoint):
    other = copy.deepcopy(checkpoint)
    other['state_dict']['extra'] = other['state_dict'].pop('bias')
    assert compare(checkpoint, other) == [
        'state_dict.bias (only in the first)',
        'state_dict.extra (only in the second)',
    ]


def test_exit_codes(checkpoint, call_main, capsys, tmp_path):
    torch.save(checkpoint, tmp_path / 'a.pth')
    torch.save(checkpoint, tmp_path / 'b.pth')
    checkpoint['state_dict']['weight'][0, 0] += 1
    torch.save(checkpoint, tmp_path / 'c.pth')
    torch.save(dict(meta={}), tmp_path / 'd.pth')
    assert call_main(compare_weights, tmp_path / 'a.pth', tmp_path / 'b.pth') == 0
    assert capsys.readouterr().out.startswith('bit-equal: state_dict and optimizer')
    assert call_main(compare_weights, tmp_path / 'a.pth', tmp_path / 'c.pth') == 1
    assert capsys.readouterr().out.splitlines()[1:] == ['  state_dict.weight']
    with pytest.raises(SystemExit, match=r'd\.pth holds no state_dict'):
        call_main(compare_weights, tmp_path / 'a.pth', tmp_path / 'd.pth')
