from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from services.frontend import app
from services.frontend.config import HttpConfig, LimitsConfig
from tests.frontend.peers import DEADLINE_S, MODEL, World, world

BODY = {"model": MODEL, "prompt": "x", "stream": True}


@asynccontextmanager
async def streaming(
    directory: Path, drain_s: float
) -> AsyncIterator[tuple[World, AsyncExitStack, aiohttp.ClientResponse]]:
    """A stream with its first token out, and the frontend, which drains when its stack is closed."""
    async with AsyncExitStack() as client, AsyncExitStack() as frontend:
        w = await frontend.enter_async_context(world(directory, limits=LimitsConfig(drain_s=drain_s)))
        w.workers[0].output = None
        timeout = aiohttp.ClientTimeout(DEADLINE_S)
        http = await client.enter_async_context(aiohttp.ClientSession(w.url, timeout=timeout))
        posted = asyncio.create_task(http.post("/v1/completions", json=BODY))
        [generate] = await w.workers[0].generates.at_least(1)
        await w.workers[0].send(generate, 0, w.ids("a"))
        yield w, frontend, await posted


async def test_a_stream_that_outlasts_the_drain_ends_with_an_error_and_not_done(directory: Path) -> None:
    async with streaming(directory, 0.05) as (w, frontend, response):
        await frontend.aclose()
        events = (await response.read()).decode().split("\n\n")
        assert "this frontend has ended before the answer was complete" in events[-2]
        assert "[DONE]" not in events[-2]
        await w.workers[0].cancels.at_least(1)


async def test_a_stream_that_ends_within_the_drain_is_whole(directory: Path) -> None:
    async with streaming(directory, DEADLINE_S) as (w, frontend, response):
        [generate] = w.workers[0].generates.all
        drained = asyncio.create_task(frontend.aclose())
        await w.workers[0].send(generate, 1, [2], "stop")
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await drained


async def test_a_frontend_that_drains_says_how_many_requests_it_waits_for(directory: Path) -> None:
    async with streaming(directory, DEADLINE_S) as (w, frontend, response):
        [generate] = w.workers[0].generates.all
        drained = asyncio.create_task(frontend.aclose())
        reasons: list[str] = []
        async with asyncio.timeout(DEADLINE_S):
            while "request" not in "".join(reasons):
                reasons = list(w.vitals.reasons)
                await asyncio.sleep(0)
        assert reasons == [f"1 request runs, up to {DEADLINE_S:g} s"]
        await w.workers[0].send(generate, 1, [2], "stop")
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
        await drained


async def test_a_request_whose_body_comes_after_the_drain_is_over_is_refused(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with AsyncExitStack() as frontend, asyncio.timeout(DEADLINE_S):
        w = await frontend.enter_async_context(world(directory, limits=LimitsConfig(drain_s=0.05)))
        for worker in w.workers:
            worker.output = None  # nobody would end it in time
        url, body = urlsplit(w.url), json.dumps(BODY).encode()
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Length: %d\r\n\r\n" % len(body))
        await w.counted("headrace_inflight_requests", 1)
        drained = asyncio.create_task(frontend.aclose())
        while "requests are still running" not in caplog.text:  # noqa: ASYNC110 - nothing is called for it
            await asyncio.sleep(0.01)
        writer.write(body)
        assert b" 503 " in await reader.readline()
        writer.close()
        await drained


def test_no_more_connections_than_the_process_may_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = {"now": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, now: limits.update(now=now))
    assert app.with_files(HttpConfig()).connections == 4096 - app.OWN_FILES
    assert limits["now"] == (4096, 4096)
    assert app.with_files(HttpConfig(connections=100)).connections == 100
