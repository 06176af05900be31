# Copyright (c) mmprefetch contributors. Licensed under the Apache License 2.0.
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Bounds for a stuck machine only: a test that waits this long has failed.
PATIENCE_S = 120


def wait_until(condition):
    """Wait for a condition; False if it never came true."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.05)
    return False


def living_members(group):
    """Ids of the processes of a group that still run."""
    members = []
    for path in Path('/proc').glob('[0-9]*/stat'):
        try:
            fields = path.read_text().rpartition(')')[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        state, _, process_group = fields[:3]
        if int(process_group) == group and state != 'Z':
            members.append(int(path.parent.name))
    return members


@pytest.fixture
def endless_run(digits_options, tmp_path):
    """A training run in a process group of its own, which would not end by itself."""
    config = ROOT / 'configs' / 'demo' / 'digits_prefetch.py'
    options = [*digits_options, 'train_cfg.max_epochs=100000']
    process = subprocess.Popen(
        [
            *(sys.executable, ROOT / 'tools' / 'train.py', config),
            *('--work-dir', tmp_path, '--cfg-options', *options),
        ],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    yield process
    if living_members(process.pid):
        os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_ctrl_c_ends_everything_and_resume_goes_on(endless_run, train, tmp_path):
    def begun_second_epoch():
        return any(
            re.search(r'Epoch\(train\) +\[2\]', path.read_text())
            for path in tmp_path.glob('*/*.log')
        )

    # By then a checkpoint is saved, and the workers of training and validation all run.
    assert wait_until(lambda: begun_second_epoch() or endless_run.poll() is not None)
    assert endless_run.poll() is None
    assert len(living_members(endless_run.pid)) > 1, 'no worker process was running'

    os.killpg(endless_run.pid, signal.SIGINT)
    _, errors = endless_run.communicate(timeout=PATIENCE_S)
    assert endless_run.returncode != 0
    assert 'KeyboardInterrupt' in errors
    assert wait_until(lambda: not living_members(endless_run.pid))

    saved = tmp_path / 'last_checkpoint'
    epoch = int(Path(saved.read_text()).stem.removeprefix('epoch_'))
    train('digits_prefetch', tmp_path, '--resume', options=[f'train_cfg.max_epochs={epoch + 1}'])
    assert Path(saved.read_text()).name == f'epoch_{epoch + 1}.pth'
    (log,) = [
        path
        for path in tmp_path.glob('*/*.log')
        if f'resumed epoch: {epoch}, iter: {45 * epoch}' in path.read_text()
    ]
    assert re.search(rf'Epoch\(train\) +\[{epoch + 1}\]', log.read_text())
