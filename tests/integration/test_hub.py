"""A model by name: `up` and `pull` fetch it from a hub, and the next `up` serves it without one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.hub_server import NO_PROXY, HubServer, Repository, files_of
from tests.integration.stack import ROOT, running
from tests.tiny_model import write_tiny_model

SMALL = ("--workers", "1", "--discovery", "file", "--kvbm-bytes", "0")


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    hub = HubServer()
    files = files_of(write_tiny_model(tmp_path / "tiny", dtype="bfloat16", shards=2))
    hub.repositories["org/tiny"] = Repository(files)
    hub.repositories["org/gated"] = Repository(files, gated=True)
    with hub.running():
        yield hub


def variables(hub: HubServer, tmp_path: Path, **more: str) -> dict[str, str]:
    return {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "HF_TOKEN": "", "NO_PROXY": NO_PROXY, **more}


def answer(url: str) -> str:
    with OpenAI(base_url=url, api_key="any", max_retries=0, timeout=100) as client:
        assert [model.id for model in client.models.list()] == ["org/tiny"]
        assert client.models.retrieve("org/tiny").id == "org/tiny"
        asked = client.completions.create(model="org/tiny", prompt="one two", max_tokens=8, temperature=0)
        return asked.choices[0].text


def pulled(hub: HubServer, tmp_path: Path, name: str, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deploy.local.cli", "pull", name, "--state", str(tmp_path / "pull")]
    environment = os.environ | variables(hub, tmp_path, **more)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100, check=False)


def test_up_fetches_a_model_by_its_name_and_then_needs_no_hub(hub: HubServer, tmp_path: Path) -> None:
    cache = {"HEADRACE_CACHE": str(tmp_path / "cache")}
    with running(tmp_path / "one", "--model", "org/tiny", *SMALL, variables=variables(hub, tmp_path, **cache)) as up:
        first, output = answer(up.url), up.output
    assert any(line.startswith("fetching org/tiny (") for line in output)
    asked = len(hub.asked)
    [converted] = (tmp_path / "cache").glob("*/model.safetensors")
    before = converted.stat().st_ino
    gone = variables(hub, tmp_path, HF_HUB_OFFLINE="1", **cache)
    with running(tmp_path / "two", "--model", "org/tiny", *SMALL, variables=gone) as up:
        assert answer(up.url) == first
    assert any(line.startswith("org/tiny: from the cache, ") for line in up.output)
    assert len(hub.asked) == asked
    assert [file.stat().st_ino for file in (tmp_path / "cache").glob("*/model.safetensors")] == [before]
    assert not (tmp_path / "one" / "models").exists()


def test_pull_prints_the_path_and_a_refusal_is_the_last_line(hub: HubServer, tmp_path: Path) -> None:
    done = pulled(hub, tmp_path, "org/tiny")
    path = Path(done.stdout.strip())
    assert done.returncode == 0, done.stderr
    assert files_of(path) == hub.repositories["org/tiny"].files
    assert path.is_relative_to(tmp_path / "hf" / "hub")
    for token, said in (("", "accept its terms, then set HF_TOKEN"), ("hf_wrong", "this account has no access yet")):
        gated = pulled(hub, tmp_path, "org/gated", HF_TOKEN=token)
        assert gated.returncode == 1
        assert gated.stdout == ""
        assert gated.stderr.splitlines()[-1].startswith(f"error: org/gated is gated: {said}")
        assert "hf_wrong" not in gated.stderr
    assert pulled(hub, tmp_path, "org/gated", HF_TOKEN=hub.token).returncode == 0
    (tmp_path / "hf" / "token").write_text(hub.token)
    assert pulled(hub, tmp_path, "org/gated").returncode == 0
    assert not (tmp_path / "pull").exists()
