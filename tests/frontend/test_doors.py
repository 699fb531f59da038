"""Rude clients and too many of them, at the whole frontend: each is answered, counted, and nothing else notices."""

from __future__ import annotations

import asyncio
import json
import math
import re
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from services.frontend import readiness
from services.frontend.config import FrontendConfig, LimitsConfig
from shared.config import load
from shared.errors import ConfigError
from shared.messages.frames import NOT_BEGUN
from shared.messages.generate import Refused
from shared.messages.select import Select, SelectRefused
from tests.frontend.peers import DEADLINE_S, MODEL, World, clients, instance_entry, world

BODY = {"model": MODEL, "prompt": "x"}


async def send(w: World, *pieces: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(w.url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    for piece in pieces:
        writer.write(piece)
    return reader, writer


def post(length: int) -> bytes:
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % length


async def test_headers_without_a_body_take_no_place(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(requests=1, drain_s=0.0)) as w, clients(w) as (client, _):
        late = [await send(w, post(4_000_000)) for _ in range(50)]
        await w.counted("headrace_inflight_requests", 50)
        w.say("fine")
        for _ in range(3):
            assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "fine"
        for _, writer in late:
            writer.close()
        await w.counted("headrace_inflight_requests", 0)


@pytest.mark.parametrize(
    ("requests", "length", "status"), [(1, len(json.dumps(BODY)), 100), (0, 9, 429), (1, 5 << 20, 413)]
)
async def test_a_body_that_waits_to_be_asked_for_is_asked_for_only_once_there_is_a_place(
    directory: Path, requests: int, length: int, status: int
) -> None:
    async with world(directory, limits=LimitsConfig(requests=requests, drain_s=0.0)) as w, asyncio.timeout(DEADLINE_S):
        w.say("fine")
        reader, writer = await send(w, post(length).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
        assert b" %d " % status in await reader.readline()
        if status == 100:
            assert await reader.readline() == b"\r\n"
            writer.write(json.dumps(BODY).encode())
            assert b" 200 " in await reader.readline()
        writer.close()


async def test_other_expectations_are_417(directory: Path) -> None:
    async with world(directory) as w, asyncio.timeout(DEADLINE_S):
        reader, writer = await send(w, post(2).replace(b"\r\n\r\n", b"\r\nExpect: 101-continue\r\n\r\n"))
        assert b" 417 " in await reader.readline()
        writer.close()


async def test_a_body_that_does_not_fit_next_to_others_is_refused_while_it_comes(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(body_bytes=1000, drain_s=0.0)) as w:
        _, first = await send(w, post(4_000_000), b" " * 900)
        await w.counted("headrace_inflight_requests", 1)
        reader, second = await send(w, post(4_000_000), b" " * 200)
        async with asyncio.timeout(DEADLINE_S):
            assert b" 429 " in await reader.readline()
        assert w.metric("headrace_model_rejection_total", bound="body_bytes") == 1
        first.close()
        second.close()


async def test_tokens_in_flight_are_bounded_prompt_and_answer_together(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(tokens=100, drain_s=0.0)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        first = asyncio.create_task(http.post("/v1/completions", json=BODY | {"max_tokens": 90}))
        [generate] = await w.workers[0].generates.at_least(1)
        async with http.post("/v1/completions", json=BODY | {"max_tokens": 10}) as response:
            assert response.status == 429
            assert "tokens already" in (await response.json())["error"]["message"]
        await w.workers[0].send(generate, 0, [5, 2], "stop")
        await (await first).read()
        assert len(w.router.asked.all) == 1, "refused before it was routed"
        assert w.metric("headrace_model_rejection_total", bound="tokens") == 1


async def test_the_first_attempt_waits_so_long_at_most_and_an_overloaded_fleet_is_429_with_its_time(
    directory: Path,
) -> None:
    async with world(directory, limits=LimitsConfig(wait_s=7.0, drain_s=0.0)) as w, clients(w) as (_, http):

        def overloaded(select: Select) -> SelectRefused:
            return SelectRefused(select.request, select.attempt, "overloaded", "busy", retry_after_s=17.3)

        w.router.answer = overloaded
        async with http.post("/v1/completions", json=BODY) as response:
            assert (response.status, response.headers["Retry-After"]) == (429, "18")
        assert [select.wait_limit_s for select in w.router.asked.all] == [7.0]


async def test_a_request_may_wait_at_workers_so_long_at_most_and_is_429_after_it(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(wait_s=7.0, drain_s=0.0)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        for streams in (False, True):
            asking = asyncio.create_task(http.post("/v1/completions", json=BODY | {"stream": streams}))
            generate = (await w.workers[0].generates.at_least(1 + streams))[-1]
            assert generate.wait_left_s is not None
            assert 0 < generate.wait_left_s <= 7.0
            await w.workers[0].send(generate, 0, [], "error", f"{NOT_BEGUN}: others that the worker computes: 64")
            async with await asking as response:
                assert (response.status, response.headers["Retry-After"]) == (429, "7")
                assert (await response.json())["error"]["code"] == "overloaded"


async def test_without_a_limit_of_the_wait_or_for_a_further_choice_a_worker_is_given_none(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(wait_s=0.0, drain_s=0.0)) as w, clients(w) as (_, http):
        w.say("fine")
        async with http.post("/v1/completions", json=BODY) as response:
            assert response.status == 200
        assert [one.wait_left_s for one in w.workers[0].generates.all] == [None]
    async with world(directory) as w, clients(w) as (_, http):
        w.say("fine")
        async with http.post("/v1/completions", json=BODY | {"n": 3}) as response:
            assert response.status == 200
        limited = [one.wait_left_s is not None for worker in w.workers for one in worker.generates.all]
        assert sorted(limited) == [False, False, True]


async def test_an_attempt_after_the_first_is_not_refused_for_its_wait(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("fine")
        w.workers[0].answer = lambda one: Refused(one.request, one.attempt, "overloaded", "full")
        async with http.post("/v1/completions", json=BODY) as response:
            assert response.status == 200
        assert [select.wait_limit_s for select in w.router.asked.all] == [60.0, 0.0]


async def test_a_stream_given_up_before_it_is_routed_reaches_no_worker(directory: Path) -> None:
    async with world(directory) as w:
        w.router.answer = lambda _: None
        body = json.dumps(BODY | {"stream": True}).encode()
        _, writer = await send(w, post(len(body)), body)
        await w.router.asked.at_least(1)
        writer.close()
        await w.counted("headrace_disconnected_clients_total", 1)
        await w.counted("headrace_inflight_requests", 0)
        assert not any(worker.generates.all for worker in w.workers)


@pytest.mark.parametrize("asked", ["0", "-1", "nan", "inf", "1e400", "soon", "", "9" * 5000, "3601"])
async def test_an_absurd_deadline_is_400_and_names_the_header(directory: Path, asked: str) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        async with http.post("/v1/completions", json=BODY, headers={"Headrace-Deadline-S": asked}) as response:
            assert response.status == 400
            assert "deadline" in (await response.json())["error"]["message"].lower()
        assert w.router.asked.all == []


async def test_health_needs_a_router_that_answers_and_forgives_a_round_without(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "PING_EVERY_S", 0.02)
    async with world(directory, announced=False) as w, clients(w) as (_, http):
        await w.announce("r2", instance_entry("router", "r2"))  # nobody answers for it
        await w.announce_worker("w1")
        await w.until("/health", lambda health: health["reasons"] == ["no router answers"])
        await w.announce_router()
        await w.ready()
        for _ in range(20):
            async with http.get("/health") as response:
                assert response.status == 200
        await w.leave("r1")
        await w.until("/health", lambda health: health["reasons"] == ["no router answers"])
        await w.leave("r2")
        await w.until("/health", lambda health: health["reasons"] == ["no router is there"])


async def test_a_health_check_sends_no_request_to_other_processes(directory: Path) -> None:
    async with world(directory) as w, aiohttp.ClientSession(w.url) as http:
        before = w.metric("headrace_inflight_requests")
        answers = await asyncio.gather(*(http.get("/health") for _ in range(100)))
        assert {answer.status for answer in answers} == {200}
        for answer in answers:
            answer.release()
        assert w.metric("headrace_inflight_requests") == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limits.tokens", "-1"),
        ("limits.requests", "many"),
        ("limits.wait_s", "-0.5"),
        ("limits.wait_s", str(math.inf)),
        ("http.connections", "0"),
        ("http.header_s", "0"),
        ("http.idle_s", "nan"),
        ("http.port", "70000"),
        ("http.reuse_port", "perhaps"),
    ],
)
def test_a_limit_out_of_range_names_its_field(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=rf" {re.escape(name)}: Expected"):
        load(FrontendConfig, environ={}, flags=["--" + name.replace(".", "-").replace("_", "-"), value])
