"""`vllm bench serve`, unchanged, against our frontend: its report agrees with the frontend's usage."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import run_to_its_end
from tests.clients.recorder import recorder, tokens
from tests.clients.served import SPEAKER, Served, served, smollm2
from tests.worker.vllm.environment import PYTHON, VARIABLES, needs_vllm

pytestmark = [needs_vllm, pytest.mark.timeout(1200)]
REQUESTS, TOKENS = 6, 5


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[Served]:
    # What it reads after a comment is lost to it.
    with served(tmp_path_factory.mktemp("bench-serve"), nats_url, "[http]\nsilent_s = 0\n") as one:
        yield one


@pytest.mark.parametrize(("backend", "path"), [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")])
async def test_it_counts_what_the_frontend_counts(backend: str, path: str, stack: Served, tmp_path: Path) -> None:
    async with recorder(stack.url.removesuffix("/v1")) as proxy:
        await run_to_its_end(
            [
                *(str(PYTHON.with_name("vllm")), "bench", "serve", "--backend", backend, "--endpoint", path),
                *("--base-url", proxy.url, "--model", SPEAKER, "--tokenizer", str(smollm2()), "--seed", "0"),
                *("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", str(TOKENS)),
                *("--num-prompts", str(REQUESTS), "--max-concurrency", "2", "--ignore-eos", "--temperature", "0"),
                *("--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "found.json"),
            ],
            VARIABLES,
        )
    found = json.loads((tmp_path / "found.json").read_text())
    asked = [one for one in proxy.asked if one.path == path]  # for chats it asks /tokenize, too
    measured = asked[-REQUESTS:]  # the first one tries whether the endpoint answers
    assert (found["completed"], found["failed"]) == (REQUESTS, 0), found["errors"]
    assert found["total_output_tokens"] == tokens(measured)["completion_tokens"] == REQUESTS * TOKENS
    assert {(one.status, one.ignored) for one in proxy.asked} == {(200, ())}
