"""deploy/local/stack/model_source.py: which model is meant, and in which directory models are kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from deploy.local.stack import model
from deploy.local.stack.hub_files import HubModel
from deploy.local.stack.model_source import (
    ModelSource,
    cache_directory,
    fetch_source,
    find_default,
    find_source,
)
from deploy.local.state import StateDirectory
from deploy.local.terminal import Terminal
from shared.errors import ConfigError

ROOT = Path(__file__).parents[3]


def no_check(_path: str) -> None:
    raise AssertionError("what is here was checked before")


def test_all_state_directories_have_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = StateDirectory(tmp_path / "one"), StateDirectory(tmp_path / "other")
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for given in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert cache_directory(one) == tmp_path / ".cache" / "headrace"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_directory(one) == cache_directory(other) == tmp_path / "xdg" / "headrace"
    other.models.mkdir(parents=True)
    assert cache_directory(other) == other.models, "models of an earlier version are used"
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "mine"))
    assert cache_directory(one) == cache_directory(other) == tmp_path / "mine"


def test_a_state_directory_that_this_user_may_not_enter_has_no_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/the/cache")
    monkeypatch.delenv("HEADRACE_CACHE", raising=False)
    (tmp_path / "state" / "models").mkdir(parents=True)
    (tmp_path / "state").chmod(0)
    user = os.geteuid()
    if user == 0:  # it may enter all
        os.seteuid(65534)
    try:
        assert cache_directory(StateDirectory(tmp_path / "state")) == Path("/the/cache/headrace")
    finally:
        os.seteuid(user)
        (tmp_path / "state").chmod(0o700)


def test_a_path_is_a_path_also_where_it_looks_like_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    (tmp_path / "org" / "m.gguf").touch()
    monkeypatch.chdir(tmp_path)
    directory = find_source("org/name", weights=True)
    assert directory == ModelSource(tmp_path / "org" / "name", "name")
    assert find_source("org/m.gguf", weights=True) == ModelSource(tmp_path / "org" / "m.gguf", "m")
    assert fetch_source(directory, no_check, Terminal(), weights=True) == directory.path


def test_a_name_of_the_hub_is_the_models_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    found = find_source("org/name@v1", weights=True)
    assert (found.name, found.here, found.on_hub) == ("org/name", False, HubModel("org/name", "v1"))
    assert find_source("org/name:sub/m-Q4.gguf", weights=True).name == "m-Q4"


def test_what_is_neither_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no such file or directory; a model on the hub is ORG/NAME\[@REVISION\]"):
        find_source("/no/such", weights=True)


def test_a_time_limit_that_is_no_number_is_named() -> None:
    command = [sys.executable, "-m", "deploy.local.cli", "pull", "org/name"]
    variables = os.environ | {"HF_HUB_DOWNLOAD_TIMEOUT": "soon"}
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        "error: HF_HUB_DOWNLOAD_TIMEOUT, HF_HUB_ETAG_TIMEOUT: invalid literal for int() with base 10: 'soon'\n"
    )


def test_the_default_model_is_kept_in_the_cache(tmp_path: Path) -> None:
    source = find_default(tmp_path)
    assert (source.path, source.name, source.here) == (tmp_path / model.FILE, model.NAME, False)
