# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import numpy as np
import torch

from mmprefetch.demo import PackImageInputs


def test_packs_image_and_label():
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    packed = PackImageInputs()(dict(img=image, img_path='a.png', ori_shape=(2, 4), gt_label=7))
    assert sorted(packed) == ['data_samples', 'inputs']
    assert packed['inputs'].dtype == torch.uint8
    assert packed['inputs'].is_contiguous()
    assert torch.equal(packed['inputs'], torch.from_numpy(image).permute(2, 0, 1))
    sample = packed['data_samples']
    assert sample.metainfo == dict(img_path='a.png', ori_shape=(2, 4))
    assert sample.gt_label.dtype == torch.int64 and sample.gt_label.tolist() == [7]
