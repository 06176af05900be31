# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Say which preprocessor fields each split of a config gets, from where, and what looks wrong."""

import inspect
import re
from collections.abc import Callable, Iterable
from typing import Any

from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from .classes import find_class, nearest, preprocessor_names
from .datasets import DatasetPart, split_dataloader
from .locate import ConfigFile
from .resolve import CHANNEL_ORDER, Binding, effective, merge_parts, plain, reverses_channels
from .sources import dropped_top_level_fields, is_prefetch_loop, preprocessor_sources

SPLITS = ('train', 'val', 'test')
# Mean and std of the channels R, G, B of ImageNet's images, in which most pretrained weights trust.
IMAGENET_MEAN = (123.675, 116.28, 103.53)
IMAGENET_STD = (58.395, 57.12, 57.375)
COMMAND_LINE = '--cfg-options'


def explain(cfg: Config, options: Iterable[str] = ()) -> dict:
    """Explain the preprocessing of each split of a config.

    Args:
        cfg (Config): The config; nothing is built from it but the classes it names are imported.
        options (Iterable[str]): The keys that were set on the command line.

    Returns:
        dict: ``config`` (the file), ``preprocessor`` (the name of its class), ``splits`` and
        ``warnings`` (a list of str). Each split has a list with one dict for each group of fields:
        ``datasets`` (those that get them: ``key`` and ``type``) and ``fields``, which has for each
        field ``value``, ``key``, ``file`` and ``overrides`` (a list of ``field``, ``value``,
        ``key`` and ``file``, highest precedence first).

    Raises:
        TypeError: If the fields at a key are not a dict.
        ValueError: If the class of the preprocessor is not registered, or the fields do not fit it.
    """
    locate = _Locator(cfg, options)
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
        cls, sources = _preprocessor(cfg)
        found: dict[str, tuple[list[DatasetPart], list[Binding]]] = {}
        for split in SPLITS:
            dataloader = cfg.get(f'{split}_dataloader')
            if dataloader is not None:
                if isinstance(dataloader, dict) and 'dataset' not in dataloader:
                    raise ValueError(f'{split}_dataloader: has no dataset; write dataset=dict(...)')
                _, parts = split_dataloader(dataloader, f'{split}_dataloader')
                found[split] = parts, merge_parts(split, cls, sources, parts)[1]
    splits = {}
    for split, (parts, bindings) in found.items():
        groups: list[dict] = []
        for part, binding in zip(parts, bindings, strict=True):
            fields = {
                name: dict(
                    value=plain(value),
                    **locate(binding.origin[name], name, part),
                    overrides=_overrides(binding, name, part, locate),
                )
                for name, value in binding.fields.items()
            }
            if not groups or groups[-1]['fields'] != fields:
                groups.append(dict(datasets=[], fields=fields))
            groups[-1]['datasets'].append(dict(key=part.path, type=part.type_name))
        splits[split] = groups
    warnings = [
        *_unread(cfg, sources, found),
        *_differences(cls, found),
        *_suspicious(cls, cfg, found),
    ]
    return dict(
        config=cfg.filename,
        preprocessor=cls.__name__,
        splits=splits,
        warnings=list(dict.fromkeys(warnings)),
    )


def render(report: dict) -> str:
    """Write a report as text.

    Args:
        report (dict): What :func:`explain` returned.

    Returns:
        str: The text, several lines.
    """
    lines = [f'{report["config"]}: {report["preprocessor"]}']
    for split, groups in report['splits'].items():
        for group in groups:
            datasets = ', '.join(f'{item["type"]} at {item["key"]}' for item in group['datasets'])
            lines += ['', f'{split}: {datasets}']
            if not group['fields']:
                lines.append('  no field is set, all are at their defaults')
            width = max(map(len, group['fields']), default=0)
            for name, field in group['fields'].items():
                lines.append(f'  {name:<{width}} = {field["value"]!r}')
                lines.append(f'  {"":<{width}}   from {_place(field)}')
                for lower in field['overrides']:
                    label = '' if lower['field'] == name else f'{lower["field"]} = '
                    lines.append(
                        f'  {"":<{width}}   overrides {label}{lower["value"]!r} from '
                        f'{_place(lower)}'
                    )
    lines += ['', 'warnings:' if report['warnings'] else 'warnings: none']
    return '\n'.join([*lines, *(f'  - {warning}' for warning in report['warnings'])])


class _Locator:
    """Names the file behind a config key."""

    def __init__(self, cfg: Config, options: Iterable[str]) -> None:
        self.file = ConfigFile(cfg.filename) if cfg.filename else None
        self.options = tuple(options)

    def __call__(self, key: str, name: str, part: DatasetPart) -> dict:
        return dict(key=key, file=self._file(f'{key}.{name}', part))

    def _file(self, key: str, part: DatasetPart) -> str | None:
        if any(f'{key}.'.startswith(f'{option}.') for option in self.options):
            return COMMAND_LINE
        if key.startswith(f'{getattr(part.dataset_class, "__name__", "")}.METAINFO.'):
            return inspect.getsourcefile(part.dataset_class)
        return self.file.locate(key) if self.file else None


def _overrides(binding: Binding, name: str, part: DatasetPart, locate: Callable) -> list[dict]:
    # The names of the channel order replace each other.
    names = [name]
    if name in CHANNEL_ORDER:
        names += [other for other in CHANNEL_ORDER if other not in binding.fields]
    return [
        dict(field=lower, value=plain(value), **locate(key, lower, part))
        for lower in names
        for key, value in reversed(binding.overridden.get(lower, []))
    ]


def _place(found: dict) -> str:
    return f'{found["key"]} ({found["file"]})' if found['file'] else found['key']


def _preprocessor(cfg: Config) -> tuple[type, list]:
    type_, scope, sources = preprocessor_sources(cfg)
    if type_ is None:
        type_ = _type_by_model(cfg) or (None if sources else 'BaseDataPreprocessor')
    if type_ is None:
        raise ValueError(
            f"{sources[-1].key}: it has no type, and the model's class gives it none, or is not "
            "registered here; write type='ImgDataPreprocessor' or the name of another "
            'preprocessor there, or install and import the package that the model is from'
        )
    cls = find_class(MODELS, type_, scope)
    if cls is None:
        hint = nearest(type_, preprocessor_names(MODELS, scope))
        where = sources[-1].key if sources else 'model'
        raise ValueError(
            f'{where}: no preprocessor {type_!r} is registered{hint}; install the package that '
            'defines it, and name the module in custom_imports or the package in default_scope'
        )
    return cls, sources


def _type_by_model(cfg: Config) -> str | None:
    """The preprocessor that a model's constructor fills in where the config names none."""
    model = cfg.get('model')
    cls = None
    if isinstance(model, dict):
        cls = find_class(MODELS, model.get('type'), model.get('_scope_'))
    for base in getattr(cls, '__mro__', ()):
        if '__init__' in vars(base) and base.__module__ != 'builtins':
            source = inspect.getsource(base.__init__)
            filled_in = re.search(
                r"""data_preprocessor\.setdefault\(\s*['"]type['"],\s*['"]([\w.]+)['"]""", source
            )
            if filled_in:
                return filled_in.group(1)
    return None


def _unread(cfg: Config, sources: list, found: dict) -> Iterable[str]:
    dropped = dropped_top_level_fields(cfg)
    if dropped:
        yield (
            f'data_preprocessor: nothing reads {", ".join(dropped)} at the top level, since the '
            "model's own data_preprocessor replaces it whole; to merge them field by field, write "
            "type='PrefetchDataPreprocessor' and wraps=... in model.data_preprocessor, or move "
            'them to the datasets'
        )
    any_loop = any(is_prefetch_loop(cfg.get(f'{split}_cfg')) for split in SPLITS)
    for split, (parts, _) in found.items():
        dataloader = cfg[f'{split}_dataloader']
        if isinstance(dataloader, dict) and 'data_preprocessor' in dataloader:
            yield (
                f'{split}_dataloader.data_preprocessor: nothing reads it there; move it to '
                f'{split}_dataloader.dataset.data_preprocessor'
            )
        if not any_loop:
            # The loops bring the top level and the datasets' fields to the preprocessor.
            for source in [*sources[1:], *(source for part in parts for source in part.sources)]:
                yield (
                    f"{source.key}: nothing reads it, since no loop is one of mmprefetch's; write "
                    "train_cfg=dict(type='PrefetchLoop', ...), or use enable_prefetch"
                )


def _differences(cls: type, found: dict) -> Iterable[str]:
    if 'train' not in found or not found['train'][1]:
        return
    train = found['train'][1][0]
    for split in SPLITS[1:]:
        for binding in found.get(split, ([], []))[1][:1]:
            names = [name for name in train.fields if name not in CHANNEL_ORDER]
            names += [name for name in binding.fields if name not in (*names, *CHANNEL_ORDER)]
            for name in names:
                values = [plain(effective(cls, one, name)) for one in (train, binding)]
                if values[0] != values[1]:
                    yield f'train and {split} differ in {name}: {values[0]!r} and {values[1]!r}'
            reversed_ = [reverses_channels(cls, one) for one in (train, binding)]
            if reversed_[0] != reversed_[1]:
                said = ['reversed' if one else 'left as it is' for one in reversed_]
                yield f'train and {split} differ in channel order: {said[0]} and {said[1]}'


def _suspicious(cls: type, cfg: Config, found: dict) -> Iterable[str]:
    for split, (parts, bindings) in found.items():
        for part, binding in zip(parts, bindings, strict=True):
            mean, std = (plain(effective(cls, binding, name)) for name in ('mean', 'std'))
            if not isinstance(mean, list) or not isinstance(std, list):
                continue
            if all(0 <= value <= 1 for value in mean) and all(0 < value < 1 for value in std):
                yield (
                    f'{part.path}: mean={mean} and std={std} are for values of 0 to 1, decoded '
                    'images hold 0 to 255; multiply both by 255'
                )
            yield from _wrong_order(cls, cfg, split, part, binding, mean, std)


def _wrong_order(cls, cfg, split, part, binding, mean, std) -> Iterable[str]:
    of_mean = _imagenet_order(mean, IMAGENET_MEAN, 1.0)
    of_std = _imagenet_order(std, IMAGENET_STD, 0.3)
    if of_mean is None:
        return
    if of_std not in (None, of_mean):
        yield (
            f"{part.path}: mean={mean} is ImageNet's in {of_mean} order, std={std} in {of_std} "
            'order; reverse one of them'
        )
    dataloader = cfg[f'{split}_dataloader']
    loaded = _loaded_order(dataloader['dataset'] if isinstance(dataloader, dict) else None)
    if loaded is None:
        return
    reverses = reverses_channels(cls, binding)
    arriving = loaded[::-1] if reverses else loaded
    if arriving != of_mean:
        said, switch = ('reverses them', 'off') if reverses else ('does not reverse them', 'on')
        yield (
            f"{part.path}: mean={mean} is ImageNet's in {of_mean} order, but it is subtracted from "
            f'channels in {arriving} order: images are decoded as {loaded} and the preprocessor '
            f'{said}; switch the reversal (bgr_to_rgb) {switch}, or reverse mean and std'
        )


def _imagenet_order(values: list, reference: tuple, tolerance: float) -> str | None:
    scale = 255 if all(abs(value) <= 1 for value in values) else 1
    for order, expected in (('RGB', reference), ('BGR', reference[::-1])):
        if len(values) == 3 and all(
            abs(value * scale - known) <= tolerance
            for value, known in zip(values, expected, strict=True)
        ):
            return order
    return None


def _loaded_order(dataset: Any) -> str | None:
    """The channel order of a dataset's images, None where the config does not tell."""
    transforms = list(_dicts(dataset))
    if not transforms or any('to_rgb' in each or 'to_bgr' in each for each in transforms):
        return None
    orders = {each.get('channel_order', 'bgr') for each in transforms} - {'bgr'}
    return 'BGR' if not orders else 'RGB' if orders == {'rgb'} else None


def _dicts(node: Any) -> Iterable[dict]:
    if isinstance(node, dict):
        yield node
        for key, value in node.items():
            if key not in ('data_preprocessor', 'metainfo'):
                yield from _dicts(value)
    elif isinstance(node, list | tuple):
        for item in node:
            yield from _dicts(item)
