"""shared/installation.py: messages name commands that are there, in a checkout and in the package."""

from __future__ import annotations

import importlib.util
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType

import pytest

from deploy.local.state import DEFAULT_HOME, default_home
from shared import installation
from shared.version import VERSION

ROOT = Path(__file__).resolve().parents[2]


def loaded(packages: Path) -> ModuleType:
    """Return the module as it is in a directory of packages into which a wheel was installed."""
    package = packages / "headrace"
    file = package / "tree" / "shared" / "installation.py"
    file.parent.mkdir(parents=True)
    (package / "__main__.py").touch()
    shutil.copy(installation.__file__, file)
    spec = importlib.util.spec_from_file_location("installation", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_checkout_has_its_own_script_and_environment() -> None:
    assert not installation.PACKAGED
    assert installation.TREE == ROOT
    assert (ROOT / installation.COMMAND).is_file()
    assert (ROOT / f"{installation.BIN}python").exists()
    assert installation.help_command("router") == ".venv/bin/python -m services.router --help"
    assert installation.install_command("gpu") == "./headrace install-gpu"
    text = installation.install_command("otel")
    assert (ROOT / text.split()[-1]).is_file()
    assert installation.as_here(text) == text
    assert installation.version_text() == f"headrace {VERSION}"


def test_the_package_has_programs_and_extras(tmp_path: Path) -> None:
    there = loaded(tmp_path / "site packages")
    assert there.PACKAGED
    assert tmp_path / "site packages" / "headrace" / "tree" == there.TREE
    assert there.help_command("router") == "headrace-router --help"
    assert there.install_command("otel") == "pip install 'headrace[otel]'"
    assert "torch" not in there.install_command("nixl")
    assert there.install_command("nixl").endswith(" --no-deps nixl-cu13")
    said = there.as_here("try `.venv/bin/python -m services.frontend --help` or ./headrace up")
    assert said == f"try `headrace-frontend --help` or {there.COMMAND} up"


def test_an_environment_that_is_not_in_path_names_its_command_by_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = tmp_path / "an environment" / "bin"
    scripts.mkdir(parents=True)
    (scripts / "headrace").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(scripts / "python"))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    assert shlex.quote(str(scripts / "headrace")) == loaded(tmp_path / "outside").COMMAND
    monkeypatch.setenv("PATH", str(scripts))
    assert loaded(tmp_path / "inside").COMMAND == "headrace"


def test_the_version_names_the_commit_if_the_build_knew_it(tmp_path: Path) -> None:
    there = loaded(tmp_path)
    assert there.version_text() == f"headrace {VERSION}"
    (tmp_path / "headrace" / "commit.txt").write_text("1a2b3c4, 2026-01-31\n")
    assert there.version_text() == f"headrace {VERSION} (1a2b3c4, 2026-01-31)"


def test_state_is_in_the_checkout_and_of_a_package_in_the_users_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert DEFAULT_HOME == ROOT / ".headrace"
    monkeypatch.setenv("HOME", str(tmp_path))
    usual = tmp_path / ".local" / "state" / "headrace"
    assert default_home({}, packaged=True) == usual
    assert default_home({"XDG_STATE_HOME": "relative"}, packaged=True) == usual
    assert default_home({"XDG_STATE_HOME": "/var/state"}, packaged=True) == Path("/var/state/headrace")
