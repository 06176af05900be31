# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The model of the first run: a small convolutional classifier."""

import torch
from mmcv.cnn import ConvModule
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from mmengine.structures import BaseDataElement
from torch import Tensor, nn
from torch.nn import functional as F


@MODELS.register_module()
class SimpleClassifier(BaseModel):
    """A few convolutions, global average pooling and one linear layer.

    Args:
        num_classes (int): Number of classes.
        channels (tuple[int]): Output channels of each convolution. Defaults to (32, 64, 128).
        strides (tuple[int]): Stride of each convolution. Defaults to (1, 1, 2).
        in_channels (int): Channels of the image. Defaults to 3.
        data_preprocessor (dict, optional): Config of the data preprocessor. Defaults to None.
        init_cfg (dict, optional): Config of the initialisation. Defaults to None.
    """

    def __init__(
        self,
        num_classes: int,
        channels: tuple[int, ...] = (32, 64, 128),
        strides: tuple[int, ...] = (1, 1, 2),
        in_channels: int = 3,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        widths = (in_channels, *channels)
        self.backbone = nn.Sequential(
            *(
                ConvModule(before, after, 3, stride=stride, padding=1, norm_cfg=dict(type='BN'))
                for before, after, stride in zip(widths[:-1], channels, strides, strict=True)
            )
        )
        self.head = nn.Linear(channels[-1], num_classes)

    def forward(
        self,
        inputs: Tensor,
        data_samples: list[BaseDataElement] | None = None,
        mode: str = 'tensor',
    ) -> dict[str, Tensor] | list[BaseDataElement] | Tensor:
        """Run the classifier.

        Args:
            inputs (Tensor): Normalised float images of shape (N, C, H, W).
            data_samples (list[BaseDataElement], optional): N data samples; with mode 'loss' each
                holds ``gt_label``, a (1,) int64 tensor.
            mode (str): 'loss', 'predict' or 'tensor'. Defaults to 'tensor'.

        Returns:
            With 'loss' a dict of the cross entropy ``loss``, a scalar tensor; with 'predict' N data
            samples, each with ``pred_score``, (num_classes,) float, and ``pred_label``, (1,)
            int64, added; with 'tensor' the logits of shape (N, num_classes).

        Raises:
            ValueError: If the mode is another one.
        """
        logits = self.head(self.backbone(inputs).mean(dim=(2, 3)))
        if mode == 'tensor':
            return logits
        if mode == 'loss':
            labels = torch.cat([sample.gt_label for sample in data_samples])
            return dict(loss=F.cross_entropy(logits, labels))
        if mode == 'predict':
            scores = logits.softmax(dim=1)
            samples = data_samples or [BaseDataElement() for _ in scores]
            # New samples, since those of the batch belong to whoever handed it in.
            return [
                sample.new(
                    **dict(sample.items()), pred_score=score, pred_label=score.argmax()[None]
                )
                for sample, score in zip(samples, scores, strict=True)
            ]
        raise ValueError(f"mode={mode!r}: write 'loss', 'predict' or 'tensor'")
