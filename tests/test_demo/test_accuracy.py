# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import torch

from mmprefetch.demo import TopOneAccuracy


def test_counts_right_predictions_over_all_batches():
    metric = TopOneAccuracy()
    pairs = [(1, 1), (2, 0), (3, 3), (0, 0), (4, 1)]
    samples = [
        dict(pred_label=torch.tensor([pred]), gt_label=torch.tensor([label]))
        for pred, label in pairs
    ]
    metric.process({}, samples[:2])
    metric.process({}, samples[2:])
    assert metric.evaluate(size=5) == {'accuracy/top1': 60.0}
