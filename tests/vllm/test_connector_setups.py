"""A plain `vllm serve` on a CPU whose model lies in parts, or whose connector is one of a chain: blocks come back from
the kvbm, and answers are those of a vLLM without a connector. Ranks that are killed are in
tests/integration/test_vllm_parallel.py: they take minutes to start."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.integration.fleet import Fleet, fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model
from tests.vllm.serve import BLOCK, Serve, answers_alone, connector
from tests.worker.vllm.environment import LIMIT_S, needs_gpus, needs_vllm

pytestmark = needs_vllm
PROMPT = [5 + (index * 7 + 3) % 290 for index in range(400)]
BLOCKS = 12
"""Those of the prompt that can be loaded."""
TIMEOUT_S = 30.0
"""Seconds for each answer of the kvbm: ranks that spin on all cores may leave it none for a while."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    return write_tiny_model(folder / "tiny", hidden=128, heads=2, context_length=1024, tied=False, seed=3)


@pytest.fixture(scope="module")
def kvbm(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[tuple[Path, Fleet]]:
    """Run a kvbm; yield its pool's directory."""
    folder = tmp_path_factory.mktemp("kvbm")
    where = ("--namespace", "setups", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as services:
        flags = ("--pool-directory", str(folder / "pool"), "--pool-size-bytes", str(64 << 20))
        services.start("kvbm", "kvbm", *flags)
        services.wait_ready("kvbm")
        yield folder / "pool", services


@pytest.fixture(scope="module")
def right(model: Path) -> list[int]:
    """The answer of one process without a connector."""
    [answer] = answers_alone(model, [PROMPT])
    return answer


def chain(pool: Path, folder: Path) -> dict[str, Any]:
    """Our connector, then vLLM's own example, which stores whole prompts in files."""
    example: dict[str, Any] = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
    example |= {"kv_connector_extra_config": {"shared_storage_path": str(folder / "example")}}
    both = {"connectors": [connector(pool, TIMEOUT_S), example]}
    policy = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    return {"kv_connector": "MultiConnector", **policy, "kv_connector_extra_config": both}


CHAIN = "a chain"
SETUPS = {
    "two ranks of tensor parallelism": ("--tensor-parallel-size", "2"),
    "two ranks of pipeline parallelism": ("--pipeline-parallel-size", "2", "--no-enforce-eager"),
    CHAIN: (),
}


@pytest.mark.parametrize(
    "setup", [pytest.param(setup, marks=needs_gpus(2) if SETUPS[setup] else ()) for setup in SETUPS]
)
def test_blocks_come_back_and_the_answer_stays(
    setup: str, model: Path, kvbm: tuple[Path, Fleet], right: list[int], tmp_path: Path
) -> None:
    pool, services = kvbm
    transfer = chain(pool, tmp_path) if setup == CHAIN else connector(pool, TIMEOUT_S)
    serve = Serve(model, tmp_path / "serve.log", transfer, SETUPS[setup], ranks=2 if SETUPS[setup] else 1)

    def committed() -> float:
        return services.services["kvbm"].metric("headrace_kvbm_committed_blocks_total")

    try:
        serve.start()
        serve.attach()
        before = committed()

        def stored() -> bool:
            serve.forget()
            assert serve.ask(PROMPT)[0] == right
            with suppress(AssertionError):  # the ranks leave the kvbm no core: its answer is too late, so ask again
                eventually(lambda: committed() - before >= BLOCKS, limit_s=2 * TIMEOUT_S, what="the blocks are stored")
            return committed() - before >= BLOCKS

        def loads() -> bool:
            serve.forget()
            tokens, cached = serve.ask(PROMPT)
            assert tokens == right
            return cached == BLOCKS * BLOCK  # or the kvbm's answer is too late here, too

        eventually(stored, limit_s=LIMIT_S, what="the blocks are stored")
        loaded = serve.metric("headrace_loaded_blocks_total")
        eventually(loads, limit_s=LIMIT_S, what="the blocks are loaded")
        assert serve.metric("headrace_loaded_blocks_total") >= loaded + BLOCKS
        if setup == CHAIN:
            serve.kill()
            serve.start()
            serve.attach()
            eventually(loads, limit_s=LIMIT_S, what="the blocks are loaded after a new start")
    finally:
        serve.kill()
