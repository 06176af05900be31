# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Time the fused pass against the preprocessors and the arithmetic that it replaces, on CPU.

All contenders of a line take turns in one process, a few runs at each turn, of which the first
does not count: it pays for what the other contenders left in the caches. What is printed are
medians and their ratios.
"""

import argparse
import importlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from mmengine.model import ImgDataPreprocessor
from mmengine.structures import PixelData
from torch import Tensor

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.ops import normalize_batch, reversal

MEAN, STD = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
RUNS = 4
COLUMNS = '{:<54} {:>9} {:>9} {:>8} {:>9} {:>8} {:>9} {:>8}'


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        name: The work and whom it is compared with.
        stock: Does the work as it is done without the fused pass.
        op: The fused pass alone.
        whole: The whole of the stock work with the fused pass inside; None where that is ``op``.
        result: What both give; the floor is measured on it.
    """

    name: str
    stock: Callable[[], object]
    op: Callable[[], object]
    whole: Callable[[], object] | None
    result: Tensor


def medians(contenders: Sequence[Callable[[], object]], rounds: int) -> list[float]:
    """Time contenders in turn.

    Args:
        contenders: Functions without arguments.
        rounds: Turns of each.

    Returns:
        Median of each, in milliseconds.
    """
    times: list[list[float]] = [[] for _ in contenders]
    for _ in range(rounds):
        for contender, taken in zip(contenders, times, strict=True):
            contender()
            for _ in range(RUNS):
                start = time.perf_counter()
                contender()
                taken.append(time.perf_counter() - start)
    return [statistics.median(taken) * 1e3 for taken in times]


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


def preprocessor_rows() -> Iterator[Row]:
    """Lines against whole preprocessors."""
    crops = noise(*[(3, 224, 224)] * 64)
    scenes = noise((3, 800, 1333), (3, 768, 1280))
    small = noise(*[(3, 32, 32)] * 128)
    streets = noise(*[(3, 512, 1024)] * 4)
    for name, images, divisor in (
        ('64 x (3, 224, 224)', crops, 1),
        ('2 x (3, ~800, ~1333), pad to 32', scenes, 32),
        ('128 x (3, 32, 32)', small, 1),
        ('4 x (3, 512, 1024)', streets, 1),
    ):
        fields = dict(mean=MEAN, std=STD, pad_size_divisor=divisor, bgr_to_rgb=True)
        yield row(name, ImgDataPreprocessor, fields, images, lambda: None)
    if mmdet := importable('mmdet.models.data_preprocessors'):
        det_structures = importlib.import_module('mmdet.structures')

        def detections() -> list:
            shapes = [tuple(image.shape[1:]) for image in scenes]
            return [det_structures.DetDataSample(metainfo=dict(img_shape=s)) for s in shapes]

        fields = dict(mean=MEAN, std=STD, pad_size_divisor=32, bgr_to_rgb=True)
        name = '2 x (3, ~800, ~1333), pad to 32'
        yield row(name, mmdet.DetDataPreprocessor, fields, scenes, detections)
    if mmpretrain := importable('mmpretrain.models.utils.data_preprocessor'):
        fields = dict(mean=MEAN, std=STD, to_rgb=True)
        stacked = torch.stack(small)
        name = '128 x (3, 32, 32) stacked'
        yield row(name, mmpretrain.ClsDataPreprocessor, fields, stacked, lambda: None)
    if mmseg := importable('mmseg.models.data_preprocessor'):
        seg_structures = importlib.import_module('mmseg.structures')
        maps = [torch.randint(0, 19, (1, 512, 1024)) for _ in streets]

        def segmentations() -> list:
            return [seg_structures.SegDataSample(gt_sem_seg=PixelData(data=each)) for each in maps]

        fields = dict(mean=MEAN, std=STD, bgr_to_rgb=True, size=(512, 1024))
        name = '4 x (3, 512, 1024) with maps'
        yield row(name, mmseg.SegDataPreProcessor, fields, streets, segmentations)


def row(
    name: str, cls: type, fields: dict, images: list[Tensor] | Tensor, samples: Callable
) -> Row:
    """The line of one preprocessor class.

    Args:
        name: The work.
        cls: The class.
        fields: Its arguments.
        images: The batch's images.
        samples: Makes the batch's data samples.

    Returns:
        The line; its three contenders were found to give equal images.
    """
    stock = cls(**fields)
    whole = PrefetchDataPreprocessor.around(cls(**fields), fields)

    def batch() -> dict:
        inputs = list(images) if isinstance(images, list) else images
        return {'inputs': inputs, 'data_samples': samples()}

    def op() -> Tensor:
        return normalize_batch(
            images,
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
    )


def arithmetic_rows() -> Iterator[Row]:
    """Lines against the bare arithmetic of other loaders, on a stacked batch."""
    images = torch.stack(noise(*[(3, 224, 224)] * 64))
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    wide_mean, wide_std = mean.view(1, 3, 1, 1), std.view(1, 3, 1, 1)

    def op() -> Tensor:
        return normalize_batch(images, mean, std)

    result = op()
    name = '64 x (3, 224, 224) stacked, '
    yield Row(
        name + "timm's loader",
        lambda: images.to(torch.float32).sub_(wide_mean).div_(wide_std),
        op,
        None,
        result,
    )
    if torchvision := importable('torchvision.transforms.v2'):
        normalize = torchvision.Normalize(MEAN, STD)
        yield Row(name + 'v2.Normalize', lambda: normalize(images.float()), op, None, result)
    if kornia := importable('kornia.enhance'):
        yield Row(
            name + 'kornia', lambda: kornia.normalize(images.float(), mean, std), op, None, result
        )


def print_row(row: Row, rounds: int) -> None:
    """Measure and print one line."""
    raw = row.result.to(torch.uint8)
    out = torch.empty_like(row.result)
    contenders = [row.stock, lambda: out.copy_(raw), row.op]
    if row.whole is not None:
        contenders.append(row.whole)
    stock, floor, op, *whole = medians(contenders, rounds)
    cells = [f'{stock:.3f}', f'{op:.3f}', f'{stock / op:.1f} x']
    cells += [f'{whole[0]:.3f}', f'{stock / whole[0]:.1f} x'] if whole else ['-', '-']
    print(COLUMNS.format(row.name, *cells, f'{floor:.3f}', f'{op / floor:.1f} x'))


def print_channel_index(rounds: int) -> None:
    """What reordering channels costs: an index by a list, and the order of the fused pass."""
    images = noise(*[(3, 224, 224)] * 64)
    mean, std = torch.tensor(MEAN), torch.tensor(STD)
    listed, ordered, plain = medians(
        [
            lambda: [image[[2, 1, 0]] for image in images],
            lambda: normalize_batch(images, mean, std, channel_order=reversal(3)),
            lambda: normalize_batch(images, mean, std),
        ],
        rounds,
    )
    print(
        f'channel order of 64 x (3, 224, 224): image[[2, 1, 0]] {listed:.3f} ms; within the '
        f'fused pass {ordered - plain:+.3f} ms ({ordered:.3f} ms with, {plain:.3f} ms without)'
    )


def print_host_wait() -> None:
    """On a GPU: how long the host waits for a busy stream, at each way to order channels."""
    device = torch.device('cuda')
    images = [image.to(device) for image in noise(*[(3, 224, 224)] * 64)]
    mean, std = torch.tensor(MEAN, device=device), torch.tensor(STD, device=device)
    ways = {
        'image[[2, 1, 0]]': lambda: images[0][[2, 1, 0]],
        'fused pass of the batch': lambda: normalize_batch(
            images, mean, std, channel_order=reversal(3)
        ),
    }
    for name, way in ways.items():
        way()
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)
        start = time.perf_counter()
        way()
        returned = time.perf_counter() - start
        torch.cuda.synchronize()
        total = time.perf_counter() - start
        print(
            f'behind {total * 1e3:.1f} ms of queued work, {name} returned to the host after '
            f'{returned * 1e3:.2f} ms'
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table.

    Args:
        arguments: Command line; None for the process's own.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--rounds', type=int, default=15, help='turns of each contender')
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2], help='torch threads')
    options = parser.parse_args(arguments)
    rows = [*preprocessor_rows(), *arithmetic_rows()]
    before = torch.get_num_threads()
    for threads in options.threads:
        torch.set_num_threads(threads)
        print(f'\n{threads} thread{"s" if threads > 1 else ""}, milliseconds')
        print(
            COLUMNS.format('work', 'stock', 'op', 'faster', 'whole', 'faster', 'floor', 'op/floor')
        )
        for row in rows:
            print_row(row, options.rounds)
        print_channel_index(options.rounds)
    torch.set_num_threads(before)
    if torch.cuda.is_available():
        print_host_wait()


if __name__ == '__main__':
    main()
