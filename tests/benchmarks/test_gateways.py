"""Tests of `benchmarks/gateways.py`: its goals, and its servers as our attached workers and other gateways see them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from benchmarks.gateways import DIRECT, LITELLM, OURS, TEXT, GatewayRow, gateways, goals, line
from benchmarks.gateways_server import BLOCK_SIZE, BLOCKS, WORDS, Answers, Connection, Engine
from benchmarks.serving_load import GeneratorReport
from deploy.local.route.asking import ask
from deploy.local.route.targets import parse_targets
from shared.outbound import TlsFiles
from tests.servers import free_port
from tests.tiny_model import write_tiny_model

TOKENS = 100


def row(gateway: str, *, us: float = 50.0, first_ms: float = 20.0, lost: int = 0, killed: bool = False) -> GatewayRow:
    load = GeneratorReport(100, {}, 10.0, 64.0, first_ms, 90.0, 20.0, 20.0, 30.0, 1.0, 0)
    return GatewayRow(gateway, 32, killed, us, 100.0, lost, 100, load)


def test_goals_compare_ours_with_a_direct_connection_and_with_the_others() -> None:
    found = {goal.name: goal for goal in goals([row(DIRECT), row(OURS, first_ms=22.5), row(LITELLM, us=1000)])}
    assert found["first token p50, 32 streams, above direct"].value == pytest.approx(2.5)
    assert found["CPU a token of route, 32 streams, of litellm's"].value == pytest.approx(0.05)
    assert [goal.met for goal in found.values()] == [True, True, False, False]  # there is no vllm-router


def test_a_request_that_is_lost_when_a_server_is_killed_misses_the_goal() -> None:
    [*_, goal] = goals([row(DIRECT), row(OURS), row(OURS, lost=1, killed=True)])
    assert (goal.value, goal.met) == (1, False)
    assert "a server killed" in line(row(OURS, lost=1, killed=True))


async def test_a_server_is_one_for_route_and_answers_chats_text_and_token_ids(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    engine, port = Engine(0.001), free_port()
    answers = Answers(model, "tiny")
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers, engine), "127.0.0.1", port)
    url = f"http://127.0.0.1:{port}"
    async with server, aiohttp.ClientSession(url) as http:
        found = await ask(parse_targets([url])[0], None, TlsFiles())
        assert (found.version, found.block_size, found.blocks, found.events) == ("0.32.0", BLOCK_SIZE, BLOCKS, "")
        assert [each.root for each in found.models.data] == [str(model)]

        async def streamed(path: str, **fields: object) -> list[dict[str, object]]:
            body = {"model": "tiny", "max_tokens": TOKENS, "stream": True, **fields}
            async with http.post(path, json=body) as answer:
                lines = [text.removeprefix("data: ") for text in (await answer.text()).split("\n\n") if text]
            assert lines.pop() == "[DONE]"
            return [json.loads(text)["choices"][0] for text in lines]

        chats, texts, ids = await asyncio.gather(
            streamed("/v1/chat/completions"),
            streamed("/v1/completions"),
            streamed("/v1/completions", return_token_ids=True),
        )
        for choices in (chats, texts, ids):
            assert [choice["finish_reason"] for choice in choices] == [None] * TOKENS + ["length"]
        assert all(choice["delta"] for choice in chats)
        assert len([choice["text"] for choice in texts if choice["text"]]) == TOKENS
        assert sum(len(choice["token_ids"]) for choice in ids) == TOKENS  # type: ignore[misc,arg-type]
        async with http.post("/v1/completions", json={"max_tokens": WORDS}) as answer:
            assert (await answer.json())["usage"]["completion_tokens"] == WORDS
        async with http.get("/server_info") as answer:
            assert answer.status == 404


async def test_a_stream_whose_client_has_gone_is_forgotten(tmp_path: Path) -> None:
    engine, port = Engine(0.001), free_port()
    answers = Answers(write_tiny_model(tmp_path / "tiny"), "tiny")
    server = await asyncio.get_running_loop().create_server(lambda: Connection(answers, engine), "127.0.0.1", port)
    url = f"http://127.0.0.1:{port}"
    async with server, aiohttp.ClientSession(url) as http:
        async with http.post("/v1/completions", json={"max_tokens": 10**9, "stream": True}) as answer:
            await answer.content.readline()
            assert engine.streams == 1
            answer.close()
        async with asyncio.timeout(60):
            while engine.streams:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)


def test_only_gateways_that_are_installed_run(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / LITELLM).touch()
    found = gateways(tmp_path, (1, 2), tmp_path)
    assert [gateway.name for gateway in found] == [DIRECT, OURS, TEXT, LITELLM]
    listed = json.loads((tmp_path / "litellm.json").read_text())["model_list"]
    assert [each["litellm_params"]["api_base"] for each in listed] == ["http://127.0.0.1:1/v1", "http://127.0.0.1:2/v1"]
