# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Bad input is named: the sample, the key, the value and what to write."""

import pytest
import torch

from mmprefetch.ops import normalize_batch

IMAGE = torch.zeros(3, 4, 5, dtype=torch.uint8)
FOUR = torch.zeros(4, 4, 5, dtype=torch.uint8)
C3, C4 = torch.ones(3), torch.ones(4)

OUT = torch.zeros(2, 3, 4, 5)

BAD = {
    'no tensor': (([IMAGE, IMAGE.numpy()],), {}, ('sample 1 is a ndarray', 'torch.from_numpy')),
    'out among the images': (([OUT[1], OUT[0]],), dict(out=OUT), ('out: shares', 'sample 0')),
    'out of shared elements': (
        ([IMAGE, IMAGE],),
        dict(out=OUT[:1].expand(2, 3, 4, 5)),
        ('out: strides (0,', 'of its own memory'),
    ),
    'three values on four channels': (([FOUR], C3, C3), {}, ('mean: 3 values', '4 channels')),
    'std alone does not fit': (([FOUR], C4, C3), {}, ('std: 3 values', '4 channels', 'sample 0')),
    'own constants of too few': (
        ([IMAGE] * 3, C3.repeat(2, 1), C3.repeat(3, 1)),
        {},
        ('mean: values for 2 samples', 'batch has 3', '(3, 3)'),
    ),
    'shape of constants': (([IMAGE], torch.ones(3, 2, 1), C3), {}, ('mean: shape (3, 2, 1)',)),
    'one of the two': (([IMAGE], C3, None), {}, ('std: None beside a mean', 'both')),
    'constants elsewhere': (([IMAGE], C3.to('meta'), C3), {}, ('mean: on meta', 'on cpu')),
    'no pixels': (([IMAGE, IMAGE[:, :0]],), {}, ('sample 1', '(3, 0, 5)', 'no pixels')),
    'mixed dtypes': (
        ([IMAGE, IMAGE, IMAGE.float()],),
        {},
        ('sample 2', 'dtype torch.float32', 'sample 0 has torch.uint8'),
    ),
    'mixed channels': (([IMAGE, FOUR],), {}, ('sample 1', 'channels 4', 'has 3')),
    'mixed dimensions': (([IMAGE, IMAGE[None]],), {}, ('sample 1', 'dimensions 4', 'has 3')),
    'not an image': (([IMAGE[0]],), {}, ('sample 0', '(4, 5)', '(C, H, W)')),
    'not a batch': ((IMAGE,), {}, ('(3, 4, 5)', '(N, C, H, W)')),
    'empty list': (([],), {}, ('empty sequence',)),
    'empty tensor': ((IMAGE[None][:0],), {}, ('(0, 3, 4, 5)', 'non-empty')),
    'order': (([FOUR],), {'channel_order': (2, 1, 0)}, ('channel_order: (2, 1, 0)', '4 channels')),
    'divisor': (([IMAGE],), {'size_divisor': 0}, ('size_divisor: 0', 'at least 1')),
    'divisor is no number of pixels': (
        ([IMAGE],),
        {'size_divisor': 1.5},
        ('size_divisor: 1.5', 'whole number'),
    ),
    'size and divisor': (
        ([IMAGE],),
        {'size': (8, 8), 'size_divisor': 4},
        ('size and size_divisor', '(8, 8) and 4', 'one of the two'),
    ),
    'size too small for one': (
        ([IMAGE, torch.zeros(3, 9, 5, dtype=torch.uint8)],),
        {'size': (6, 6)},
        ('size: (6, 6)', 'sample 1 is (9, 5)'),
    ),
    'out': (([IMAGE],), {'out': torch.zeros(1, 3, 4, 4)}, ('out:', '(1, 3, 4, 4)', '(1, 3, 4, 5)')),
    'dtype of out': (([IMAGE],), {'out': IMAGE[None]}, ('out: a torch.uint8', 'a torch.float32')),
}


@pytest.mark.parametrize('case', BAD)
def test_bad_input_is_named(case):
    args, keywords, parts = BAD[case]
    with pytest.raises(ValueError) as caught:
        normalize_batch(*args, **keywords)
    assert [part for part in parts if part not in str(caught.value)] == []
