"""`headrace explain` on a fleet that has too little memory, too little time, and a worker that is killed."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import nats
import pytest
from openai import OpenAI

from shared import subjects
from tests.integration.stack import ROOT, Up, eventually, running
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Two workers with room for two or three conversations each."""
    state = tmp_path_factory.mktemp("explain")
    model = str(write_tiny_model(state / "tiny"))
    flags = ("--engine", "simulated", "--workers", "2", "--model", model, "--discovery", "file")
    slow = ("--simulated", "fixed_s=0.005")  # a kill must come before the end of an answer
    small = ("--set", "worker.capacity_blocks=60", "--set", "worker.max_running=3", "--kvbm-bytes", "64M")
    with running(state, *flags, *slow, *small) as stack:
        yield stack


@pytest.fixture
def client(up: Up) -> Iterator[OpenAI]:
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        yield client


def headrace(up: Up, *words: str, status: int = 0) -> str:
    command = [sys.executable, "-m", "deploy.local.cli", *words, "--state", str(up.state)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def noted(up: Up, request: str) -> list[tuple[str, int, str]]:
    """Return (service, attempt, text) of each note of a request, oldest first."""
    found = json.loads(headrace(up, "explain", request, "--json"))["notes"]
    pairs = [(note, one["service"]) for one in found for note in one["notes"]]
    pairs.sort(key=lambda each: -each[0]["age_s"])
    return [(service, note["attempt"], note["text"]) for note, service in pairs]


def ask(client: OpenAI, name: str, words: int, tokens: int) -> str:
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": f"{name} " + "mill " * words}],
        max_tokens=tokens,
        extra_body={"ignore_eos": True},
        extra_headers={"X-Request-Id": name},
    )
    return answer.id


def ask_all(client: OpenAI, names: Sequence[str]) -> list[str]:
    with ThreadPoolExecutor(len(names)) as threads:
        return list(threads.map(lambda name: ask(client, name, 40, 300), names))


def test_a_request_tells_for_what_it_waited_and_that_it_was_preempted_and_its_blocks_where_they_went(
    up: Up, client: OpenAI
) -> None:
    requests = ask_all(client, [f"burst-{number}" for number in range(10)])
    texts = {request: noted(up, request) for request in requests}
    whole = [text for notes in texts.values() for _, _, text in notes]
    assert all(notes[0][2].startswith("waited ") for notes in texts.values())
    assert any(re.search(r"waited .*\(.*for (free blocks|a place among the running ones)", text) for text in whole)
    preempted = [request for request, notes in texts.items() if any("preempted, since" in each[2] for each in notes)]
    assert preempted
    assert any(text.startswith("goes on after ") for _, _, text in texts[preempted[0]])
    shown = headrace(up, "explain", preempted[0])
    assert "what happened" in shown
    assert "preempted, since" in shown

    missing = re.search("the first block that no cache had: ([0-9a-f]{32})", "\n".join(whole))
    assert missing is not None
    told = headrace(up, "explain", "block", missing[1])
    assert "computed for request" in told
    assert "offered to the kvbm" in told
    assert "stored in host memory" in told
    by_its_end = json.loads(headrace(up, "explain", "block", missing[1][16:], "--json"))["found"]
    assert {one["service"] for one in by_its_end} == {"worker", "kvbm"}
    assert any("in host memory" in place for one in by_its_end for place in one["places"])


async def decided(up: Up, request: str) -> list[dict[str, Any]]:
    """Return the router's decisions, sooner than a command starts."""
    bus = await nats.connect(**up.nats)
    try:
        answer = await bus.request(subjects.explain("default", "tiny"), request.encode(), timeout=LIMIT_S)
    finally:
        await bus.close()
    decisions: list[dict[str, Any]] = json.loads(answer.data)["decisions"]
    return decisions


def test_a_request_whose_worker_is_killed_tells_where_it_was_lost_and_goes_on(up: Up, client: OpenAI) -> None:
    instances: list[dict[str, Any]] = json.loads(headrace(up, "status", "--json"))["instances"]
    with client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "lost " * 30}],
        max_tokens=500,
        stream=True,
        extra_body={"ignore_eos": True},
        extra_headers={"X-Request-Id": "killed"},
    ) as stream:
        request = next(iter(stream)).id
        decisions = asyncio.run(decided(up, request))
        (pid,) = (row["pid"] for row in instances if row["instance"] == decisions[0]["instance"])
        os.kill(pid, signal.SIGKILL)
        for _ in stream:
            pass
    lost = eventually(
        lambda: [note for note in noted(up, request) if note[2].startswith("lost at ")],
        limit_s=LIMIT_S,
        what="the frontend's note is shown",
    )
    assert [(service, attempt) for service, attempt, _ in lost] == [("frontend", 1)]
    assert decisions[0]["instance"] in lost[0][2]
    assert "tokens, which are kept" in lost[0][2]
    assert len(json.loads(headrace(up, "explain", "killed", "--json"))["decisions"]) == 2


def test_what_was_refused_is_explained_too_and_nonsense_is_one_line(up: Up) -> None:
    body = json.dumps({"model": "nope", "messages": [{"role": "user", "content": "my secret"}]})
    curl = ["curl", "-s", "-d", body, "-H", "X-Request-Id: refused", "-H", "Content-Type: application/json"]
    subprocess.run([*curl, f"{up.url}/chat/completions"], check=True, capture_output=True, timeout=LIMIT_S)
    notes = eventually(lambda: noted(up, "refused"), limit_s=LIMIT_S, what="the refusal is noted")
    assert notes == [("frontend", 0, "refused with status 404: model, model_not_found")]
    for words in (("block", "xyz"), ("a", "b")):
        said = headrace(up, "explain", *words, status=2)
        assert said.startswith("error: ")
        assert said.count("\n") == 1
    assert "error: no process remembers never" in headrace(up, "explain", "never", status=1)
