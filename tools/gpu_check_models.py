# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""The models of the GPU comparison, in plain torch."""

from collections.abc import Sequence

import torch
from mmengine.structures import BaseDataElement
from torch import Tensor, nn


def conv(inputs: int, outputs: int, kernel: int, stride: int = 1) -> list[nn.Module]:
    """A convolution that keeps the size (but for its stride), and its normalisation."""
    layer = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, bias=False)
    return [layer, nn.BatchNorm2d(outputs)]


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1, around a shortcut.

    Args:
        inputs (int): Channels of the input.
        width (int): Channels inside; the output has four times as many.
        stride (int): Of the 3x3 convolution.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *conv(inputs, width, 1),
            nn.ReLU(inplace=True),
            *conv(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *conv(width, outputs, 1),
        )
        changes = stride != 1 or inputs != outputs
        self.shortcut = nn.Sequential(*conv(inputs, outputs, 1, stride) if changes else [])

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class Classifier(nn.Module):
    """A backbone, its mean over the image, and a linear layer; returns the loss.

    Args:
        backbone (nn.Module): Images (N, 3, H, W) to features (N, C, h, w).
        channels (int): C.
        classes (int): Classes.
    """

    def __init__(self, backbone: nn.Module, channels: int, classes: int) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor, samples: Sequence[BaseDataElement] | Tensor) -> Tensor:
        scores = self.head(self.backbone(images).mean((2, 3)))
        return nn.functional.cross_entropy(scores, labels_of(samples))


def labels_of(samples: Sequence[BaseDataElement] | Tensor) -> Tensor:
    """The labels of a batch, from its data samples, or as some loaders hand them out."""
    if isinstance(samples, Tensor):
        return samples
    return torch.stack([sample.label for sample in samples])


def resnet50(classes: int) -> Classifier:
    """ResNet-50: 3, 4, 6 and 3 bottlenecks of 64, 128, 256 and 512 channels."""
    layers = [*conv(3, 64, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, 2 if stage and not block else 1))
            channels = 4 * width
    return Classifier(nn.Sequential(*layers), channels, classes)


class BoxModel(nn.Module):
    """A few convolutions, and a loss that reads every box, label and mask of the batch."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (32, 64, 128, 256):
            layers += [*conv(channels, width, 3, 2), nn.ReLU(inplace=True)]
            layers += [*conv(width, width, 3), nn.ReLU(inplace=True)]
            channels = width
        self.backbone = nn.Sequential(*layers)
        self.boxes, self.classes = nn.Linear(channels, 4), nn.Linear(channels, 80)
        self.mask = nn.Linear(channels, 1)

    def forward(self, images: Tensor, samples: Sequence[BaseDataElement]) -> Tensor:
        features = self.backbone(images).mean((2, 3))
        loss = features.new_zeros(())
        for feature, sample in zip(features, samples, strict=True):
            truth = sample.gt_instances
            count = len(truth.labels)
            covered = truth.masks.float().mean((1, 2))
            loss = loss + (self.boxes(feature) - truth.bboxes).abs().mean()
            scores = self.classes(feature).expand(count, -1)
            loss = loss + nn.functional.cross_entropy(scores, truth.labels)
            loss = loss + (self.mask(feature) - covered).square().mean()
        return loss


class ManyKernels(nn.Module):
    """Layers of a few numbers each, in three kernels or more.

    Args:
        layers (int): How many.
    """

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.ones(layers, 3))

    def forward(self, images: Tensor, samples: Sequence[BaseDataElement]) -> Tensor:
        values = images.mean((2, 3))
        for scale in self.scales.unbind():
            values = torch.tanh(values * scale) + 0.5
        return nn.functional.cross_entropy(values, labels_of(samples) % 3)
