# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What the fused pass is compared with: the lines of the table of ``benchmark_preprocess.py``."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from mmengine.model import ImgDataPreprocessor
from mmengine.structures import PixelData
from torch import Tensor

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.ops import normalize_batch, reversal

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
SCENES, SCENE_SHAPES = '2 x (3, ~800, ~1333), pad to 32', [(3, 800, 1333), (3, 768, 1280)]

Contender = Callable[[], object]


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: The work and whom it is compared with.
        stock: Does the work as it is done without the fused pass.
        op: The fused pass alone.
        whole: The whole of the stock work with the fused pass inside; None where that is ``op``.
        result: What both give; the floor is measured on it.
        wanted: How much faster ``whole``, else ``op``, is to be.
    """

    name: str
    stock: Contender
    op: Contender
    whole: Contender | None
    result: Tensor
    wanted: float


def noise(*shapes: tuple[int, ...]) -> list[Tensor]:
    """Images of random uint8 pixels."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, s, dtype=torch.uint8, generator=generator) for s in shapes]


def importable(module: str) -> object | None:
    """A module if it can be imported here; prints why not otherwise."""
    try:
        return importlib.import_module(module)
    except (ImportError, AssertionError, RuntimeError, AttributeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        print(f'left out: {module} ({reason})')
        return None


def lines() -> list[Callable[[], Row]]:
    """What makes the lines of the table: each is called in the process that measures it."""
    made: list[Callable[[], Row]] = [
        partial(
            preprocessor_line, name, ImgDataPreprocessor, dict(bgr_to_rgb=True, **fields), *work
        )
        for name, fields, *work in (
            ('64 x (3, 224, 224)', {}, [(3, 224, 224)] * 64, 10),
            (SCENES, dict(pad_size_divisor=32), SCENE_SHAPES, 5),
            ('128 x (3, 32, 32)', {}, [(3, 32, 32)] * 128, 8),
            ('4 x (3, 512, 1024)', {}, [(3, 512, 1024)] * 4, 3),
        )
    ]
    if mmdet := importable('mmdet.models.data_preprocessors'):
        fields = dict(bgr_to_rgb=True, pad_size_divisor=32)
        work = (SCENES, mmdet.DetDataPreprocessor, fields, SCENE_SHAPES, 5, detections)
        made.append(partial(preprocessor_line, *work))
    if mmpretrain := importable('mmpretrain.models.utils.data_preprocessor'):
        work = ([(128, 3, 32, 32)], 1)
        name, cls = '128 x (3, 32, 32) stacked', mmpretrain.ClsDataPreprocessor
        made.append(partial(preprocessor_line, name, cls, dict(to_rgb=True), *work))
    if mmseg := importable('mmseg.models.data_preprocessor'):
        fields = dict(bgr_to_rgb=True, size=(512, 1024))
        name, cls = '4 x (3, 512, 1024) with maps', mmseg.SegDataPreProcessor
        work = ([(3, 512, 1024)] * 4, 3, segmentations)
        made.append(partial(preprocessor_line, name, cls, fields, *work))
    made.append(partial(arithmetic_line, "timm's loader", timm_style))
    if importable('torchvision.transforms.v2'):
        made.append(partial(arithmetic_line, 'v2.Normalize', torchvision_style))
    if importable('kornia.enhance'):
        made.append(partial(arithmetic_line, 'kornia', kornia_style))
    return made


def detections(images: list[Tensor]) -> Callable[[], list]:
    """Makes the data samples of a detection batch."""
    sample = importlib.import_module('mmdet.structures').DetDataSample
    return lambda: [sample(metainfo=dict(img_shape=tuple(i.shape[1:]))) for i in images]


def segmentations(images: list[Tensor]) -> Callable[[], list]:
    """Makes the data samples of a batch with segmentation maps."""
    sample = importlib.import_module('mmseg.structures').SegDataSample
    maps = [torch.randint(0, 19, (1, *image.shape[1:])) for image in images]
    return lambda: [sample(gt_sem_seg=PixelData(data=each)) for each in maps]


def no_samples(images: list[Tensor]) -> Callable[[], None]:
    """For batches of images alone."""
    return lambda: None


def preprocessor_line(
    name: str,
    cls: type,
    fields: dict,
    shapes: list[tuple[int, ...]],
    wanted: float,
    samples_of: Callable[[list[Tensor]], Callable[[], Any]] = no_samples,
    device: str = 'cpu',
) -> Row:
    """The line of one preprocessor class.

    Args:
        name: The work.
        cls: The class.
        fields: Its arguments, but for mean and std.
        shapes: Of the batch's images; one of four dimensions is a stacked batch.
        wanted: How much faster the fused pass is to be.
        samples_of: Makes what makes the batch's data samples.
        device: Where the images are.

    Returns:
        The line; its three contenders were found to give equal images.
    """
    fields = dict(mean=MEAN, std=STD, **fields)
    stock = cls(**fields).to(device)
    whole = PrefetchDataPreprocessor.around(cls(**fields), fields).to(device)
    images = [image.to(device) for image in noise(*shapes)]
    stacked = images[0].dim() == 4
    samples = samples_of(images)

    def batch() -> dict:
        return {'inputs': images[0] if stacked else list(images), 'data_samples': samples()}

    def op() -> Tensor:
        return normalize_batch(
            images[0] if stacked else images,
            stock.mean,
            stock.std,
            channel_order=reversal(3),
            size_divisor=fields.get('pad_size_divisor', 1),
        )

    expected = stock(batch(), True)['inputs']
    for got in (op(), whole(batch(), True)['inputs']):
        if not torch.equal(got, expected):
            raise AssertionError(f'{name}: not equal to {cls.__name__}')
    return Row(
        f'{name}, {cls.__name__}',
        lambda: stock(batch(), True),
        op,
        lambda: whole(batch(), True),
        expected,
        wanted,
    )


def arithmetic_line(
    name: str, style: Callable[[Tensor, Tensor], Callable[[Tensor], Tensor]], device: str = 'cpu'
) -> Row:
    """A line against the bare arithmetic of another loader, on a stacked batch.

    Args:
        name: Whose arithmetic.
        style: Makes it, of mean and std.
        device: Where the images are.

    Returns:
        The line.
    """
    images = torch.stack(noise(*[(3, 224, 224)] * 64)).to(device)
    mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
    theirs = style(mean, std)

    def op() -> Tensor:
        return normalize_batch(images, mean, std)

    result = op()
    # Not all of them divide.
    torch.testing.assert_close(theirs(images), result, rtol=1e-5, atol=1e-5)
    return Row(f'64 x (3, 224, 224) stacked, {name}', lambda: theirs(images), op, None, result, 1)


def timm_style(mean: Tensor, std: Tensor) -> Callable[[Tensor], Tensor]:
    """The arithmetic of timm's loader."""
    mean, std = mean.view(1, 3, 1, 1), std.view(1, 3, 1, 1)
    return lambda images: images.to(torch.float32).sub_(mean).div_(std)


def torchvision_style(mean: Tensor, std: Tensor) -> Callable[[Tensor], Tensor]:
    """torchvision's transform."""
    v2 = importlib.import_module('torchvision.transforms.v2')
    normalize = v2.Normalize(mean.tolist(), std.tolist())
    return lambda images: normalize(images.float())


def kornia_style(mean: Tensor, std: Tensor) -> Callable[[Tensor], Tensor]:
    """kornia's function."""
    enhance = importlib.import_module('kornia.enhance')
    return lambda images: enhance.normalize(images.float(), mean, std)
