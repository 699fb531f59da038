"""One vLLM worker with two data-parallel ranks in a fleet of real processes: the router chooses among them."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Completion

from tests.integration.fleet import Fleet, explained, fleet
from tests.integration.stack import eventually
from tests.process_tree import below
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import LIMIT_S, PYTHON, needs_gpus, needs_vllm

pytestmark = [needs_vllm, needs_gpus(2)]
NAMESPACE = "vllmranks"
ARGUMENTS = {"enforce_eager": "true", "dtype": "float32", "num_gpu_blocks_override": "64", "data_parallel_size": "2"}


@pytest.fixture
def services(tmp_path: Path, nats_url: str) -> Iterator[Fleet]:
    model = write_tiny_model(tmp_path / "tiny", hidden=128, heads=2, context_length=1024, tied=False, seed=3)
    where = ("--namespace", NAMESPACE, "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    arguments = [word for name, value in ARGUMENTS.items() for word in (f"--vllm.{name}", value)]
    with fleet(tmp_path, nats_url, *where) as one:
        one.start("router", "router", "--source-digest-s", "1")
        flags = ("--model", str(model), "--engine", "vllm", "--vllm-python", str(PYTHON), "--threads", "1")
        one.start("worker", "worker", *flags, *arguments)
        one.start("frontend", "frontend", "--limits-attempts", "20", "--limits-frozen-s", "60")
        eventually(one.services["worker"].ready, limit_s=LIMIT_S, what="the worker serves")
        one.wait_ready()
        yield one


def test_the_router_chooses_among_ranks_and_all_start_again_together(services: Fleet, nats_url: str) -> None:
    router, worker = services.services["router"], services.services["worker"]
    ranks: dict[int, int] = {}
    """Number of a prompt → the rank that computed it."""
    url = services.services["frontend"].url
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0, timeout=LIMIT_S) as client:

        def asked(prompt: list[int]) -> Completion | None:
            try:
                return client.completions.create(model="tiny", prompt=prompt, max_tokens=2)
            except openai.InternalServerError:  # the frontend has not seen the worker's card yet
                return None

        def computed(number: int, *, tail: int = 0) -> dict[str, Any]:
            prompt = [5 + (number * 37 + index * (1 + number % 5)) % 250 for index in range(200)] + [9 + tail]
            answer = eventually(lambda: asked(prompt), limit_s=LIMIT_S, what="a request is answered")
            return eventually(
                lambda: one if (one := explained(nats_url, NAMESPACE, answer.id))["ended_s"] is not None else None,
                limit_s=LIMIT_S,
                what="the router has heard of the end",
            )

        def agreed(times: int) -> None:
            before = router.metric("headrace_kv_digests_total", outcome="agreed")
            eventually(
                lambda: router.metric("headrace_kv_digests_total", outcome="agreed") >= before + times,
                limit_s=LIMIT_S,
                what="digests of both ranks agree",
            )

        def both_have_computed() -> bool:
            decision = computed(len(ranks))
            assert {(row["instance"], row["rank"]) for row in decision["candidates"]} == {
                (decision["instance"], 0),
                (decision["instance"], 1),
            }
            ranks[len(ranks)] = decision["rank"]
            return len(set(ranks.values())) == 2

        eventually(both_have_computed, limit_s=LIMIT_S, what="both ranks have computed a prompt")
        agreed(4)
        for number, rank in ranks.items():
            decision = computed(number, tail=1)
            assert decision["rank"] == rank
            assert decision["predicted_cached_tokens"] == decision["actual_cached_tokens"] == 192

        [core] = [pid for pid in below(worker.process.pid) if b"EngineCore_DP1" in name_of(pid)]
        os.kill(core, signal.SIGKILL)
        eventually(lambda: not worker.ready(), limit_s=LIMIT_S, what="the worker knows that its engine is lost")
        eventually(worker.ready, limit_s=LIMIT_S, what="the worker serves again")
        assert computed(0)["actual_cached_tokens"] == 0
        agreed(4)
    assert router.metric("headrace_kv_digests_total", outcome="differed") == 0


def name_of(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except FileNotFoundError:
        return b""
