"""The one whole stack of `./check`: it starts, answers, loses a worker in the middle of an answer, and drains one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.stack import ROOT, Up, eventually, running
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
TOKENS = 1500
READ_BEFORE = 50
"""Chunks until something happens; those that come after it are far more than is on its way."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("smoke")
    model = write_tiny_model(folder / "tiny", context_length=4096)
    state = folder / "state"
    state.mkdir()
    flags = ("--model", str(model), "--workers", "2", "--discovery", "file", "--set", "worker.threads=1")
    with running(state, *flags) as stack:
        yield stack


def headrace(up: Up, *words: str) -> str:
    command = [sys.executable, "-m", "deploy.local.cli", *words, "--state", str(up.state)]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout


def workers(up: Up) -> dict[str, dict[str, Any]]:
    """Return what `headrace status` says of each worker that has shown its load, by instance."""
    instances = json.loads(headrace(up, "status", "--json"))["instances"]
    return {row["instance"]: row for row in instances if row["service"] == "worker" and row["load"] is not None}


def both(up: Up) -> dict[str, dict[str, Any]]:
    return eventually(lambda: found if len(found := workers(up)) == 2 else None, limit_s=LIMIT_S, what="two workers")


def ask(up: Up, then: Callable[[str], None] = lambda _: None) -> str:
    """Return the text of a stream; `then` happens in the middle of it, with the worker that streams."""
    text, finish = "", None
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        answer = client.chat.completions.with_raw_response.create(
            model="tiny",
            messages=[{"role": "user", "content": "The mill at the river turns"}],
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for number, chunk in enumerate(answer.parse()):
            if number == READ_BEFORE:
                then(up.worker_of("tiny", answer.headers["x-request-id"]))
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    assert finish == "length"
    return text


def test_an_answer_is_the_same_if_its_worker_is_killed_and_a_drained_worker_gets_no_other(up: Up) -> None:
    before = both(up)
    text = ask(up)
    killed: list[str] = []

    def kill(worker: str) -> None:
        killed.append(worker)
        os.kill(before[worker]["pid"], signal.SIGKILL)

    assert ask(up, kill) == text

    def replaced() -> list[str] | None:
        found = workers(up)
        return [*found] if len(found) == 2 and killed[0] not in found else None

    drained, other = eventually(replaced, limit_s=LIMIT_S, what="the killed worker is gone, and its successor is there")
    headrace(up, "drain", drained)
    served: list[str] = []
    assert ask(up, served.append) == text
    assert served == [other]
