"""The control subject: what a process remembers. Its other questions are asked in the tests of whole processes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.discovery.memory import MemoryStore
from shared.errors import RequestTimeout, Unavailable
from shared.messages.codec import JSON_HEADER
from shared.messages.control import CONTROL, FOUND_NOTES, PING, PONG, FindNotes, FoundNotes, Note, Ping
from shared.runtime.control import FINDING_LIMIT, answer_control
from shared.runtime.runtime import Runtime
from tests.fake_runtime import fake_runtime

LIMIT_S = 60.0


@asynccontextmanager
async def answering() -> AsyncIterator[Runtime]:
    broker = MemoryBroker()
    async with fake_runtime("default", "worker", "0a", MemoryBus(broker), broker, MemoryStore()) as runtime:
        await answer_control(runtime)
        yield runtime


async def ask(runtime: Runtime, find: FindNotes) -> FoundNotes:
    """Ask in JSON, as people do."""
    where = subjects.control(runtime.namespace, runtime.service, runtime.instance)
    question = CONTROL.encode(find, JSON_HEADER)
    answer = await runtime.bus.request(where, question, headers=JSON_HEADER, timeout_s=LIMIT_S)
    return FOUND_NOTES.decode(answer.payload, answer.headers)


async def test_a_process_tells_what_it_noted_of_a_request() -> None:
    async with answering() as runtime:
        runtime.notes.requests.add("abc", "lost", asyncio.get_running_loop().time(), attempt=2)
        found = await ask(runtime, FindNotes("chatcmpl-abc"))
        assert [(note.about, note.attempt, note.text) for note in found.notes] == [("abc", 2, "lost")]
        assert (found.service, found.instance) == (runtime.service, runtime.instance)
        assert (await ask(runtime, FindNotes("other"))).notes == []


async def test_a_process_without_blocks_knows_none_and_a_bad_name_is_refused() -> None:
    async with answering() as runtime:
        found = await ask(runtime, FindNotes(block="0" * 32))
        assert (found.places, found.notes, found.failed) == ([], [], "")

        async def down(_key: bytes) -> tuple[list[str], list[Note]]:
            raise Unavailable("the engine is starting")

        runtime.notes.find_block = down
        assert (await ask(runtime, FindNotes(block="0" * 16))).failed == "the engine is starting"
        assert "16 hex digits" in (await ask(runtime, FindNotes(block="xyz"))).failed


async def test_questions_that_wait_for_an_engine_hold_up_no_ping_and_are_bounded() -> None:
    async with answering() as runtime:
        asked = 0
        all_asked, go_on = asyncio.Event(), asyncio.Event()

        async def slow(_key: bytes) -> tuple[list[str], list[Note]]:
            nonlocal asked
            asked += 1
            if asked == FINDING_LIMIT:
                all_asked.set()
            await go_on.wait()
            return ["there"], []

        runtime.notes.find_block = slow
        waiting = [asyncio.ensure_future(ask(runtime, FindNotes(block="0" * 16))) for _ in range(FINDING_LIMIT)]
        async with asyncio.timeout(LIMIT_S):
            await all_asked.wait()
        where = subjects.control(runtime.namespace, runtime.service, runtime.instance)
        with pytest.raises(RequestTimeout):
            await runtime.bus.request(where, CONTROL.encode(FindNotes(block="0" * 16)), timeout_s=0.1)
        pong = await runtime.bus.request(where, PING.encode(Ping()), timeout_s=LIMIT_S)
        assert PONG.decode(pong.payload).instance == runtime.instance
        go_on.set()
        assert [found.places for found in await asyncio.gather(*waiting)] == FINDING_LIMIT * [["there"]]
        assert asked == FINDING_LIMIT
