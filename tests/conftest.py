# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
"""What every test needs: no state of mmengine or of the random generators left over."""

import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from mmengine.logging import MessageHub, MMLogger
from mmengine.registry import DefaultScope
from mmengine.visualization import Visualizer

# The tensors of the tests are small: threads would wait for each other longer than they compute.
os.environ.setdefault('OMP_NUM_THREADS', '1')
torch.set_num_threads(int(os.environ['OMP_NUM_THREADS']))


@pytest.fixture(autouse=True)
def clean_state():
    """Begin each test with seeded generators and without mmengine's global instances."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    torch.use_deterministic_algorithms(False)
    for manager in (MessageHub, DefaultScope, Visualizer):
        manager._instance_dict.clear()
    for logger in MMLogger._instance_dict.values():
        for handler in logger.handlers:
            handler.close()
    MMLogger._instance_dict.clear()


@pytest.fixture(scope='session')
def digits_root(tmp_path_factory):
    """The demo's images, written once for all tests."""
    root = tmp_path_factory.mktemp('data') / 'digits'
    tool = Path(__file__).parents[1] / 'tools' / 'prepare_demo_data.py'
    subprocess.run([sys.executable, tool, '--out', root], check=True, capture_output=True)
    return root
