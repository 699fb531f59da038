"""A worker that is attached to a real `vllm serve`: its tokens, its events, its faults."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
import pytest_asyncio

from services.worker.config import WorkerConfig
from services.worker.contracts.messages import Failed, Loading
from services.worker.engine_start import start_engine
from shared.messages.generate import Accepted, Generate, Sampling
from shared.messages.kv_events import AllBlocksCleared
from tests.tiny_model import write_tiny_model
from tests.worker.attached.vllm_server import KEY, VllmServer
from tests.worker.shell import Shell, request, running_worker
from tests.worker.vllm.environment import LIMIT_S, needs_vllm

pytestmark = [needs_vllm, pytest.mark.asyncio(loop_scope="module")]
GREEDY = Sampling(max_tokens=24, temperature=0.0, ignore_eos=True)
PROMPT = [5 + index * 7 % 250 for index in range(100)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model") / "tiny"
    return write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=3)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(model: Path) -> AsyncIterator[VllmServer]:
    one = VllmServer(model, model.with_name("server.log"))
    try:
        await asyncio.to_thread(one.start)
        yield one
    finally:
        one.kill()


def config(server: VllmServer, local: Path, **settings: object) -> WorkerConfig:
    table = {"model": str(local), "model_name": "model", "engine": "attached", "attached": server.settings | settings}
    return msgspec.convert(table | {"health": {"idle_s": 1.0}}, WorkerConfig)


def greedy(name: str, prompt: list[int], max_tokens: int = 24) -> Generate:
    sampling = msgspec.structs.replace(GREEDY, max_tokens=max_tokens)
    return request(name, prompt, sampling=sampling, time_left_s=LIMIT_S)


async def serves(shell: Shell) -> None:
    await shell.peer.until(lambda: bool(shell.directory.cards), limit_s=LIMIT_S)


async def answer(shell: Shell, name: str, prompt: list[int]) -> list[int]:
    assert isinstance(await shell.peer.generate(greedy(name, prompt)), Accepted)
    assert await shell.peer.ended(name) == "length", shell.peer.parts(name)[-1]
    return shell.peer.tokens(name)


def alone(server: VllmServer, model: Path) -> list[int]:
    """Return the tokens that the server answers a client of its own with."""
    body = {"model": str(model), "prompt": PROMPT, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    payload = json.dumps(body | {"return_token_ids": True}).encode()
    asked = urllib.request.Request(f"{server.url}/v1/completions", payload, headers)
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        found: list[int] = json.load(answer)["choices"][0]["token_ids"]
        return found


async def failure(config: WorkerConfig) -> Failed:
    """Return why an engine with these settings does not start."""
    engine = await start_engine(config, "tiny", "worker")
    try:
        async with asyncio.timeout(LIMIT_S):
            while isinstance(report := await engine.receive(), Loading):
                pass
    finally:
        await engine.end(10.0, lambda _: None)
    assert isinstance(report, Failed), report
    return report


async def test_tokens_are_the_servers_and_its_blocks_reach_the_routers(server: VllmServer, model: Path) -> None:
    wanted = await asyncio.to_thread(alone, server, model)
    async with running_worker(config(server, model)) as shell:
        await serves(shell)
        await shell.peer.until(lambda: shell.peer.stored >= 3, limit_s=LIMIT_S)  # the other client's blocks, replayed
        assert await answer(shell, "own", PROMPT) == wanted


async def test_a_cancelled_attempt_ends_at_the_server(server: VllmServer, model: Path) -> None:
    async with running_worker(config(server, model)) as shell:
        await serves(shell)
        await shell.peer.generate(greedy("long", PROMPT, 900))
        await shell.peer.until(lambda: bool(shell.peer.parts("long")))
        await shell.peer.cancel("long")
        assert await shell.peer.ended("long") == "cancelled"
        async with asyncio.timeout(LIMIT_S):
            while await asyncio.to_thread(server.metric, "vllm:num_requests_running"):
                pass
        assert await asyncio.to_thread(server.metric, "vllm:kv_cache_usage_perc") == 0.0


async def test_a_wrong_key_and_another_model_are_named(server: VllmServer, model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("open")
    wrong = await failure(config(server, model, api_key_file=str(key)))
    assert wrong.model
    assert wrong.reason.startswith(f"attached.api_key_file: {server.url}/v1/models answers 401")
    wrong = await failure(config(server, model, model="other"))
    assert wrong.reason == f"attached.model: {server.url} has no model other; it has {model}"


async def test_a_killed_server_ends_its_attempts_and_is_served_again(server: VllmServer, model: Path) -> None:
    async with running_worker(config(server, model)) as shell:
        await serves(shell)
        whole = await answer(shell, "before", PROMPT)
        await shell.peer.until(lambda: shell.peer.stored >= 3, limit_s=LIMIT_S)
        await shell.peer.generate(greedy("cut", PROMPT, 900))
        await shell.peer.until(lambda: bool(shell.peer.parts("cut")))
        server.kill()
        assert await shell.peer.ended("cut") == "error"
        assert server.url in shell.peer.parts("cut")[-1].error
        await shell.peer.until(lambda: not shell.directory.cards, limit_s=LIMIT_S)
        batches = len(shell.peer.batches)
        await asyncio.to_thread(server.start)
        await serves(shell)
        await shell.peer.until(lambda: len(shell.peer.batches) > batches, limit_s=LIMIT_S)
        assert isinstance(shell.peer.batches[batches][1].events[0], AllBlocksCleared)
        assert await answer(shell, "after", PROMPT) == whole
