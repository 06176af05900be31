# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import pytest
import torch
from mmengine.structures import BaseDataElement
from torch.nn import functional as F

from mmprefetch.demo import SimpleClassifier


@pytest.fixture
def model():
    return SimpleClassifier(num_classes=4, channels=(8, 16), strides=(1, 2)).eval()


def make_samples(labels):
    return [
        BaseDataElement(metainfo=dict(img_path=f'{index}.png'), gt_label=torch.tensor([label]))
        for index, label in enumerate(labels)
    ]


def test_tensor_gives_logits(model):
    assert model(torch.rand(3, 3, 8, 8)).shape == (3, 4)


def test_loss_is_the_cross_entropy_of_the_labels(model):
    inputs = torch.rand(3, 3, 8, 8)
    losses = model(inputs, make_samples([0, 3, 1]), mode='loss')
    assert list(losses) == ['loss']
    expected = F.cross_entropy(model(inputs), torch.tensor([0, 3, 1]))
    assert torch.equal(losses['loss'], expected)


def test_predict_adds_to_new_samples(model):
    inputs, samples = torch.rand(3, 3, 8, 8), make_samples([0, 3, 1])
    predicted = model(inputs, samples, mode='predict')
    logits = model(inputs)
    for sample, result, row in zip(samples, predicted, logits, strict=True):
        assert sorted(sample.keys()) == ['gt_label']
        assert result.metainfo == sample.metainfo
        assert torch.equal(result.gt_label, sample.gt_label)
        assert result.pred_label.tolist() == [row.argmax().item()]
        torch.testing.assert_close(result.pred_score, row.softmax(0))


def test_predict_works_without_samples(model):
    assert len(model(torch.rand(2, 3, 8, 8), mode='predict')) == 2


def test_unknown_mode_lists_the_known_ones(model):
    with pytest.raises(ValueError, match="mode='train': write 'loss', 'predict' or 'tensor'"):
        model(torch.rand(1, 3, 8, 8), mode='train')
