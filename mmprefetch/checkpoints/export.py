# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Export a model to ONNX with its preprocessing inside."""

from __future__ import annotations

import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..data_preprocessor import PrefetchDataPreprocessor
from ..ops import reversal

INPUT, OUTPUT = 'images', 'output'
# A file of ONNX can't be larger than 2 GiB; weights that come near to it go into one beside it.
LARGEST_FILE = 2**31 - 2**27
TOLERANCE = 1e-5
# The names that packages give to the attribute that says whether channels are reversed.
REVERSING = ('_channel_conversion', 'channel_conversion', 'to_rgb')
DIVISOR = ('pad_size_divisor', 'size_divisor')
PAD_VALUE = ('pad_value', 'pad_val')


class Preprocessing(nn.Module):
    """What a data preprocessor does to a batch of images of one size, in plain torch.

    Args:
        preprocessor (nn.Module): The preprocessor, of mmengine or a package that is built on it.
        example (Tensor): Images of shape (N, C, H, W), as the dataset gives them.

    Raises:
        ValueError: The preprocessor does more than reversing channels, normalising and padding:
            its result for the example is another one.
    """

    def __init__(self, preprocessor: nn.Module, example: Tensor) -> None:
        super().__init__()
        if isinstance(preprocessor, PrefetchDataPreprocessor):
            preprocessor = preprocessor.of_split(preprocessor.split)
        preprocessor = copy.deepcopy(preprocessor).to(example.device).eval()
        order = mean = std = None
        if _attribute(preprocessor, REVERSING, False):
            order = torch.tensor(reversal(example.shape[1]), device=example.device)
        if getattr(preprocessor, '_enable_normalize', True):
            mean, std = (_constant(preprocessor, name) for name in ('mean', 'std'))
        for name, value in (('order', order), ('mean', mean), ('std', std)):
            self.register_buffer(name, value)
        divisor = _attribute(preprocessor, DIVISOR, None) or 1
        height, width = example.shape[-2:]
        self.padding = (0, -width % divisor, 0, -height % divisor)
        self.pad_value = float(_attribute(preprocessor, PAD_VALUE, 0))
        self._check(preprocessor, example)

    def forward(self, images: Tensor) -> Tensor:
        """Preprocess a batch.

        Args:
            images (Tensor): Images of shape (N, C, H, W), any dtype.

        Returns:
            Tensor: What the model takes: float32, of shape (N, C, H', W'), padded.
        """
        if self.order is not None:
            images = images.index_select(1, self.order)
        images = images.float()
        if self.mean is not None:
            images = (images - self.mean) / self.std
        if any(self.padding):
            images = F.pad(images, self.padding, value=self.pad_value)
        return images

    def _check(self, preprocessor: nn.Module, example: Tensor) -> None:
        # Not its own forward: that can't take any number of channels.
        wrapper = PrefetchDataPreprocessor.around(preprocessor)
        with torch.no_grad():
            expected = wrapper(dict(inputs=list(example), data_samples=None))['inputs']
            ours = self(example)
        found = tuple(expected.shape) if isinstance(expected, Tensor) else type(expected).__name__
        close = dict(rtol=TOLERANCE, atol=TOLERANCE)
        if found != tuple(ours.shape) or not torch.allclose(ours, expected.float(), **close):
            raise ValueError(
                f'preprocessor: {type(preprocessor).__name__} does more than reverse channels, '
                f'normalise and pad to a divisor: what it makes of the example, {found}, is not '
                f'what these steps make of it, {tuple(ours.shape)}. Export with one that does no '
                "more, such as MODELS.build(dict(type='ImgDataPreprocessor', mean=[...], "
                'std=[...]))'
            )


class _Deployed(nn.Module):
    """A model with its preprocessing in front."""

    def __init__(self, model: nn.Module, preprocessing: Preprocessing) -> None:
        super().__init__()
        self.model = model
        self.preprocessing = preprocessing

    def forward(self, images: Tensor) -> Tensor:
        return self.model(self.preprocessing(images), mode='tensor')


def to_onnx(model: nn.Module, preprocessor: nn.Module, example: Tensor, path: str | Path) -> bool:
    """Export ``model.forward(mode='tensor')`` with the preprocessing inside.

    The graph has one input, ``images``: a batch of the example's dtype, channels and size, as the
    dataset decodes them, and one output, ``output``: what the model returns for them.

    Args:
        model (nn.Module): The model; it stays as it is. Its ``forward(inputs, mode='tensor')``
            returns one tensor, and is something that torch can export.
        preprocessor (nn.Module): The preprocessor, see :func:`mmprefetch.load_preprocessor`.
        example (Tensor): Images of shape (N, C, H, W), uint8 for most models. The graph is for
            images of their size.
        path (str | Path): The file to write.

    Returns:
        bool: Whether batches may be of any size; else they have to be of the example's.

    Raises:
        ImportError: onnx or onnxscript is not installed.
        ValueError: The example is not a batch of images, or the preprocessor does something that
            is not exported.
    """
    if not isinstance(example, Tensor) or example.dim() != 4 or not example.numel():
        found = tuple(example.shape) if isinstance(example, Tensor) else type(example).__name__
        raise ValueError(f'example: a tensor of shape (N, C, H, W) is expected, found {found}')
    missing = [name for name in ('onnx', 'onnxscript') if find_spec(name) is None]
    if missing:
        raise ImportError(
            f'exporting needs {" and ".join(missing)}; install with `pip install '
            '"mmprefetch[deploy]"` or `pip install -r requirements/deploy.txt`'
        )
    # Without its own preprocessor, which is no part of the graph and may hold what can't be copied.
    model = copy.deepcopy(model)
    if hasattr(model, 'data_preprocessor'):
        del model.data_preprocessor
    weight = next(model.parameters(), None)
    if weight is not None:
        example = example.to(weight.device)
    deployed = _Deployed(model, Preprocessing(preprocessor, example)).eval()
    # torch takes a size of one for a constant.
    several = example if len(example) > 1 else example.expand(2, -1, -1, -1).contiguous()
    export = partial(
        torch.onnx.export,
        deployed,
        input_names=[INPUT],
        output_names=[OUTPUT],
        dynamo=True,
        verbose=False,
    )
    with torch.no_grad():
        try:
            program, any_size = export((several,), dynamic_shapes={INPUT: {0: 'batch'}}), True
        except torch.onnx.OnnxExporterError:
            # The model's code may depend on the size of the batch; any other reason shows again.
            program, any_size = export((example,)), False
    size = sum(value.nbytes for value in deployed.state_dict().values())
    program.save(str(path), external_data=size > LARGEST_FILE)
    return any_size


def _constant(preprocessor: nn.Module, name: str) -> Tensor | None:
    value = getattr(preprocessor, name, None)
    return None if value is None else value.detach().clone().float().view(1, -1, 1, 1)


def _attribute(module: nn.Module, names: tuple[str, ...], default: object) -> object:
    return next((getattr(module, name) for name in names if hasattr(module, name)), default)
