"""Priorities and sessions over real servers and processes: one worker that computes one request at a time, with the
real scheduler and simulated steps, and a policy that shows what it gets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import aiohttp
import nats
import pytest
from openai import AsyncOpenAI

from shared import subjects
from shared.api_keys import key_digest
from tests.integration.stack import Up, eventually, running
from tests.integration.test_simulated import status
from tests.tiny_model import write_tiny_model

LIMIT_S = 180.0
LONG = 30_000
"""Tokens of an answer that takes ten minutes, so that none of the requests ends by itself on a slow machine either."""


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Up]:
    state = tmp_path_factory.mktemp("priority")
    keys = state / "keys.toml"
    keys.write_text(
        f'urgent = {{ sha256 = "{key_digest("urgent").hex()}", min_priority = -10 }}\n'
        f'usual = {{ sha256 = "{key_digest("usual").hex()}" }}\n'
    )
    model = str(write_tiny_model(state / "tiny", context_length=32768))
    flags = ("--engine", "simulated", "--workers", "1", "--model", model, "--discovery", "file", "--keys", str(keys))
    policy = "tests.integration.shown_policy:ShownPolicy"
    # Steps are five times as slow as usual, and a request may wait for as long as it takes.
    slow = ("--simulated", "speed=0.2", "--set", "worker.max_running=1", "--set", "frontend.limits.wait_s=0")
    with running(state, *flags, "--policy", policy, *slow) as stack:
        yield stack


def counts(up: Up) -> tuple[int, int]:
    """How many requests the worker computes, and how many wait there."""
    (load,) = (row["load"] for row in status(up)["instances"] if row["service"] == "worker")
    return (0, 0) if load is None else (load["running"], load["waiting"])


async def until(up: Up, wanted: tuple[int, int]) -> None:
    what = f"{wanted} requests run and wait"
    await asyncio.to_thread(eventually, lambda: counts(up) == wanted, limit_s=LIMIT_S, what=what)


def body_of(name: str, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"Where is the mill of {name}?"}]
    return {"model": "tiny", "messages": messages, "max_tokens": LONG, "ignore_eos": True, "stream": True, **more}


@asynccontextmanager
async def over_http(up: Up, key: str, name: str, **more: Any) -> AsyncIterator[asyncio.Future[str]]:
    """A long chat; the future has its name at its first text. Leaving ends it."""
    first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def read() -> None:
        headers = {"Authorization": f"Bearer {key}"}
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(None)) as http,
                http.post(f"{up.url}/chat/completions", json=body_of(name, **more), headers=headers) as response,
            ):
                assert response.status == 200, await response.text()
                async for line in response.content:
                    if line.startswith(b"data: {") and not first.done():
                        note(first, name, line.removeprefix(b"data: "))
        except (AssertionError, aiohttp.ClientError) as wrong:
            if not first.done():
                first.set_exception(wrong)

    reading = asyncio.create_task(read())
    try:
        yield first
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


@asynccontextmanager
async def over_nats(up: Up, key: str, name: str, **more: Any) -> AsyncIterator[asyncio.Future[str]]:
    """The same, as a NATS client without a password has it."""
    client = await nats.connect(up.nats["servers"])
    try:
        first: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def read(message: Any) -> None:
            if not first.done() and message.data:
                note(first, name, message.data)

        inbox = client.new_inbox()
        await client.subscribe(inbox, cb=read)
        payload, headers = json.dumps(body_of(name, **more)).encode(), {"Authorization": f"Bearer {key}"}
        await client.publish(subjects.client("default", "chat"), payload, reply=inbox, headers=headers)
        yield first
    finally:
        await client.close()


def note(first: asyncio.Future[str], name: str, payload: bytes) -> None:
    """Set the future at the first text, or at an error."""
    chunk = json.loads(payload)
    if "error" in chunk:
        first.set_exception(AssertionError(chunk))
    elif any(choice["delta"].get("content") for choice in chunk["choices"]):
        first.set_result(name)


async def next_of(waiting: list[asyncio.Future[str]]) -> list[str]:
    """The names of the requests that have their first text, as soon as one has."""
    done, _ = await asyncio.wait(waiting, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
    return [first.result() for first in done]


async def test_a_request_of_a_higher_priority_is_computed_before_those_that_wait_already(up: Up) -> None:
    async with AsyncExitStack() as stack:

        async def begin(request: Any) -> tuple[AsyncExitStack, asyncio.Future[str]]:
            own = await stack.enter_async_context(AsyncExitStack())
            return own, await own.enter_async_context(request)

        running, begun = await begin(over_http(up, "usual", "running"))
        assert await next_of([begun]) == ["running"]
        _, late = await begin(over_http(up, "usual", "late", priority=3))
        await until(up, (1, 1))
        _, early = await begin(over_http(up, "usual", "early"))
        await until(up, (1, 2))
        urgent, first = await begin(over_nats(up, "urgent", "urgent", priority=-10))
        await until(up, (1, 3))

        await running.aclose()
        assert await next_of([late, early, first]) == ["urgent"]
        assert not late.done()
        assert not early.done()
        await urgent.aclose()
        assert await next_of([late, early]) == ["early"]
    await until(up, (0, 0))


async def test_a_key_may_not_ask_for_more_than_its_best_over_either_door(up: Up) -> None:
    for door in (over_http, over_nats):
        async with door(up, "usual", "usual", priority=-1) as first:
            with pytest.raises(AssertionError, match="priority: -1 is lower than 0, the lowest that you may ask for"):
                await asyncio.wait_for(first, LIMIT_S)


async def test_a_policy_sees_the_session_and_the_priority_of_a_request(up: Up) -> None:
    headers = {"X-Session-Id": "conversation-7", "X-Request-Id": "seen"}
    async with AsyncOpenAI(base_url=up.url, api_key="urgent", max_retries=0, timeout=LIMIT_S) as client:
        await client.completions.create(
            model="tiny", prompt="the mill", max_tokens=1, extra_headers=headers, extra_body={"priority": -4}
        )
    bus = await nats.connect(**up.nats)
    try:
        answer = await bus.request(subjects.explain("default", "tiny"), b"seen", timeout=LIMIT_S)
    finally:
        await bus.close()
    assert json.loads(answer.data)["decisions"][-1]["reason"] == "session conversation-7, priority 4"
