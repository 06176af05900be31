# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The metric of the first run: how many images are told right."""

from collections.abc import Sequence

from mmengine.evaluator import BaseMetric
from mmengine.registry import METRICS


@METRICS.register_module()
class TopOneAccuracy(BaseMetric):
    """Per cent of the images whose highest score is that of their label (``accuracy/top1``)."""

    default_prefix = 'accuracy'

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Note for each image of a batch whether it was right.

        Args:
            data_batch (dict): The raw batch; not used.
            data_samples (Sequence[dict]): Predictions with ``pred_label`` and ``gt_label``, (1,)
                int64 tensors each.
        """
        self.results.extend(
            bool((sample['pred_label'] == sample['gt_label']).all()) for sample in data_samples
        )

    def compute_metrics(self, results: list[bool]) -> dict[str, float]:
        """Average over all images.

        Args:
            results (list[bool]): One entry per image.

        Returns:
            dict[str, float]: ``top1`` in per cent.
        """
        return dict(top1=100.0 * sum(results) / len(results))
