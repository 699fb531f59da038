"""A whole `up --tensor-parallel 2`: a stream goes on when a rank of its worker is killed or frozen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.integration.stack import ROOT, Up, eventually, running
from tests.process_tree import children
from tests.tiny_model import write_tiny_model

pytestmark = [pytest.mark.timeout(900), pytest.mark.tier("long")]

LIMIT_S = 180.0
TOKENS = 1500
READ_BEFORE = 50
"""Chunks until it happens; those that come after it are far more than is on its way."""
STALL_S = 6.0
"""A third of it is how long ranks wait for one another."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    folder = tmp_path_factory.mktemp("ranks")
    model = write_tiny_model(folder / "tiny", context_length=8192)
    (folder / "state").mkdir()
    flags = ("--model", str(model), "--workers", "2", "--discovery", "file", "--kvbm-bytes", "64M")
    settings = ("--set", f"worker.stall_s={STALL_S}", "--set", "frontend.limits.attempts=20")
    with running(folder / "state", *flags, "--tensor-parallel", "2", *settings) as stack:
        yield stack


def workers(up: Up) -> dict[str, dict[str, Any]]:
    """Return what `headrace status` says of each worker that has shown its load, by instance."""
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--json", "--state", str(up.state)]
    said = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    rows = json.loads(said)["instances"]
    return {row["instance"]: row for row in rows if row["service"] == "worker" and row["load"] is not None}


def ranks(up: Up) -> dict[str, tuple[int, int]]:
    """Wait until both workers serve; return the processes of the two ranks of each."""

    def found() -> dict[str, tuple[int, int]] | None:
        engines = {name: [*children(row["pid"])] for name, row in workers(up).items()}
        pairs = {name: (pids[0], *children(pids[0])) for name, pids in engines.items() if len(pids) == 1}
        whole = {name: (pair[0], pair[1]) for name, pair in pairs.items() if len(pair) == 2}
        return whole if len(whole) == 2 else None

    return eventually(found, limit_s=LIMIT_S, what="two workers of two ranks each")


def ask(up: Up, then: Callable[[str], None] = lambda _: None) -> str:
    """Return the text of a stream; `then` happens in the middle of it, with the worker that streams."""
    text, finish = "", None
    with OpenAI(base_url=up.url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        answer = client.completions.with_raw_response.create(
            model="tiny",
            prompt="The mill at the river turns",
            max_tokens=TOKENS,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for number, chunk in enumerate(answer.parse()):
            if number == READ_BEFORE:
                then(up.worker_of("tiny", answer.headers["x-request-id"]))
            for choice in chunk.choices:
                text += choice.text
                finish = choice.finish_reason or finish
    assert finish == "length"
    return text


@pytest.mark.parametrize(
    ("number", "said"),
    [(signal.SIGKILL, "rank 1 was killed by signal 9"), (signal.SIGSTOP, "rank 1 did not answer in 2 s")],
)
def test_a_stream_goes_on_when_a_rank_of_its_worker_is_lost_and_the_worker_comes_back(
    up: Up, number: signal.Signals, said: str
) -> None:
    before = ranks(up)
    text = ask(up)
    hit: list[str] = []

    def lose(worker: str) -> None:
        hit.append(worker)
        os.kill(before[worker][1], number)

    assert ask(up, lose) == text
    [worker] = hit
    after = eventually(
        lambda: found if (found := ranks(up))[worker] != before[worker] else None,
        limit_s=LIMIT_S,
        what="the engine is started again",
    )
    assert set(after[worker]).isdisjoint(before[worker])
    for pid in before[worker]:
        assert not Path(f"/proc/{pid}").exists(), "nothing of the lost group is left"
    assert said in up.logs()
    eventually(lambda: said in "".join(up.output), limit_s=LIMIT_S, what="the terminal says it")
    row = workers(up)[worker]
    assert row["load"]["losses"]["count"] >= 1
    assert said in row["load"]["losses"]["reason"]
    assert row["load"]["tensor_ranks"] == 2
    assert ask(up) == text


def test_ctrl_c_leaves_no_rank_behind(up: Up) -> None:
    pids = [pid for pair in ranks(up).values() for pid in pair]
    assert up.stop() == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
