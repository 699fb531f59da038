"""A vLLM worker whose model lies in parts on two ranks, with a kvbm, in a fleet of real processes: a rank is killed in
mid-stream, the stream goes on at another worker, and the ranks of the next engine load their slices of the blocks."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.process_tree import below
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import PYTHON, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1800)]
LIMIT_S = 600.0
BLOCK = 32
PROMPT = [5 + (index * 7 + 3) % 290 for index in range(400)]
STORED = 12
"""Blocks of the prompt that can be loaded."""
TOKENS = 300
SIZES = {"tensor_parallel_size": b"Worker_TP1", "pipeline_parallel_size": b"Worker_PP1"}
"""Size → the name of its second rank's process."""


@pytest.fixture
def services(tmp_path: Path, nats_url: str) -> Iterator[Fleet]:
    where = ("--namespace", "vllmparts", "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    with fleet(tmp_path, nats_url, *where) as one:
        one.start("kvbm", "kvbm", "--pool-directory", str(tmp_path / "pool"), "--pool-size-bytes", str(64 << 20))
        one.start("router", "router")
        one.start("frontend", "frontend", "--limits-attempts", "20", "--limits-frozen-s", "120")
        yield one


@pytest.mark.parametrize("size", SIZES)
def test_a_rank_that_is_killed_loses_no_stream_and_no_block(services: Fleet, tmp_path: Path, size: str) -> None:
    model = write_tiny_model(tmp_path / "tiny", hidden=128, heads=2, context_length=1024, tied=False, seed=3)
    flags = ("--model", str(model), "--engine", "vllm", "--vllm-python", str(PYTHON), "--threads", "1")
    more = ("--kvbm-pool", str(tmp_path / "pool"), "--kvbm-timeout-s", "4", "--kvbm-wait-s", "60")
    ranks = (f"--vllm.{size}", "2", "--vllm.num_gpu_blocks_override", "64")
    worker = services.start("worker", "worker", *flags, *more, *ranks, "--stall-s", "120")
    kvbm, frontend = services.services["kvbm"], services.services["frontend"]

    def attached() -> bool:
        return worker.ready() and worker.metric("headrace_kvbm_attached") == 1

    eventually(attached, limit_s=LIMIT_S, what="the worker serves, and exchanges blocks")
    services.wait_ready()
    computed, cached = ask(services)
    assert cached == 0
    eventually(
        lambda: kvbm.metric("headrace_kvbm_committed_blocks_total") >= STORED, limit_s=LIMIT_S, what="they are stored"
    )

    spare = services.start("worker", "spare", "--model", str(model), "--block-size", str(BLOCK), "--threads", "1")
    services.wait_ready("spare")
    eventually(
        lambda: services.services["router"].metric("headrace_kv_sources", state="live") == 2,
        limit_s=LIMIT_S,
        what="the router follows both workers",
    )
    streamed = stream_while_a_rank_dies(services, worker.process.pid, SIZES[size])
    assert len(streamed) == TOKENS
    assert streamed[: len(computed)] == computed
    assert frontend.metric("headrace_model_migration_total") >= 1
    assert ask(services, TOKENS)[0] == streamed  # by the native engine

    eventually(attached, limit_s=LIMIT_S, what="another engine serves, and exchanges blocks")
    services.services.pop("spare")
    assert spare.stop()[0] == 0
    assert ask(services) == (computed, STORED * BLOCK)
    eventually(
        lambda: worker.metric("headrace_kvbm_copied_blocks_total", outcome="loaded") >= STORED,
        limit_s=LIMIT_S,
        what="the worker counts them",
    )


def stream_while_a_rank_dies(services: Fleet, worker: int, rank: bytes) -> list[int]:
    """Return the tokens of a stream; at its first ones the process of this name below the worker is killed."""
    tokens: list[int] = []
    with opened(services, TOKENS, stream=True) as answer:
        for line in answer:
            if not line.startswith(b"data: {"):
                continue
            for choice in json.loads(line[6:])["choices"]:
                tokens += choice.get("token_ids") or ()
            if rank and tokens:
                [killed] = [pid for pid in below(worker) if rank in name_of(pid)]
                os.kill(killed, signal.SIGKILL)
                rank = b""
    return tokens


def ask(services: Fleet, most: int = 8) -> tuple[list[int], int]:
    """Return the answer's tokens, and how many of the prompt's were not computed."""

    def asked() -> dict[str, Any] | None:
        try:
            with opened(services, most) as answer:
                return dict(json.load(answer))
        except OSError:  # the frontend has not seen the worker's card yet
            return None

    found = eventually(asked, limit_s=LIMIT_S, what="a request is answered")
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return found["choices"][0]["token_ids"], cached


def opened(services: Fleet, most: int, **fields: object) -> Any:
    """Open an answer to the prompt."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": most, "temperature": 0, "ignore_eos": True}
    sent = json.dumps(body | {"return_token_ids": True} | fields).encode()
    url = f"{services.services['frontend'].url}/v1/completions"
    request = urllib.request.Request(url, sent, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=LIMIT_S)


def name_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return b""
