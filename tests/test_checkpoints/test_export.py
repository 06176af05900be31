# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""An exported model gives what torch gives, from the images as they are decoded."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.model import BaseDataPreprocessor, ImgDataPreprocessor
from mmengine.registry import DATASETS
from torch import nn

from mmprefetch import PrefetchDataPreprocessor
from mmprefetch.checkpoints.export import Preprocessing, to_onnx
from mmprefetch.checkpoints.restore import load_preprocessor
from mmprefetch.demo import SimpleClassifier

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / 'configs' / 'demo' / 'digits_prefetch.py'
DIGITS = dict(mean=[77.91] * 3, std=[95.87] * 3, bgr_to_rgb=True)
COLOURS = dict(mean=[120.0, 110.0, 100.0], std=[60.0, 55.0, 50.0], bgr_to_rgb=True)


def made(channels=3, **fields):
    return PrefetchDataPreprocessor(**fields) if channels != 3 else ImgDataPreprocessor(**fields)


def expected_of(preprocessor, batch):
    return PrefetchDataPreprocessor.around(preprocessor)(dict(inputs=list(batch)))['inputs']


def noise(channels=3, dtype=torch.uint8):
    return torch.randint(0, 256, (3, channels, 6, 7), dtype=torch.uint8).to(dtype)


# -- preprocessing ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ('channels', 'fields'),
    [
        (3, {}),
        (3, dict(bgr_to_rgb=True)),
        (3, dict(mean=[5.0], std=[3.0])),
        (3, COLOURS),
        (3, dict(COLOURS, pad_size_divisor=4, pad_value=7)),
        (1, dict(mean=[5.0], std=[3.0])),
        (4, dict(mean=[1.0, 2.0, 3.0, 4.0], std=[5.0, 6.0, 7.0, 8.0], bgr_to_rgb=True)),
    ],
)
def test_preprocessing_equals_the_preprocessor_to_the_bit(channels, fields):
    preprocessor = made(channels, **fields)
    batch = noise(channels)
    ours = Preprocessing(preprocessor, batch)(batch)
    assert torch.equal(ours, expected_of(preprocessor, batch))


@pytest.mark.parametrize('dtype', [torch.float32, torch.float16])
def test_preprocessing_of_floats(dtype):
    preprocessor, batch = made(**COLOURS), noise(dtype=dtype)
    ours = Preprocessing(preprocessor, batch)(batch)
    assert torch.equal(ours, expected_of(preprocessor, batch))


def test_the_effective_preprocessor_of_a_split_is_taken():
    wrapper = PrefetchDataPreprocessor(**COLOURS)
    wrapper.bind('test', ImgDataPreprocessor(**DIGITS))
    wrapper.split = 'test'
    batch = noise()
    assert torch.equal(
        Preprocessing(wrapper, batch)(batch), expected_of(ImgDataPreprocessor(**DIGITS), batch)
    )


class Halving(ImgDataPreprocessor):
    """Does more than it says."""

    def forward(self, data, training=False):
        data = super().forward(data, training)
        data['inputs'] = data['inputs'] / 2
        return data


class Shrinking(BaseDataPreprocessor):
    """Gives images of another size."""

    def forward(self, data, training=False):
        return dict(inputs=torch.stack(data['inputs'])[..., 1:], data_samples=None)


@pytest.mark.parametrize('preprocessor', [Halving(**COLOURS), Shrinking(), BaseDataPreprocessor()])
def test_a_preprocessor_that_does_more_is_refused(preprocessor):
    with pytest.raises(ValueError, match=f'{type(preprocessor).__name__} does more') as caught:
        Preprocessing(preprocessor, noise())
    assert 'ImgDataPreprocessor' in str(caught.value)


# -- export -------------------------------------------------------------------------------------


@pytest.fixture(scope='session')
def runtime():
    """onnxruntime, where what exports and runs a graph is installed."""
    why = 'install requirements/deploy.txt'
    for name in ('onnx', 'onnxscript'):
        pytest.importorskip(name, reason=why)
    return pytest.importorskip('onnxruntime', reason=why)


def answer(runtime, path, batch):
    session = runtime.InferenceSession(path, providers=['CPUExecutionProvider'])
    (given,), (output,) = session.get_inputs(), session.get_outputs()
    assert (given.name, output.name) == ('images', 'output')
    return session.run(None, {'images': batch.numpy()})[0], given


def classifier(channels=3):
    model = SimpleClassifier(
        10,
        channels=(4, 8),
        strides=(1, 2),
        in_channels=channels,
        data_preprocessor=dict(type='ImgDataPreprocessor'),
    )
    # Statistics as of a model that was trained.
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
    return model.eval()


def close(ours, model, preprocessor, batch):
    with torch.no_grad():
        expected = model(expected_of(preprocessor, batch), mode='tensor')
    assert ours.shape == tuple(expected.shape)
    np.testing.assert_allclose(ours, expected.numpy(), rtol=0, atol=1e-5)
    assert np.abs(ours).max() > 1e-3


@pytest.fixture
def digits(digits_root):
    """Scanned digits, (N, 3, 8, 8) uint8."""
    cfg = Config.fromfile(CONFIG).val_dataloader.dataset
    cfg.data_root = str(digits_root)
    del cfg['data_preprocessor']
    dataset = DATASETS.build(cfg)
    return torch.stack([dataset[index]['inputs'] for index in range(0, len(dataset), 20)])


def test_onnxruntime_equals_torch_on_scanned_digits(runtime, tmp_path, digits):
    model, preprocessor = classifier(), made(**DIGITS)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert to_onnx(model.train(), preprocessor, digits[:1], tmp_path / 'm.onnx')
    assert model.training and isinstance(model.data_preprocessor, ImgDataPreprocessor)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()
    # One file, and batches of any size.
    assert [path.name for path in tmp_path.iterdir()] == ['m.onnx']
    for batch in (digits, digits[3:4]):
        ours, given = answer(runtime, tmp_path / 'm.onnx', batch)
        close(ours, model, preprocessor, batch)
    assert given.type == 'tensor(uint8)' and given.shape == ['batch', 3, 8, 8]


def test_onnxruntime_equals_torch_on_photographs(runtime, tmp_path):
    datasets = pytest.importorskip('sklearn.datasets')
    photos = np.stack([image[:93, :101] for image in datasets.load_sample_images().images])
    batch = torch.from_numpy(np.ascontiguousarray(photos.transpose(0, 3, 1, 2)))
    model, preprocessor = classifier(), made(**COLOURS, pad_size_divisor=32, pad_value=1)
    assert to_onnx(model, preprocessor, batch, str(tmp_path / 'm.onnx'))
    close(answer(runtime, tmp_path / 'm.onnx', batch)[0], model, preprocessor, batch)


def test_four_channels(runtime, tmp_path):
    fields = dict(mean=[90.0, 95.0, 100.0, 105.0], std=[50.0, 55.0, 60.0, 65.0], bgr_to_rgb=True)
    model, preprocessor, batch = classifier(4), made(4, **fields), noise(4)
    assert to_onnx(model, preprocessor, batch, tmp_path / 'm.onnx')
    close(answer(runtime, tmp_path / 'm.onnx', batch)[0], model, preprocessor, batch)


class ThreeAtOnce(nn.Module):
    """A model for batches of three."""

    def __init__(self):
        super().__init__()
        self.register_buffer('offsets', torch.arange(3.0).view(3, 1, 1, 1))
        self.head = nn.Linear(3, 2)

    def forward(self, inputs, data_samples=None, mode='tensor'):
        return self.head((inputs + self.offsets).mean((2, 3)))


def test_a_model_of_one_size_of_batch(runtime, tmp_path):
    model, preprocessor, batch = ThreeAtOnce(), made(**COLOURS), noise()
    assert not to_onnx(model, preprocessor, batch, tmp_path / 'm.onnx')
    ours, given = answer(runtime, tmp_path / 'm.onnx', batch)
    close(ours, model, preprocessor, batch)
    assert given.shape == [3, 3, 6, 7]


def test_a_model_that_cannot_be_exported(runtime, tmp_path):
    class Stubborn(nn.Module):
        def forward(self, inputs, mode):
            return inputs.sum() if inputs.sum() > 0 else inputs.mean()

    with pytest.raises(torch.onnx.OnnxExporterError):
        to_onnx(Stubborn(), made(**COLOURS), noise(), tmp_path / 'm.onnx')
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('example', [torch.zeros(3, 8, 8), torch.zeros(0, 3, 8, 8), [1]])
def test_examples_that_are_no_batch(tmp_path, example):
    with pytest.raises(ValueError, match=r'example: a tensor of shape \(N, C, H, W\)'):
        to_onnx(classifier(), made(**COLOURS), example, tmp_path / 'm.onnx')


def test_what_is_not_installed_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr('mmprefetch.checkpoints.export.find_spec', lambda name: None)
    with pytest.raises(ImportError, match=r'needs onnx and onnxscript.*mmprefetch\[deploy\]'):
        to_onnx(classifier(), made(**COLOURS), noise(), tmp_path / 'm.onnx')


# -- the tool -----------------------------------------------------------------------------------


def run_tool(*args):
    command = [sys.executable, ROOT / 'tools' / 'export.py', *map(str, args)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


@pytest.fixture
def checkpoint(tmp_path):
    cfg = Config.fromfile(CONFIG).model
    model = SimpleClassifier(**{key: cfg[key] for key in ('num_classes', 'channels', 'strides')})
    meta = dict(data_preprocessor=dict(val=dict(type='ImgDataPreprocessor', **DIGITS)))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'c.pth')
    return tmp_path / 'c.pth', model.eval()


@pytest.mark.parametrize('flags', [['--shape', 3, 8, 8], None])
def test_the_tool_exports_with_the_recorded_preprocessing(
    runtime, tmp_path, checkpoint, digits, digits_root, flags
):
    path, model = checkpoint
    flags = flags or ['--cfg-options', f'test_dataloader.dataset.data_root={digits_root}']
    result = run_tool(CONFIG, path, tmp_path / 'new' / 'm.onnx', *flags)
    assert result.returncode == 0, result.stderr
    assert 'takes (N, 3, 8, 8) uint8' in result.stdout
    ours, _ = answer(runtime, tmp_path / 'new' / 'm.onnx', digits)
    close(ours, model, load_preprocessor(path), digits)


def test_the_tool_says_what_a_checkpoint_lacks(tmp_path, checkpoint):
    path, model = checkpoint
    torch.save(dict(state_dict=model.state_dict(), meta={}), path)
    result = run_tool(CONFIG, path, tmp_path / 'm.onnx', '--shape', 3, 8, 8)
    assert result.returncode == 1
    assert 'PrefetchHook writes it' in result.stderr and not (tmp_path / 'm.onnx').exists()
