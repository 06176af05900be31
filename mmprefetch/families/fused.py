# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""A class whose own pass over the pixels is replaced; the rest of its code runs as it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from .family import Family


@dataclass
class Begun:
    """What has run ahead of a batch, where something is left to be done.

    Args:
        data (Any): The batch on the device.
        pixels (Any): What the fused pass made; None if it did not take the input.
        result (Any): What came out of the rest; None if that has not run.
        fields (list): The fields of each data sample before the class wrote into them.
    """

    data: Any
    pixels: Any
    result: Any = None
    fields: list[dict] = field(default_factory=list)


class FusedFamily(Family):
    """Runs the fused pass, then the class's own forward with its own pass switched off.

    The class's forward runs ahead unless it is going to call :attr:`augments`.
    """

    #: Attributes of the preprocessor, and the values that switch its own pass off.
    off: Mapping[str, Any] = {}
    #: Attributes that the declaration relies on, beside those of ``off``.
    needs: Iterable[str] = ('_enable_normalize',)
    #: The attribute, None where there is nothing to call, of what the forward calls in training
    #: and what may draw random numbers, run collectives or read the iteration.
    augments: str | None = None
    #: Whether the class writes into the data samples of the raw batch, and returns them, as
    #: ``data_samples`` of a dict.
    writes = False

    def pixels(self, preprocessor: nn.Module, data: dict, training: bool) -> Any:
        """Run the fused pass.

        Args:
            preprocessor (nn.Module): Holds the fields.
            data (dict): The batch on the device.
            training (bool): Whether to preprocess for training.

        Returns:
            Any: The images as the class's own pass makes them, or None if the input is not one
            for the fused pass.
        """
        raise NotImplementedError

    def rest(self, preprocessor: nn.Module, data: dict, pixels: Any, training: bool) -> Any:
        """Run the class's own forward without its pass over the pixels.

        Args:
            preprocessor (nn.Module): Holds the fields.
            data (dict): The batch on the device.
            pixels (Any): What :meth:`pixels` returned.
            training (bool): Whether to preprocess for training.

        Returns:
            Any: What the class's own forward returns.
        """
        return twin(preprocessor, self.off).forward({**data, 'inputs': pixels}, training)

    def is_pure(self, preprocessor: nn.Module, training: bool) -> bool:
        """Whether :meth:`rest` depends on the batch alone.

        Args:
            preprocessor (nn.Module): Holds the fields.
            training (bool): Whether to preprocess for training.

        Returns:
            bool: True if it may run ahead.
        """
        return not (training and self.augments and getattr(preprocessor, self.augments) is not None)

    def begin(self, preprocessor: nn.Module, data: Any, training: bool) -> Any:
        begun = Begun(data, self._pixels(preprocessor, data, training))
        if self.writes and isinstance(data, dict):
            begun.fields = _fields(data.get('data_samples'))
        if begun.pixels is not None and self.is_pure(preprocessor, training):
            begun.result = self.rest(preprocessor, data, begun.pixels, training)
            if not begun.fields:
                return begun.result  # and let go of the images as they came
        return begun

    def finish(self, preprocessor: nn.Module, begun: Any, batch: Any, training: bool) -> Any:
        if not isinstance(begun, Begun):
            return begun
        result = begun.result
        if begun.pixels is None:
            result = preprocessor(begun.data, training)
        elif result is None:
            result = self.rest(preprocessor, begun.data, begun.pixels, training)
        if begun.fields and result.get('data_samples') is begun.data['data_samples']:
            _write_back(begun, batch['data_samples'])
            result['data_samples'] = batch['data_samples']
        return result

    def _pixels(self, preprocessor: nn.Module, data: Any, training: bool) -> Any:
        # Without one of these it is another version of the class than the one that was declared.
        names = (*self.off, *self.needs, *((self.augments,) if self.augments else ()))
        as_declared = all(hasattr(preprocessor, name) for name in names)
        pixels = None
        if as_declared and isinstance(data, dict) and 'inputs' in data:
            pixels = self.pixels(preprocessor, data, training)
        samples = getattr(preprocessor, '_samples', None)
        if pixels is None and samples is not None:
            # The class's own forward would give all of them the values of one dataset.
            inputs = data.get('inputs') if isinstance(data, dict) else data
            count = len(inputs) if isinstance(inputs, Sized) else 'no length'
            raise ValueError(
                'data_preprocessor: the datasets of this split differ in mean, std or channel '
                f'order, but its batch of {len(samples)} samples came as {type(inputs).__name__} '
                f'of {count} that the fused pass does not take; collate images of one dtype and '
                'number of channels, one for each sample and in their order'
            )
        return pixels


class StandInFamily(FusedFamily):
    """A class that pads images and labels in one place: its own forward is given images of no
    channels, and the fused pass's result takes their place in what comes out.

    Such images have the sizes that labels are padded by and metainfo is made of, on the device
    that is right, but no pixels to copy. Nothing but :attr:`augments` may look into the pixels.
    """

    def rest(self, preprocessor: nn.Module, data: dict, pixels: Tensor, training: bool) -> Any:
        attributes = dict(self.off)
        augments = getattr(preprocessor, self.augments) if self.augments else None
        if augments is not None:
            attributes[self.augments] = lambda _, *others: augments(pixels, *others)
        images = [image[:0].float() for image in data['inputs']]
        result = twin(preprocessor, attributes).forward({**data, 'inputs': images}, training)
        if not result['inputs'].numel():  # nothing put the pixels in on the way
            result['inputs'] = pixels
        return result


def twin(
    preprocessor: nn.Module, attributes: Mapping[str, Any], cls: type[nn.Module] | None = None
) -> nn.Module:
    """A preprocessor that shares everything with another but for some attributes.

    Args:
        preprocessor (nn.Module): The preprocessor.
        attributes (Mapping): What differs.
        cls (type, optional): The class, where that differs.

    Returns:
        nn.Module: The twin.
    """
    cls = cls or type(preprocessor)
    made = cls.__new__(cls)
    vars(made).update(vars(preprocessor), **attributes)
    return made


def with_samples(preprocessor: nn.Module, samples: Any) -> nn.Module:
    """A preprocessor that normalises each sample with constants of its own.

    Args:
        preprocessor (nn.Module): The preprocessor.
        samples (SampleConstants | None): The constants; None: those of the preprocessor.

    Returns:
        nn.Module: A twin, or the preprocessor itself.
    """
    return preprocessor if samples is None else twin(preprocessor, {'_samples': samples})


def unchanged(data: Any) -> Any:
    """Stands for ``cast_data`` in a twin: the batch is on the device already.

    Args:
        data (Any): The batch.

    Returns:
        Any: The same.
    """
    return data


def _fields(samples: Any) -> list[dict]:
    if not isinstance(samples, (list, tuple)):
        return []
    return [dict(vars(sample)) for sample in samples if isinstance(sample, BaseDataElement)]


def _write_back(begun: Begun, samples: list[BaseDataElement]) -> None:
    """Give the raw batch's samples what the class wrote into their copies."""
    copies = begun.data['data_samples']
    for raw, copied, before in zip(samples, copies, begun.fields, strict=True):
        for name, value in vars(copied).items():
            if before.get(name) is not value:
                kind = 'metainfo' if name in copied.metainfo_keys() else 'data'
                raw.set_field(value, name, field_type=kind)
