"""`headrace up` on a GPU, with the real default model and its block store: asked over HTTP, its engine killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from deploy.local.stack import model
from tests.integration.kinds import GPU, GPU_16_BITS, Kind, params
from tests.integration.stack import ROOT, Up, eventually, running, with_models
from tests.process_tree import children

LIMIT_S = 180.0
QUESTION = "What is the capital of France?"
POEM = "Write a poem about the sea."
WORKERS = ("worker-0", "worker-1")
VECTORS_APART = {"float32": 1e-5, "bfloat16": 2.5e-2}
"""The largest difference: other rows of a step may change the rounding."""


@pytest.fixture(scope="module", params=params((GPU[0], GPU_16_BITS[1])))
def kind(request: pytest.FixtureRequest) -> Kind:
    chosen: Kind = request.param
    return chosen


@pytest.fixture(scope="module")
def up(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    """Run `up`; afterwards Ctrl-C must leave no process."""
    if not (ROOT / ".headrace" / "models" / model.FILE).exists():
        pytest.skip("the default model is not there; `headrace up` fetches it")
    flags = ("--device", "cuda", "--cuda", f"dtype={kind.dtype}", "--gpu-memory-share", "0.4")
    with running(with_models(tmp_path_factory.mktemp("up")), *flags) as stack:
        for worker in WORKERS:
            eventually(partial(attached, stack, worker), limit_s=LIMIT_S, what=f"{worker} has attached")
        yield stack
        pids = [stack.pid(program) for program in stack.record["programs"]]
        pids += [engine for worker in WORKERS for engine in children(stack.pid(worker))]
        (pool,) = {store["pool"] for store in status(stack)["stores"]}
        assert stack.stop() == 0
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    assert not Path(pool).exists()
    assert not (stack.state / "run" / "up.json").exists()


def gauge(up: Up, worker: str, name: str) -> float:
    with urllib.request.urlopen(f"{up.record['programs'][worker]['observe']}/metrics", timeout=LIMIT_S) as metrics:
        lines = metrics.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.partition("{")[0] == name)


def attached(up: Up, worker: str) -> bool:
    return gauge(up, worker, "headrace_kvbm_attached") == 1


def inflight(up: Up, worker: str) -> float:
    """Return the number of requests that a worker computes, by its last report."""
    return gauge(up, worker, "headrace_inflight_requests")


def status(up: Up) -> dict[str, Any]:
    command = [sys.executable, "-m", "deploy.local.cli", "status", "--json", "--state", str(up.state)]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=LIMIT_S).stdout
    answer: dict[str, Any] = json.loads(told)
    return answer


def pieces(up: Up, question: str, tokens: int) -> Iterator[str]:
    """Yield the pieces of a streamed answer as they come."""
    body = {
        **{"model": model.NAME, "messages": [{"role": "user", "content": question}], "temperature": 0},
        **{"stream": True, "max_tokens": tokens, "ignore_eos": tokens > 50},
    }
    asked = urllib.request.Request(
        f"{up.url}/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                chunk = json.loads(line.removeprefix(b"data: "))
                assert "error" not in chunk, chunk
                yield "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


def embedded(up: Up, texts: list[str]) -> NDArray[np.float64]:
    """Return the embeddings of texts, (texts, size)."""
    asked = urllib.request.Request(
        f"{up.url}/embeddings",
        json.dumps({"model": model.NAME, "input": texts}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        return np.array([one["embedding"] for one in json.load(answer)["data"]])


def test_a_streamed_answer_knows_the_capital_of_france(up: Up) -> None:
    answer = "".join(pieces(up, QUESTION, 32))
    print(answer)
    assert "Paris" in answer


def test_status_shows_both_workers_and_their_blocks(up: Up) -> None:
    told = status(up)
    print(json.dumps(told, indent=1))
    assert len([one for one in told["instances"] if one["service"] == "worker"]) == len(WORKERS)
    (store,) = told["stores"]
    assert sum(layout["owners"] for layout in store["layouts"]) == len(WORKERS)


def test_texts_embedded_at_once_have_the_vectors_that_each_has_alone(up: Up, kind: Kind) -> None:
    texts = [f"{topic} {n}" for n in range(20) for topic in (QUESTION, POEM, POEM * 40)]
    together = embedded(up, texts)
    np.testing.assert_allclose(np.linalg.norm(together, axis=1), 1, atol=1e-6)
    alone = np.concatenate([embedded(up, [text]) for text in texts[:9]])
    assert np.linalg.norm(together[:9] - alone, axis=1).max() < VECTORS_APART[kind.dtype]


def test_an_answer_goes_on_when_the_engine_that_makes_it_is_killed(up: Up, kind: Kind) -> None:
    exact = kind.dtype == "float32"
    undisturbed = "".join(pieces(up, POEM, 1500)) if exact else ""
    answer = pieces(up, POEM, 1500)
    text = "".join(next(answer) for _ in range(20))
    busy = eventually(
        lambda: next((each for each in WORKERS if inflight(up, each)), None), limit_s=LIMIT_S, what="told"
    )
    [engine] = children(up.pid(busy))
    os.kill(engine, signal.SIGKILL)
    text += "".join(answer)
    assert text == undisturbed if exact else len(text.split()) > 200  # in 16 bits it may go on in other words

    def restarted() -> bool:
        return children(up.pid(busy)) not in ([], [engine]) and attached(up, busy)

    eventually(restarted, limit_s=LIMIT_S, what="another engine serves")
    assert "Paris" in "".join(pieces(up, QUESTION, 32))
