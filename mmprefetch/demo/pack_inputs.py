# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The last step of the pipeline of the first run."""

import numpy as np
import torch
from mmcv.transforms import BaseTransform
from mmengine.registry import TRANSFORMS
from mmengine.structures import BaseDataElement


@TRANSFORMS.register_module()
class PackImageInputs(BaseTransform):
    """Pack a loaded image and its label into the form that models take.

    Takes ``img``, an (H, W, C) array, and ``gt_label``, an int. Gives a dict of ``inputs``, a
    (C, H, W) tensor of the image's dtype, and ``data_samples``, a ``BaseDataElement`` that holds
    ``gt_label``, a (1,) int64 tensor, and the metainfo ``img_path`` and ``ori_shape``.
    """

    def transform(self, results: dict) -> dict:
        """Pack one image.

        Args:
            results (dict): What the pipeline has loaded so far.

        Returns:
            dict: ``inputs`` and ``data_samples``, see the class.
        """
        image = np.ascontiguousarray(results['img'].transpose(2, 0, 1))
        sample = BaseDataElement(
            metainfo=dict(img_path=results['img_path'], ori_shape=results['ori_shape']),
            gt_label=torch.tensor([results['gt_label']], dtype=torch.int64),
        )
        return dict(inputs=torch.from_numpy(image), data_samples=sample)
