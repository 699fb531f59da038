"""Clients that go before a worker has their request. (With a worker: tests/integration/test_cancellation.py.)"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from shared.messages.generate import Accepted, Cancel
from shared.messages.select import Finished
from tests.frontend.peers import MODEL, World, world


async def connect_and_ask(w: World, text: str) -> asyncio.StreamWriter:
    url = urlsplit(w.url)
    _, writer = await asyncio.open_connection(url.hostname, url.port)
    body = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": text}], "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await writer.drain()
    return writer


async def test_one_that_goes_while_its_request_is_routed_reserves_nothing(directory: Path) -> None:
    async with world(directory) as w:
        w.router.answer = lambda _: None
        writer = await connect_and_ask(w, "hello")
        [select] = await w.router.asked.at_least(1)
        writer.transport.abort()
        await w.router.told.until(Finished(select.request, 1))
        await w.counted("headrace_inflight_requests", 0)
        assert w.workers[0].generates.all == []


async def test_one_that_sends_no_more_is_taken_for_one_that_goes(directory: Path) -> None:
    """Both are a FIN: only a write would tell them apart, and before a first token there is none."""
    async with world(directory) as w:
        w.router.answer = lambda _: None
        writer = await connect_and_ask(w, "hello")
        [select] = await w.router.asked.at_least(1)
        writer.write_eof()
        await w.router.told.until(Finished(select.request, 1))
        await w.counted("headrace_inflight_requests", 0)
        writer.close()


async def test_one_that_goes_while_its_request_is_offered_is_cancelled_at_the_worker(directory: Path) -> None:
    async with world(directory) as w:
        worker = w.workers[0]
        worker.output = None
        worker.answer = lambda _: None
        writer = await connect_and_ask(w, "hello")
        [generate] = await worker.generates.at_least(1)
        writer.transport.abort()
        await worker.cancels.until(Cancel(generate.request, 1))
        await w.router.told.until(Finished(generate.request, 1))
        await worker.send(generate, 0, w.ids("late"))  # it had taken it after all, and answers too late
        await worker.cancels.at_least(2)
        assert w.metric("headrace_stray_parts_total") == 1


@pytest.mark.parametrize("waits", [0, 1, 5, 50])
async def test_a_client_that_disconnects_while_its_prompt_is_tokenised_leaves_nothing_running(
    directory: Path, waits: int
) -> None:
    async with world(directory) as w:
        for worker in w.workers:
            worker.output = None
            worker.answer = lambda one: Accepted(one.request, one.attempt)
        writer = await connect_and_ask(w, "water under the bridge " * 20_000)
        for _ in range(waits):
            await asyncio.sleep(0)
        writer.transport.abort()
        await w.counted("headrace_inflight_requests", 0)
        for select in w.router.asked.all:  # where it had come so far
            await w.router.told.until(Finished(select.request, select.attempt))
        for generate in [one for worker in w.workers for one in worker.generates.all]:
            assert any(Cancel(generate.request, generate.attempt) in worker.cancels.all for worker in w.workers)
