"""A vLLM worker with a kvbm in a fleet of real processes: what a killed worker has computed, the next one loads."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, ON_DEVICE_WORDS, PYTHON, WORKER, needs_vllm

pytestmark = needs_vllm
BLOCK = 32
PROMPT = [5 + index * 7 % 250 for index in range(200)]
STORED = 6
"""Blocks of the prompt that can be loaded."""
ARGUMENTS = {"enforce_eager": "true", "dtype": "float32", "num_gpu_blocks_override": "64", "max_model_len": "512"}
ARGUMENTS |= ON_DEVICE_WORDS


@pytest.fixture
def services(tmp_path: Path, nats_url: str) -> Iterator[Fleet]:
    model = write_tiny_model(tmp_path / "tiny", hidden=128, heads=2, context_length=512, tied=False, seed=3)
    where = ("--namespace", "vllm-kvbm", "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    with fleet(tmp_path, nats_url, *where) as one:
        one.start("kvbm", "kvbm", "--pool-directory", str(tmp_path / "pool"), "--pool-size-bytes", str(64 << 20))
        one.start("router", "router", "--source-digest-s", "1")
        one.start("frontend", "frontend", "--limits-attempts", "20", "--limits-frozen-s", "60")
        start_worker(one, "worker 1", model, tmp_path / "pool")
        yield one


def start_worker(services: Fleet, name: str, model: Path, pool: Path) -> None:
    """Start a worker; return when it serves and exchanges blocks."""
    arguments = [word for argument, value in ARGUMENTS.items() for word in (f"--vllm.{argument}", value)]
    flags = ("--model", str(model), "--engine", "vllm", "--vllm-python", str(PYTHON), *WORKER)
    worker = services.start("worker", name, *flags, "--kvbm-pool", str(pool), *arguments)
    eventually(worker.ready, limit_s=LIMIT_S, what=f"{name} serves")
    eventually(lambda: worker.metric("headrace_kvbm_attached") == 1, limit_s=LIMIT_S, what=f"{name} is attached")
    services.wait_ready()


def ask(services: Fleet) -> tuple[list[int], int]:
    """Return the answer's tokens, and how many of the prompt's were not computed."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    url = f"{services.services['frontend'].url}/v1/completions"
    sent = json.dumps(body | {"return_token_ids": True}).encode()
    request = urllib.request.Request(url, sent, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=LIMIT_S) as answer:
        found: dict[str, Any] = json.load(answer)
    cached = (found["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return found["choices"][0]["token_ids"], cached


def test_what_a_killed_worker_has_computed_the_next_one_loads(services: Fleet, tmp_path: Path) -> None:
    kvbm = services.services["kvbm"]
    computed, cached = ask(services)
    assert cached == 0
    eventually(
        lambda: kvbm.metric("headrace_kvbm_committed_blocks_total") >= STORED, limit_s=LIMIT_S, what="it is stored"
    )
    services.services.pop("worker 1").kill()
    start_worker(services, "worker 2", tmp_path / "tiny", tmp_path / "pool")
    assert ask(services) == (computed, STORED * BLOCK)
    worker = services.services["worker 2"]
    eventually(
        lambda: worker.metric("headrace_kvbm_copied_blocks_total", outcome="loaded") == STORED,
        limit_s=LIMIT_S,
        what="the worker counts them",
    )
