# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import copy

import numpy as np
import pytest
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dataset import BaseDataset, ConcatDataset
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.registry import DATASETS
from mmengine.runner import Runner
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset

from mmprefetch.fields.binding import table
from mmprefetch.fields.classes import constructor_fields, nearest
from mmprefetch.fields.datasets import FieldSource, read_parts, split_dataloader
from mmprefetch.fields.resolve import resolve, resolve_parts

KEY = 'train_dataloader.dataset'
RGB = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
ZERO = dict(mean=[0.0, 0.0, 0.0], std=[1.0, 1.0, 1.0])


class ToRgbPreprocessor(BaseDataPreprocessor):
    def __init__(self, mean=None, std=None, pad_size_divisor=1, to_rgb=False, num_classes=None):
        super().__init__()


class EitherNamePreprocessor(BaseDataPreprocessor):
    def __init__(self, to_rgb=False, bgr_to_rgb=False, rgb_to_bgr=False):
        super().__init__()


class PaddingPreprocessor(ImgDataPreprocessor):
    def __init__(self, *args, size=None, **kwargs):
        super().__init__(*args, **kwargs)


class TwoPairs(BaseDataPreprocessor):
    def __init__(self, mean=None, std=None, second_mean=None, second_std=None):
        super().__init__()


class Branches(BaseDataPreprocessor):
    def __init__(self, data_preprocessor):
        super().__init__()


class ScalarPreprocessor(BaseDataPreprocessor):
    def __init__(self, mean=127.5, std=127.5):
        super().__init__()


class OpenPreprocessor(nn.Module):
    def __init__(self, mean=None, **extra):
        super().__init__()


@DATASETS.register_module(force=True)
class BindingImages(BaseDataset):
    METAINFO = dict(classes=('a',))

    def load_data_list(self):
        return [dict(index=index) for index in range(3)]


@DATASETS.register_module(force=True)
class DeclaringImages(BindingImages):
    METAINFO = dict(preprocess=dict(mean=[1.0], std=[1.0], pad_value=7))


@DATASETS.register_module(force=True)
class TakingImages(BindingImages):
    def __init__(self, *args, data_preprocessor=None, **kwargs):
        self.given = data_preprocessor
        super().__init__(*args, **kwargs)


@DATASETS.register_module(force=True)
class TakingThroughKwargs(TakingImages):
    def __init__(self, **kwargs):
        super().__init__(**kwargs)


def images(**kwargs):
    return dict(type='BindingImages', **kwargs)


def bound(**fields):
    return FieldSource(f'{KEY}.data_preprocessor', fields)


def of_model(**fields):
    return FieldSource('model.data_preprocessor', fields)


def take_parts(dataset):
    """Part a dataset's config from the fields that are bound to it and those inside."""
    remaining, parts = split_dataloader(dict(dataset=dataset), 'train_dataloader')
    return remaining['dataset'], parts


def valid_fields(cls):
    return list(constructor_fields(cls)[0])


def accepts_any(cls):
    return constructor_fields(cls)[1]


def keys(part):
    return [source.key for source in part.sources]


# Fields of a class


def test_valid_fields_are_those_of_the_constructor():
    assert valid_fields(ImgDataPreprocessor) == [
        'mean',
        'std',
        'pad_size_divisor',
        'pad_value',
        'bgr_to_rgb',
        'rgb_to_bgr',
        'non_blocking',
    ]
    assert not accepts_any(ImgDataPreprocessor)


def test_valid_fields_follow_keyword_arguments_to_the_bases():
    assert valid_fields(PaddingPreprocessor) == ['size', *valid_fields(ImgDataPreprocessor)]
    assert not accepts_any(PaddingPreprocessor)


def test_constructor_that_keeps_keyword_arguments_accepts_any():
    assert valid_fields(OpenPreprocessor) == ['mean']
    assert accepts_any(OpenPreprocessor)
    assert not accepts_any(nn.Module)
    binding = resolve('train', OpenPreprocessor, [of_model(anything=1, to_rgb=True)])
    assert binding.fields == dict(anything=1, to_rgb=True)


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('bgr2rgb', " (did you mean 'bgr_to_rgb'?)"),
        ('STD', " (did you mean 'std'?)"),
        ('batch_augments', ''),
    ],
)
def test_nearest(name, expected):
    assert nearest(name, valid_fields(ImgDataPreprocessor)) == expected


# Finding the parts of a dataset config


@pytest.mark.parametrize('kind', [dict, ConfigDict])
def test_take_parts_removes_only_the_bound_fields(kind):
    cfg = kind(images(data_preprocessor=ZERO, metainfo=dict(classes=('b',)), pipeline=[]))
    cfg, (part,) = take_parts(cfg)
    assert cfg == images(metainfo=dict(classes=('b',)), pipeline=[])
    assert (part.key, part.type_name, part.cls) == (KEY, 'BindingImages', BindingImages)
    assert part.sources == [FieldSource(f'{KEY}.data_preprocessor', ZERO)]


def test_take_parts_searches_wrappers_at_any_depth():
    cfg = ConfigDict(
        type='RepeatDataset',
        times=2,
        data_preprocessor=dict(pad_value=1),
        dataset=dict(
            type='ConcatDataset',
            data_preprocessor=dict(pad_value=2),
            datasets=[
                images(data_preprocessor=dict(pad_value=3)),
                dict(type='RepeatDataset', times=1, dataset=images(), data_preprocessor=RGB),
            ],
        ),
    )
    cfg, (first, second) = take_parts(cfg)
    assert 'data_preprocessor' not in str(cfg)
    inner = f'{KEY}.dataset.datasets'
    assert (first.key, second.key) == (f'{inner}.0', f'{inner}.1.dataset')
    outer = [f'{KEY}.data_preprocessor', f'{KEY}.dataset.data_preprocessor']
    assert keys(first) == [*outer, f'{inner}.0.data_preprocessor']
    assert keys(second) == [*outer, f'{inner}.1.data_preprocessor']
    one, two = resolve_parts('train', ImgDataPreprocessor, [], [first, first])
    assert one.fields == two.fields == dict(pad_value=3)
    assert DATASETS.build(cfg).metainfo == dict(classes=('a',))


def test_take_parts_reads_metainfo_below_the_bound_fields():
    fields = dict(pad_value=8)
    cfg = dict(
        type='RepeatDataset',
        data_preprocessor=dict(pad_value=9),
        dataset=dict(type='DeclaringImages', metainfo=dict(preprocess=fields)),
    )
    cfg, (part,) = take_parts(cfg)
    assert keys(part) == [
        'DeclaringImages.METAINFO.preprocess',
        f'{KEY}.dataset.metainfo.preprocess',
        f'{KEY}.data_preprocessor',
    ]
    assert cfg['dataset']['metainfo'] == dict(preprocess=fields)
    assert resolve('train', ImgDataPreprocessor, part.sources).fields == dict(
        mean=[1.0], std=[1.0], pad_value=9
    )


@pytest.mark.parametrize('cls', [TakingImages, TakingThroughKwargs])
@pytest.mark.parametrize('by_name', [True, False])
def test_dataset_whose_constructor_names_the_key_keeps_it(cls, by_name):
    cfg = dict(type=cls.__name__ if by_name else cls, data_preprocessor=dict(ZERO))
    cfg, (part,) = take_parts(cfg)
    assert part.sources == [bound(**ZERO)]
    assert DATASETS.build(cfg).given == ZERO


def test_dataset_whose_constructor_names_the_key_may_take_an_object_there():
    module = ImgDataPreprocessor()
    cfg = dict(type=TakingImages, data_preprocessor=module)
    cfg, (part,) = take_parts(cfg)
    assert part.sources == []
    assert cfg['data_preprocessor'] is module


@pytest.mark.parametrize('type_', ['NotRegistered', 'no_such_package.Images', None])
def test_unresolvable_dataset_type_loses_the_key(type_):
    cfg = dict(type=type_, data_preprocessor=ZERO)
    cfg, (part,) = take_parts(cfg)
    assert cfg == dict(type=type_)
    assert part.sources == [bound(**ZERO)]
    assert part.cls is None


def test_one_config_object_at_two_places_binds_both():
    shared = images(data_preprocessor=ZERO)
    _, parts = take_parts(dict(type='ConcatDataset', datasets=[shared, shared]))
    assert [part.sources[0].fields for part in parts] == [ZERO, ZERO]


def test_other_values_under_a_wrapper_key_are_no_datasets():
    cfg = dict(type='BindingImages', dataset='refcoco', datasets=['a', 'b'], data_preprocessor=ZERO)
    cfg, (part,) = take_parts(cfg)
    assert part.key == KEY


def test_none_binds_nothing():
    _, (part,) = take_parts(images(data_preprocessor=None))
    assert part.sources == []


@pytest.mark.parametrize('value', [[1, 2], 'mean', 3, ImgDataPreprocessor()])
@pytest.mark.parametrize('place', ['data_preprocessor', 'metainfo.preprocess'])
def test_fields_that_are_no_dict(value, place):
    outer, _, inner = place.partition('.')
    cfg = images(**{outer: {inner: value} if inner else value})
    with pytest.raises(TypeError) as error:
        take_parts(dict(type='ConcatDataset', datasets=[cfg]))
    assert f'{KEY}.datasets.0.{place}: expected a dict' in str(error.value)
    assert f'found {type(value).__name__}' in str(error.value)
    assert f'write {inner or outer}=dict(mean=' in str(error.value)


def test_lazy_import_config(tmp_path):
    (tmp_path / 'base.py').write_text(
        'from mmengine.dataset import BaseDataset, RepeatDataset\n'
        'train_dataloader = dict(dataset=dict(type=RepeatDataset, times=2,\n'
        '    dataset=dict(type=BaseDataset, data_preprocessor=dict(mean=[1.0], std=[2.0]))))\n'
    )
    (tmp_path / 'child.py').write_text(
        'from mmengine.config import read_base\n'
        'with read_base():\n'
        '    from .base import *\n'
        'train_dataloader.dataset.dataset.data_preprocessor.update(mean=[3.0])\n'
    )
    cfg = Config.fromfile(tmp_path / 'child.py')
    remaining, (part,) = split_dataloader(cfg.train_dataloader, 'train_dataloader')
    assert part.type_name == 'BaseDataset'
    assert part.sources[0].fields == dict(mean=[3.0], std=[2.0])
    assert 'data_preprocessor' not in str(remaining)
    assert cfg.train_dataloader.dataset.dataset.data_preprocessor == dict(mean=[3.0], std=[2.0])


@pytest.mark.parametrize('kind', [dict, ConfigDict])
def test_split_dataloader_leaves_the_config_as_it_is(kind):
    images_ = images(data_preprocessor=ZERO)
    cfg = kind(
        batch_size=2,
        dataset=dict(type='ConcatDataset', datasets=[images_, images_], data_preprocessor=RGB),
    )
    before = copy.deepcopy(cfg)
    for _ in range(2):
        remaining, parts = split_dataloader(cfg, 'val_dataloader')
        assert cfg == before
        assert remaining == dict(
            batch_size=2, dataset=dict(type='ConcatDataset', datasets=[images(), images()])
        )
        assert [keys(part)[0] for part in parts] == ['val_dataloader.dataset.data_preprocessor'] * 2
        assert [len(part.sources) for part in parts] == [2, 2]


# Reading built datasets


def test_read_parts_of_built_datasets():
    declared = DeclaringImages()
    configured = DeclaringImages(metainfo=dict(preprocess=dict(pad_value=8)))
    attributed = BindingImages()
    attributed.data_preprocessor = dict(ZERO)
    concat = ConcatDataset(
        [declared, configured, attributed], ignore_keys=['preprocess', 'classes']
    )
    subset = Subset(concat, [0])
    subset.data_preprocessor = dict(pad_value=9)
    parts = read_parts(subset)
    inner = 'dataset.dataset.datasets'
    assert [part.key for part in parts] == [f'{inner}.{index}' for index in range(3)]
    assert keys(parts[0]) == ['DeclaringImages.METAINFO.preprocess', 'dataset.data_preprocessor']
    assert keys(parts[1]) == [
        'DeclaringImages.METAINFO.preprocess',
        f'{inner}.1.metainfo.preprocess',
        'dataset.data_preprocessor',
    ]
    # The first part's metainfo, which ConcatDataset gives as its own, is not that of the others.
    assert keys(parts[2]) == ['dataset.data_preprocessor', f'{inner}.2.data_preprocessor']


def test_read_parts_of_a_dataset_that_holds_another():
    class Plain(Dataset):
        pass

    class Holding(BindingImages):
        METAINFO = dict(preprocess=dict(pad_value=5))

    holding = Holding()
    holding.dataset = Plain()
    holding.datasets = 'coco'
    (part,) = read_parts(Subset(holding, [0]))
    assert part.sources == [FieldSource('Holding.METAINFO.preprocess', dict(pad_value=5))]


def test_preprocessor_object_as_a_dataset_attribute_is_no_fields():
    dataset = BindingImages()
    dataset.data_preprocessor = ImgDataPreprocessor()
    (part,) = read_parts(dataset)
    assert part.sources == []


def test_dataloader_given_as_an_object():
    dataset = DeclaringImages()
    loader = DataLoader(dataset)
    same_loader, (part,) = split_dataloader(loader, 'test_dataloader')
    assert same_loader is loader
    assert part.key == 'test_dataloader.dataset'
    assert part.sources[0].fields == DeclaringImages.METAINFO['preprocess']


def test_sliced_dataset_is_read_through():
    loader = Runner.build_dataloader(
        dict(
            dataset=dict(type='DeclaringImages'),
            sampler=dict(type='DefaultSampler', shuffle=False),
            batch_size=1,
            num_batch_per_epoch=1,
        )
    )
    (part,) = read_parts(loader.dataset)
    assert part.sources[0].fields == DeclaringImages.METAINFO['preprocess']


def test_built_dataset_inside_a_config():
    dataset = DeclaringImages()
    cfg = dict(type='RepeatDataset', dataset=dataset, data_preprocessor=dict(pad_value=3))
    cfg, (part,) = take_parts(cfg)
    assert part.key == f'{KEY}.dataset'
    assert [source.fields.get('pad_value') for source in part.sources] == [7, 3]


# Merging


def test_dataset_wins_field_by_field():
    model = of_model(type='PrefetchDataPreprocessor', wraps='X', **RGB, pad_size_divisor=32)
    top = FieldSource('data_preprocessor', dict(std=[2.0, 2.0, 2.0], pad_value=5))
    binding = resolve('train', ImgDataPreprocessor, [model, top, bound(mean=[0.0, 0.0, 0.0])])
    assert binding.fields == dict(
        mean=[0.0, 0.0, 0.0], std=[2.0, 2.0, 2.0], pad_value=5, pad_size_divisor=32
    )
    assert binding.origin == dict(
        mean=f'{KEY}.data_preprocessor',
        std='data_preprocessor',
        pad_value='data_preprocessor',
        pad_size_divisor='model.data_preprocessor',
    )
    assert binding.overridden == dict(
        mean=[('model.data_preprocessor', RGB['mean'])],
        std=[('model.data_preprocessor', RGB['std'])],
    )
    assert (binding.split, binding.type_name) == ('train', 'ImgDataPreprocessor')


def test_overridden_values_are_listed_lowest_first():
    sources = [FieldSource(str(value), dict(pad_value=value)) for value in range(3)]
    binding = resolve('val', ImgDataPreprocessor, sources)
    assert binding.fields == dict(pad_value=2)
    assert binding.overridden == dict(pad_value=[('0', 0), ('1', 1)])


def test_sources_are_not_changed():
    sources = [of_model(**RGB, to_rgb=True), bound(bgr_to_rgb=False, **ZERO)]
    before = copy.deepcopy(sources)
    resolve('train', ImgDataPreprocessor, sources)
    assert sources == before


@pytest.mark.parametrize('name', ['type', 'wraps', 'prefetch_safe', '_scope_'])
def test_what_is_said_of_the_wrapper_is_no_field(name):
    assert resolve('train', ImgDataPreprocessor, [bound(**{name: 'x'})]).fields == {}


@pytest.mark.parametrize(
    ('cls', 'written', 'known'),
    [
        (ImgDataPreprocessor, 'to_rgb', 'bgr_to_rgb'),
        (ImgDataPreprocessor, 'bgr_to_rgb', 'bgr_to_rgb'),
        (ImgDataPreprocessor, 'rgb_to_bgr', 'rgb_to_bgr'),
        (PaddingPreprocessor, 'to_rgb', 'bgr_to_rgb'),
        (ToRgbPreprocessor, 'bgr_to_rgb', 'to_rgb'),
        (ToRgbPreprocessor, 'to_rgb', 'to_rgb'),
        (EitherNamePreprocessor, 'to_rgb', 'to_rgb'),
        (EitherNamePreprocessor, 'bgr_to_rgb', 'bgr_to_rgb'),
    ],
)
@pytest.mark.parametrize('value', [True, False, None])
def test_channel_order_goes_by_the_name_that_the_class_has(cls, written, known, value):
    binding = resolve('train', cls, [bound(**{written: value})])
    assert binding.fields == {known: value}
    assert binding.origin == {known: f'{KEY}.data_preprocessor'}
    assert binding.reverses_channels is bool(value)


@pytest.mark.parametrize('written', ['to_rgb', 'bgr_to_rgb', 'rgb_to_bgr'])
def test_one_pixel(written):
    binding = resolve(
        'train', ImgDataPreprocessor, [bound(mean=[1, 2, 3], std=[1, 1, 1], **{written: True})]
    )
    pixel = torch.tensor([10, 20, 30], dtype=torch.uint8).reshape(3, 1, 1)
    out = ImgDataPreprocessor(**binding.fields)(dict(inputs=[pixel]))
    assert out['inputs'].flatten().tolist() == [29.0, 18.0, 7.0]


@pytest.mark.parametrize(
    ('lower', 'higher', 'fields'),
    [
        (dict(bgr_to_rgb=True), dict(rgb_to_bgr=True), dict(rgb_to_bgr=True)),
        (dict(bgr_to_rgb=True), dict(rgb_to_bgr=False), dict(rgb_to_bgr=False)),
        (dict(bgr_to_rgb=True), dict(bgr_to_rgb=None), dict(bgr_to_rgb=None)),
        (dict(bgr_to_rgb=True), dict(to_rgb=False), dict(bgr_to_rgb=False)),
        (dict(rgb_to_bgr=True), dict(bgr_to_rgb=False), dict(bgr_to_rgb=False)),
        (
            dict(bgr_to_rgb=False, rgb_to_bgr=True),
            dict(bgr_to_rgb=True, rgb_to_bgr=False),
            dict(bgr_to_rgb=True, rgb_to_bgr=False),
        ),
    ],
)
def test_higher_channel_order_replaces_the_lower_one(lower, higher, fields):
    binding = resolve('train', ImgDataPreprocessor, [of_model(**lower), bound(**higher)])
    assert binding.fields == fields
    assert binding.origin.keys() == fields.keys()
    assert binding.overridden == {
        name: [('model.data_preprocessor', value)] for name, value in lower.items()
    }


def test_higher_channel_order_replaces_the_other_name():
    sources = [of_model(to_rgb=True), bound(bgr_to_rgb=False)]
    assert resolve('train', EitherNamePreprocessor, sources).fields == dict(bgr_to_rgb=False)


def test_same_decision_under_both_names():
    fields = bound(to_rgb=True, bgr_to_rgb=True)
    assert resolve('train', ImgDataPreprocessor, [fields]).fields == dict(bgr_to_rgb=True)


@pytest.mark.parametrize(
    'fields',
    [
        dict(to_rgb=True, bgr_to_rgb=False),
        dict(to_rgb=False, bgr_to_rgb=True),
        dict(bgr_to_rgb=True, rgb_to_bgr=True),
        dict(to_rgb=True, rgb_to_bgr=True),
    ],
)
@pytest.mark.parametrize('cls', [ImgDataPreprocessor, EitherNamePreprocessor])
def test_one_place_that_disagrees_with_itself(fields, cls):
    with pytest.raises(ValueError, match='contradict each other; write only one') as error:
        resolve('train', cls, [bound(**fields)])
    assert str(error.value).startswith(f'{KEY}.data_preprocessor: ')
    assert all(f'{name}={value}' in str(error.value) for name, value in fields.items())


# Checks


@pytest.mark.parametrize(
    ('cls', 'name', 'hint'),
    [
        (ImgDataPreprocessor, 'maen', " (did you mean 'mean'?)"),
        (ImgDataPreprocessor, 'bgr2rgb', " (did you mean 'bgr_to_rgb'?)"),
        (ImgDataPreprocessor, 'pad_size_dividor', " (did you mean 'pad_size_divisor'?)"),
        (ToRgbPreprocessor, 'rgb_to_bgr', ''),
        (BaseDataPreprocessor, 'mean', ''),
    ],
)
def test_unknown_field(cls, name, hint):
    with pytest.raises(ValueError) as error:
        resolve('train', cls, [of_model(), bound(**{name: [1]})])
    message = str(error.value)
    assert message.startswith(f'{KEY}.data_preprocessor: {cls.__name__} has no field {name!r}')
    assert hint in message
    assert f'valid fields: {", ".join(valid_fields(cls))}' in message


@pytest.mark.parametrize(('given', 'missing'), [('mean', 'std'), ('std', 'mean')])
def test_mean_without_std(given, missing):
    with pytest.raises(ValueError, match=f'{given} is given .*, {missing} is not') as error:
        resolve('train', ImgDataPreprocessor, [bound(**{given: [1.0]})])
    assert f'{KEY}.data_preprocessor' in str(error.value)


def test_mean_without_std_after_the_merge():
    with pytest.raises(ValueError) as error:
        resolve('val', ImgDataPreprocessor, [of_model(**RGB), bound(mean=None)])
    assert 'std is given (model.data_preprocessor, but ' in str(error.value)
    assert f'{KEY}.data_preprocessor says mean=None' in str(error.value)
    assert 'val split' in str(error.value)


def test_normalisation_can_be_left_out():
    sources = [of_model(**RGB), bound(mean=None, std=None)]
    fields = resolve('train', ImgDataPreprocessor, sources).fields
    assert fields == dict(mean=None, std=None)


def test_mean_alone_is_fine_where_the_class_has_a_default_std():
    assert resolve('train', ScalarPreprocessor, [bound(mean=[1, 2, 3])]).fields == dict(
        mean=[1, 2, 3]
    )


def test_mean_and_std_from_different_places():
    sources = [of_model(std=[1, 2, 3]), bound(mean=(4, 5, 6))]
    fields = resolve('train', ImgDataPreprocessor, sources).fields
    assert fields == dict(mean=(4, 5, 6), std=[1, 2, 3])


@pytest.mark.parametrize('lengths', [(3, 4), (4, 3), (2, 3)])
def test_mean_and_std_of_different_lengths(lengths):
    mean, std = lengths
    with pytest.raises(ValueError) as error:
        resolve('train', ImgDataPreprocessor, [of_model(std=[1] * std), bound(mean=[0] * mean)])
    assert f'mean has {mean} values ({KEY}.data_preprocessor)' in str(error.value)
    assert f'std has {std} (model.data_preprocessor)' in str(error.value)


@pytest.mark.parametrize('lengths', [(3, 1), (1, 3), (1, 1), (19, 19), (4, 4)])
def test_lengths_that_fit(lengths):
    mean, std = lengths
    fields = dict(mean=[0] * mean, std=[1] * std)
    assert resolve('train', ImgDataPreprocessor, [bound(**fields)]).fields == fields


@pytest.mark.parametrize('zero', [0, 0.0, -0.0, 1e-60])
def test_zero_std(zero):
    with pytest.raises(ValueError, match='holds a zero') as error:
        resolve('train', ImgDataPreprocessor, [bound(mean=[1, 2], std=[1, zero])])
    assert f'{KEY}.data_preprocessor: std=' in str(error.value)


def test_second_pair_of_statistics():
    fields = dict(second_mean=[1.0, 2.0], second_std=[1.0, 2.0])
    assert resolve('train', TwoPairs, [bound(**fields)]).fields == fields
    for wrong, said in (
        (dict(second_std=[1, 0]), 'second_std=.1, 0. holds a zero'),
        (dict(second_std=[1, float('nan')]), 'second_std=.* not finite'),
        (dict(second_std=None), 'second_mean is given .*, second_std is not'),
        (dict(second_std=[1, 2, 3]), 'second_mean has 2 values .*, second_std has 3'),
    ):
        with pytest.raises(ValueError, match=said):
            resolve('train', TwoPairs, [bound(**fields | wrong)])


@pytest.mark.parametrize(
    ('inner', 'said'),
    [
        (dict(mean=[1, 2, 3], std=[1, 0, 1]), r'std=\[1, 0, 1\] holds a zero'),
        (dict(mean=[1, float('inf')], std=[1]), 'mean=.* not finite'),
        (dict(mean=[1, 2, 3], std=[1, 2]), 'mean has 3 values .*std has 2'),
        (dict(mean=[1], std=None), 'mean is given .*std=None'),
        (dict(mean='123', std=[1]), "mean='123' is not a sequence"),
    ],
)
def test_statistics_of_a_preprocessor_inside(inner, said):
    with pytest.raises(ValueError, match=said) as error:
        resolve('train', Branches, [of_model(data_preprocessor=dict(type='Any', **inner))])
    assert 'model.data_preprocessor.data_preprocessor' in str(error.value)


@pytest.mark.parametrize(
    'inner', [{}, dict(mean=None), dict(mean=[1, 2]), dict(mean=1, std=2), dict(mean=[1], std=[2])]
)
def test_a_preprocessor_inside_whose_class_decides(inner):
    fields = dict(data_preprocessor=dict(type='Any', **inner))
    assert resolve('train', Branches, [of_model(**fields)]).fields == fields


@pytest.mark.parametrize('value', [float('nan'), float('inf'), -float('inf')])
@pytest.mark.parametrize('name', ['mean', 'std'])
def test_values_that_are_not_finite(name, value):
    fields = dict(mean=[1.0, 1.0], std=[1.0, 1.0]) | {name: [1.0, value]}
    with pytest.raises(ValueError, match=f'{name}=.*not finite'):
        resolve('train', ImgDataPreprocessor, [bound(**fields)])


@pytest.mark.parametrize(
    'value', ['123', [], [None], ['1', '2', '3'], 127.5, True, [True], {}, [[1.0]]]
)
@pytest.mark.parametrize('name', ['mean', 'std'])
def test_values_that_are_no_sequence_of_numbers(name, value):
    fields = dict(mean=[1.0], std=[1.0]) | {name: value}
    with pytest.raises(ValueError, match=f'data_preprocessor: {name}=.* is not a sequence'):
        resolve('train', ImgDataPreprocessor, [bound(**fields)])


def test_arrays_are_sequences_of_numbers():
    fields = dict(mean=np.float32([1, 2, 3]), std=np.int64([1, 2, 3]))
    assert resolve('train', ImgDataPreprocessor, [bound(**fields)]).fields == fields


def test_one_number_where_the_default_of_the_class_is_one():
    assert resolve('train', ScalarPreprocessor, [bound(mean=0, std=255)]).fields == dict(
        mean=0, std=255
    )


# Several datasets in one split


def concatenated(*fields, **outer):
    datasets = [images(data_preprocessor=dict(each)) for each in fields]
    return take_parts(dict(type='ConcatDataset', datasets=datasets, **outer))[1]


def test_parts_may_differ_in_mean_std_and_channel_order():
    parts = concatenated(dict(RGB, bgr_to_rgb=True), dict(ZERO, rgb_to_bgr=False), {})
    model = [of_model(mean=[5.0], std=[6.0], pad_size_divisor=32)]
    of_parts = resolve_parts('train', ImgDataPreprocessor, model, parts)
    assert [part.fields.get('mean') for part in of_parts] == [RGB['mean'], ZERO['mean'], [5.0]]
    assert [part.part for part in of_parts] == [f'{KEY}.datasets.{index}' for index in range(3)]
    assert [part.reverses_channels for part in of_parts] == [
        True,
        False,
        False,
    ]
    assert all(part.fields['pad_size_divisor'] == 32 for part in of_parts)


@pytest.mark.parametrize(
    'fields',
    [
        (dict(pad_size_divisor=32), dict(pad_size_divisor=16)),
        (dict(), dict(pad_value=3)),
        (dict(pad_value=3), dict(pad_value=3), dict()),
    ],
)
def test_parts_may_not_differ_in_other_fields(fields):
    name = next(iter(fields[0] or fields[1]))
    with pytest.raises(ValueError) as error:
        resolve_parts('train', ImgDataPreprocessor, [], concatenated(*fields))
    message = str(error.value)
    last = len(fields) - 1
    default = dict(pad_value=0).get(name)
    for index in (0, last):
        assert f'{name}={fields[index].get(name, default)} for {KEY}.datasets.{index}' in message
        assert f'BindingImages at {KEY}.datasets.{index}' in message


def test_value_equal_to_the_default_is_no_difference():
    parts = concatenated(dict(pad_value=0), {})
    one, two = resolve_parts('train', ImgDataPreprocessor, [], parts)
    assert (one.fields, two.fields) == (dict(pad_value=0), {})


@pytest.mark.parametrize(
    ('one', 'other', 'name'),
    [
        (RGB, ZERO, 'mean'),
        (RGB, dict(RGB, std=[1, 1, 1]), 'std'),
        (RGB, dict(RGB, bgr_to_rgb=True), 'channel order'),
    ],
)
def test_merged_images_can_not_be_normalised_by_sample(one, other, name):
    mixing = dict(type='MultiImageMixDataset', dataset=dict(type='ConcatDataset'))
    mixing['dataset']['datasets'] = [images(data_preprocessor=dict(f)) for f in (one, other)]
    cfg = dict(type='ConcatDataset', datasets=[images(data_preprocessor=ZERO), mixing])
    _, parts = take_parts(cfg)
    assert [part.mixed_by for part in parts] == [None, *[f'{KEY}.datasets.1'] * 2]
    with pytest.raises(ValueError, match='merges images of several samples') as error:
        resolve_parts('train', ImgDataPreprocessor, [], parts)
    assert f"can't differ in {name}" in str(error.value)
    assert all(f'{KEY}.datasets.1.dataset.datasets.{index}' in str(error.value) for index in (0, 1))


def test_merged_images_normalised_alike():
    mixing = dict(
        type='mmdet.MultiImageMixDataset',
        dataset=dict(
            type='ConcatDataset', datasets=[images(data_preprocessor=RGB) for _ in range(2)]
        ),
    )
    outer = dict(type='ConcatDataset', datasets=[images(data_preprocessor=ZERO), mixing])
    of_parts = resolve_parts('train', ImgDataPreprocessor, [], take_parts(outer)[1])
    assert [part.fields['mean'] for part in of_parts] == [ZERO['mean'], RGB['mean'], RGB['mean']]


# Showing


def test_table():
    parts = concatenated(dict(mean=(1, 2)), dict(mean=[3]))
    of_parts = resolve_parts('train', ImgDataPreprocessor, [of_model(std=[4])], parts)
    val = resolve('val', ImgDataPreprocessor, [])
    assert table([*of_parts, val]).splitlines() == [
        'split                                        field  value                            from',
        f'train ({KEY}.datasets.0)  std    [4]                              '
        'model.data_preprocessor',
        f'train ({KEY}.datasets.0)  mean   [1, 2]                           '
        f'{KEY}.datasets.0.data_preprocessor',
        f'train ({KEY}.datasets.1)  std    [4]                              '
        'model.data_preprocessor',
        f'train ({KEY}.datasets.1)  mean   [3]                              '
        f'{KEY}.datasets.1.data_preprocessor',
        'val                                          -      defaults of ImgDataPreprocessor  -',
    ]
