"""tests/clients/environment.py: the environment of other people's clients is made once, and again of another lock."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.clients import environment
from tests.clients.conftest import Run
from tests.integration.stack import ROOT

pytestmark = pytest.mark.timeout(1200)


async def test_a_program_runs_in_it_with_its_own_clients(run_program: Run) -> None:
    versions = dict(line.split() for line in (await run_program("versions.py")).splitlines())
    assert versions.keys() == {
        "anthropic",
        "dspy",
        "instructor",
        "langchain-openai",
        "litellm",
        "llama-index-llms-openai-like",
        "llm",
        "ollama",
        "openai",
        "openai-agents",
        "outlines",
        "pydantic-ai-slim",
        "schemathesis",
    }


def test_the_page_of_clients_says_which_versions_run() -> None:
    locked = {
        (name, version)
        for file in (environment.LOCK, environment.HARNESS_LOCK, environment.INSPECT_LOCK)
        for name, version in re.findall(r"^([\w-]+)==(\S+)", file.read_text(), re.MULTILINE)
    }
    for folder in (environment.NPM, environment.AGENTS):
        packages = json.loads((folder / "package-lock.json").read_text())["packages"]
        locked |= {(path.removeprefix("node_modules/"), package.get("version")) for path, package in packages.items()}
    page = (ROOT / "docs" / "clients.md").read_text().split("## Versions that tests run\n")[1].split("\n## ")[0]
    said = re.findall(r"([@\w/-]+) (\d[\w.-]*\w)", page)
    assert len(said) > 20
    assert [one for one in said if one not in locked] == []


def test_it_is_made_once_and_again_where_its_lock_file_is_another(tmp_path: Path) -> None:
    place, lock = tmp_path / "clients", tmp_path / "some.lock"
    lock.write_text("")
    python = environment.python(place, lock)
    made = python.lstat().st_mtime_ns
    assert environment.python(place, lock) == python
    assert python.lstat().st_mtime_ns == made
    lock.write_text("# another\n")
    environment.python(place, lock)
    assert python.lstat().st_mtime_ns != made


def test_one_that_was_left_half_made_is_made_again(tmp_path: Path) -> None:
    place, lock = tmp_path / "clients", tmp_path / "some.lock"
    lock.write_text("")
    python = environment.python(place, lock)
    (place / "requirements.lock").unlink()
    (place / "pyvenv.cfg").unlink()
    assert environment.python(place, lock) == python
    assert (place / "pyvenv.cfg").exists()


def test_what_uv_says_is_in_the_error(tmp_path: Path) -> None:
    lock = tmp_path / "some.lock"
    lock.write_text("no-such-package-here==1.0\n")
    with pytest.raises(environment.NotMade, match="hash"):
        environment.python(tmp_path / "clients", lock)
    assert not (tmp_path / "clients" / "requirements.lock").exists()
