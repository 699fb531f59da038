"""The state directory of an `up`."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local.state import StateDirectory


@pytest.fixture
def state_dir(tmp_path: Path) -> StateDirectory:
    state_dir = StateDirectory(tmp_path)
    state_dir.run.mkdir(parents=True)
    state_dir.logs.mkdir()
    return state_dir
