# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A dataloader that can save its position saves that of the batch in use."""

import pytest
import toys
from mmengine.dataset import pseudo_collate

from mmprefetch import PrefetchDataPreprocessor, look_ahead

StatefulDataLoader = pytest.importorskip('torchdata.stateful_dataloader').StatefulDataLoader
IMG = {key: value for key, value in toys.IMG.items() if key != 'type'}


def loader_of(workers, thread, depth):
    dataloader = StatefulDataLoader(
        toys.ToyImages(length=24), batch_size=2, num_workers=workers, collate_fn=pseudo_collate
    )
    return look_ahead(dataloader, PrefetchDataPreprocessor(**IMG), 'train', depth, thread)


def ids(batch):
    return [sample.index for sample in batch['data_samples']]


@pytest.mark.parametrize('at', [1, 2, 5, 12])
@pytest.mark.parametrize('depth', [0, 1, 3])
@pytest.mark.parametrize(('workers', 'thread'), [(0, None), (0, True), (2, None)])
def test_no_sample_is_lost_or_repeated_after_a_resume(workers, thread, depth, at):
    loader = loader_of(workers, thread, depth)
    seen, state = [], None
    for batch in loader:
        loader._preprocessor(batch, True)
        seen += ids(batch)
        if len(seen) == 2 * at:
            state = loader.state_dict()
            break
    loader.close()
    again = loader_of(workers, thread, depth)
    again.load_state_dict(state)
    for batch in again:
        again._preprocessor(batch, True)
        seen += ids(batch)
    again.close()
    assert seen == list(range(24))


def test_a_dataloader_without_a_position_has_none():
    loader = look_ahead([], PrefetchDataPreprocessor(**IMG))
    assert not hasattr(loader, 'state_dict')
