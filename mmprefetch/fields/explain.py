# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""Say which preprocessor fields each split of a config gets, and from where."""

import inspect
import re
from collections.abc import Callable, Iterable
from functools import partial

from mmengine.config import Config
from mmengine.registry import MODELS, DefaultScope

from .binding import CHANNEL_ORDER, Binding, plain
from .classes import find_class, nearest, preprocessor_names
from .datasets import DatasetPart, FieldSource, split_dataloaders
from .locate import ConfigFile
from .mistakes import likely_mistakes
from .resolve import resolve_parts
from .sources import called_model, preprocessor_sources

SPLITS = ('train', 'val', 'test')
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
    with DefaultScope.overwrite_default_scope(cfg.get('default_scope') or 'mmengine'):
        cls, sources = preprocessor_class(cfg)
        found = {}
        for split in SPLITS:
            dataloader = cfg.get(f'{split}_dataloader')
            if dataloader is not None:
                if isinstance(dataloader, dict) and 'dataset' not in dataloader:
                    raise ValueError(f'{split}_dataloader: has no dataset; write dataset=dict(...)')
                _, parts = split_dataloaders(dataloader, f'{split}_dataloader')
                bindings = resolve_parts(split, cls, sources, parts)
                found[split] = list(zip(parts, bindings, strict=True))
    file, options = ConfigFile(cfg.filename) if cfg.filename else None, tuple(options)
    splits = {split: _groups(bound, file, options) for split, bound in found.items()}
    return dict(
        config=cfg.filename,
        preprocessor=cls.__name__,
        splits=splits,
        warnings=list(dict.fromkeys(likely_mistakes(cfg, sources, found))),
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
                lines.append(f'  {"":<{width}}   from {_text(field)}')
                for lower in field['overrides']:
                    label = '' if lower['field'] == name else f'{lower["field"]} = '
                    lines.append(
                        f'  {"":<{width}}   overrides {label}{lower["value"]!r} from {_text(lower)}'
                    )
    lines += ['', 'warnings:' if report['warnings'] else 'warnings: none']
    return '\n'.join([*lines, *(f'  - {warning}' for warning in report['warnings'])])


def _groups(bound: list, file: ConfigFile | None, options: tuple[str, ...]) -> list[dict]:
    """Write down the fields of each dataset of a split, once for neighbours that have the same."""
    groups: list[dict] = []
    for part, binding in bound:
        place = partial(_place, part=part, file=file, options=options)
        fields = {
            name: dict(
                value=plain(value),
                **place(binding.origin[name], name),
                overrides=_overrides(binding, name, place),
            )
            for name, value in binding.fields.items()
        }
        if not groups or groups[-1]['fields'] != fields:
            groups.append(dict(datasets=[], fields=fields))
        groups[-1]['datasets'].append(dict(key=part.key, type=part.type_name))
    return groups


def _place(
    key: str, name: str, part: DatasetPart, file: ConfigFile | None, options: tuple[str, ...]
) -> dict:
    """Say where a field of a dataset is set: its place in the config, and the file behind that."""
    full = f'{key}.{name}'
    if any(f'{full}.'.startswith(f'{option}.') for option in options):
        return dict(key=key, file=COMMAND_LINE)
    if full.startswith(f'{getattr(part.cls, "__name__", "")}.METAINFO.'):
        return dict(key=key, file=inspect.getsourcefile(part.cls))
    return dict(key=key, file=file.locate(full) if file else None)


def _overrides(binding: Binding, name: str, place: Callable) -> list[dict]:
    # The names of the channel order replace each other.
    names = [name]
    if name in CHANNEL_ORDER:
        names += [other for other in CHANNEL_ORDER if other not in binding.fields]
    return [
        dict(field=lower, value=plain(value), **place(key, lower))
        for lower in names
        for key, value in reversed(binding.overridden.get(lower, []))
    ]


def _text(found: dict) -> str:
    return f'{found["key"]} ({found["file"]})' if found['file'] else found['key']


def preprocessor_class(cfg: Config) -> tuple[type, list[FieldSource]]:
    """Find the class of a config's preprocessor, and the fields that hold for every split.

    Args:
        cfg (Config): The config, under its own default scope.

    Returns:
        tuple: The class, and the places, lowest precedence first.

    Raises:
        ValueError: The class is not named, or not registered.
    """
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
    _, model = called_model(cfg)
    if not isinstance(model, dict):
        return None
    cls = find_class(MODELS, model.get('type'), model.get('_scope_'))
    for base in getattr(cls, '__mro__', ()):
        if inspect.isfunction(vars(base).get('__init__')):
            filled_in = re.search(
                r"""data_preprocessor\.setdefault\(\s*['"]type['"],\s*['"]([\w.]+)['"]""",
                inspect.getsource(base.__init__),
            )
            if filled_in:
                return filled_in.group(1)
    return None
