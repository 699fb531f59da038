"""A stack whose workers map one copy of the weights: engines and the memory service die in the middle of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.stack import ROOT, Up, eventually, running
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("weights")
    model = write_tiny_model(folder / "tiny", dtype="bfloat16")
    state = folder / "state"
    state.mkdir()
    flags = ("--model", str(model), "--workers", "2", "--discovery", "file", "--set", "worker.threads=1")
    with running(state, *flags, "--weights-bytes", "64M", "--kvbm-bytes", "0") as stack:
        yield stack


def headrace(up: Up, *words: str) -> str:
    command = [sys.executable, "-m", "deploy.local.cli", *words, "--state", str(up.state)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


def mapped_by(up: Up, count: int) -> list[int]:
    """Wait until this many engines map the weights; return their processes."""

    def found() -> list[int] | None:
        rows: list[dict[str, Any]] = json.loads(headrace(up, "status", "--json"))["weights"]
        readers = rows[0]["readers"] if rows else []
        return readers if len(readers) == count else None

    return eventually(found, limit_s=LIMIT_S, what=f"{count} engines that map the weights")


def mappings(process: int) -> set[tuple[str, str]]:
    """Return the access and the inode of each mapping of weights that a process has."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    return {(words[1], words[4]) for line in lines if "memfd:headrace-weights" in line and (words := line.split())}


def answer(up: Up) -> str:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        said = client.completions.create(model="tiny", prompt="The mill", max_tokens=20, temperature=0)
    return said.choices[0].text


def test_engines_map_one_copy_which_outlives_each_of_them_and_its_service(up: Up) -> None:
    first = mapped_by(up, 2)
    text = answer(up)
    (one,), (other,) = map(mappings, first)
    assert one == other, "it is the same memory"
    assert one[0] == "r--s", "which is only read"
    assert not list(Path(up.state).rglob("model.safetensors")), "nothing is converted on the disk"
    os.kill(first[0], signal.SIGKILL)
    second = eventually(
        lambda: found if (found := mapped_by(up, 2)) != first else None, limit_s=LIMIT_S, what="a new engine"
    )
    assert len(set(second) & set(first)) == 1
    assert answer(up) == text
    os.kill(up.pid("memory"), signal.SIGKILL)
    assert answer(up) == text
    for engine in second:
        os.kill(engine, signal.SIGKILL)
    third = mapped_by(up, 2)
    assert set(third).isdisjoint(second)
    assert answer(up) == text


def test_a_worker_that_sleeps_at_level_two_leaves_its_weights_to_the_service(up: Up) -> None:
    mapped_by(up, 2)
    text = answer(up)
    rows = json.loads(headrace(up, "status", "--json"))["instances"]
    worker = next(row["instance"] for row in rows if row["service"] == "worker")
    headrace(up, "sleep", worker, "--level", "2")
    mapped_by(up, 1)
    assert "they stay" in headrace(up, "weights", "free")
    headrace(up, "wake", worker)
    mapped_by(up, 2)
    assert answer(up) == text
