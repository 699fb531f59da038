"""deploy/local/install_diffusers.py: a failed installation leaves nothing, and one that is whole is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from deploy.local import install_diffusers
from deploy.local.engine_environment import STAMP, python_of
from deploy.local.install import InstallError
from shared.errors import ConfigError


def test_a_failed_installation_names_its_step_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment, steps = tmp_path / "diffusers", list[str]()
    with pytest.raises(InstallError, match=r"installing torch==.* failed"):
        install_diffusers.install("cpu", steps.append, environment)
    assert steps[:2] == ["making the environment", f"installing {install_diffusers.TORCH}"]
    assert not environment.exists()
    with pytest.raises(ConfigError, match=r"not installed: \./headrace install-diffusers"):
        install_diffusers.require(environment)


def test_an_installation_with_its_stamp_is_kept_and_says_what_it_computes_on(tmp_path: Path) -> None:
    environment, steps = tmp_path / "diffusers", list[str]()
    python = python_of(environment)
    python.parent.mkdir(parents=True)
    python.touch()
    (environment / STAMP).write_text('{"diffusers": "0.42.1", "device": "cuda"}')
    assert install_diffusers.install("cpu", steps.append, environment) is False
    assert steps == []
    assert install_diffusers.require(environment) == python
    assert install_diffusers.device_of(environment) == "cuda"
    (environment / STAMP).write_text("{}")
    with pytest.raises(ConfigError, match=r"headrace\.json cannot be read .*: remove "):
        install_diffusers.device_of(environment)
