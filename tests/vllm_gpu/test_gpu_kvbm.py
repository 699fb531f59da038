"""Two vLLM workers with two models on one GPU, over one kvbm: what each has computed survives the kill of both cores,
and its bytes are those of the pool."""

from __future__ import annotations

import os
import signal
import tempfile
from collections.abc import Iterator

import openai
import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.kinds import SHARED_MEMORY
from tests.integration.stack import eventually
from tests.integration.test_vllm import cores
from tests.tiny_model import write_tiny_model
from tests.worker.vllm.environment import ON_DEVICE_WORDS, PYTHON, needs_vllm

pytestmark = [pytest.mark.gpu, needs_vllm]
LIMIT_S = 300.0
BLOCK = 16
MODELS = {"narrow": {"hidden": 128, "heads": 2}, "wide": {"hidden": 256, "heads": 4, "layers": 3}}
ARGUMENTS = {"enforce_eager": "true", "dtype": "bfloat16", "max_model_len": "4096", **ON_DEVICE_WORDS}
PROMPT = [5 + index * 7 % 250 for index in range(2000)]
STORED = 124
"""Blocks of the prompt that can be loaded: the last token is always computed."""


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("kvbm")
    where = ("--namespace", "vllm-gpu", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    arguments = [word for name, value in ARGUMENTS.items() for word in (f"--vllm.{name}", value)]
    with (
        tempfile.TemporaryDirectory(prefix="headrace-test-", dir=SHARED_MEMORY) as pool,
        fleet(folder, nats_url, *where) as one,
    ):
        size = ("--pool-size-bytes", str(1 << 30), "--pool-arenas", str(len(MODELS)))
        one.start("kvbm", "kvbm", "--pool-directory", pool, *size)
        one.start("router", "router", "--source-digest-s", "1")
        for name, shape in MODELS.items():
            model = write_tiny_model(folder / name, context_length=4096, tied=False, dtype="bfloat16", **shape)  # type: ignore[arg-type]
            flags = ("--model", str(model), "--model-name", name, "--engine", "vllm", "--vllm-python", str(PYTHON))
            store = ("--kvbm-pool", pool, "--kvbm-verify", "true", "--kvbm-wait-s", "60")
            one.start("worker", name, *flags, *store, "--engine-metrics", '["vllm:headrace_*"]', *arguments)
        one.start("frontend", "frontend", "--limits-attempts", "20", "--limits-frozen-s", "60")
        serve(one)
        yield one


def serve(services: Fleet) -> None:
    """Wait until both workers serve and exchange blocks."""
    for name in MODELS:
        worker = services.services[name]
        eventually(worker.ready, limit_s=LIMIT_S, what=f"{name} serves")
        eventually(lambda: worker.metric("headrace_kvbm_attached") == 1, limit_s=LIMIT_S, what=f"{name} is attached")  # noqa: B023
    services.wait_ready()


def cached(services: Fleet, name: str) -> int:
    """Ask a model; return how many of the prompt's tokens were not computed."""
    url = f"{services.services['frontend'].url}/v1"
    with openai.OpenAI(base_url=url, api_key="any", max_retries=0, timeout=LIMIT_S) as client:
        answer = client.completions.create(model=name, prompt=PROMPT, max_tokens=20, temperature=0)
    details = answer.usage and answer.usage.prompt_tokens_details
    return (details and details.cached_tokens) or 0


def test_what_two_models_have_computed_is_loaded_after_both_cores_were_killed(services: Fleet) -> None:
    kvbm = services.services["kvbm"]
    assert [cached(services, name) for name in MODELS] == [0, 0]
    eventually(
        lambda: kvbm.metric("headrace_kvbm_committed_blocks_total") >= len(MODELS) * STORED,
        limit_s=LIMIT_S,
        what="the prompts are stored",
    )
    workers = [services.services[name] for name in MODELS]
    starts = [worker.metric("headrace_engine_starts_total") for worker in workers]
    for worker in workers:
        [core] = cores(worker.process.pid)
        os.kill(core, signal.SIGKILL)
    for worker, before in zip(workers, starts, strict=True):
        eventually(
            lambda: worker.metric("headrace_engine_starts_total") > before,  # noqa: B023
            limit_s=LIMIT_S,
            what="another engine has started",
        )
    serve(services)
    assert [cached(services, name) for name in MODELS] == [STORED * BLOCK] * len(MODELS)
    for worker in workers:
        eventually(
            lambda: worker.metric("vllm:headrace_loaded_blocks_total") == STORED,  # noqa: B023
            limit_s=LIMIT_S,
            what="the worker shows what its engine has loaded",
        )
        assert worker.metric("vllm:headrace_bad_blocks_total") == 0
