"""services/frontend/requests/service.py: an attempt that goes quiet is looked for, and the request goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram

from services.frontend.config import LimitsConfig
from services.frontend.requests import retry
from services.frontend.requests.events import ClientLeft
from services.frontend.requests.service import CANCELS_LIMIT, CancelLatency
from services.frontend.requests.session import Session
from shared import subjects
from shared.bus.memory_bus import MemoryBus
from shared.hashing import unpack_tokens
from shared.messages.generate import Accepted, Cancel, Generate
from shared.messages.select import Overlap, Select, Selected, SelectRefused, SelectReply
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, ScriptedWorker, World, card_entry, clients, world

PENDING_LIMIT = 65_536
"""Messages that a subscription holds."""
QUICK = LimitsConfig(drain_s=0.0, deadline_s=60.0, quiet_s=0.5, frozen_s=3.0)
NEVER_S = 1800.0
"""Longer than any test."""
COUNT: Any = [{"role": "user", "content": "count"}]


@asynccontextmanager
async def reporting(worker: ScriptedWorker, progress: int, attempts: list[tuple[str, int]]) -> AsyncIterator[None]:
    """The worker reports the same again and again."""

    async def report() -> None:
        while True:
            await worker.report(progress, attempts)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(report())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def halfway(w: World, then: Callable[[Generate], Awaitable[None]]) -> str:
    """The text that a client gets while w1 streams three tokens of "one two three" and then `then` happens."""
    tokens = w.say("one two three")
    w.workers[0].output = None
    async with clients(w) as (openai, _), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(openai.chat.completions.create(model=MODEL, messages=COUNT))
        offered = (await w.workers[0].generates.at_least(1))[0]
        await w.workers[0].send(offered, 0, tokens[:3])
        await then(offered)
        async with asyncio.timeout(DEADLINE_S):
            return (await asking).choices[0].message.content or ""


async def test_step_frames_and_reports_that_cannot_be_read_are_counted_and_logged_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory, limits=QUICK) as w:

        async def garbage(offered: Generate) -> None:
            noise = MemoryBus(w.broker)
            for _ in range(20):
                await noise.publish(subjects.stream(NAMESPACE, offered.frontend), b"\xc1 not msgpack")
                await noise.publish(subjects.worker(NAMESPACE, "anybody", "load"), b"\xc1 not msgpack")
            await w.workers[0].send(offered, 3, [*w.ids("one two three")[3:], 2], "stop")

        assert await halfway(w, garbage) == "one two three"
        async with asyncio.timeout(DEADLINE_S):
            while w.bus.malformed < 40:  # noqa: ASYNC110 - nothing is called for it
                await asyncio.sleep(0.01)
    told = [
        record for record in caplog.records if record.name in ("shared.rate_limited_log", "shared.bus.receive_queue")
    ]
    assert len(told) == 2
    assert not any(record.exc_info for record in told)


async def test_frames_that_come_faster_than_they_are_read_are_counted_and_logged_once(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory) as w:
        peer = MemoryBus(w.broker)
        for _ in range(PENDING_LIMIT + 300):
            await peer.publish(subjects.stream(NAMESPACE, "f1"), b"")
        assert w.metric("headrace_dropped_frames_total") == 300
    assert [record.message for record in caplog.records if "faster than they are read" in record.message] == [
        "step frames come faster than they are read: frames are lost (seen 1 times; logged every 60 s at most)"
    ]


async def test_a_request_whose_last_part_was_lost_goes_on_in_a_new_attempt(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        first = w.workers[0]
        tokens = w.ids("one two three")

        async def its_end_is_lost(_offered: Generate) -> None:
            async with reporting(first, 7, [("another", 1)]):
                again = (await first.generates.at_least(2))[1]
            assert again.attempt == 2
            assert unpack_tokens(again.tokens)[again.prompt_tokens :] == tokens[:3]
            await first.send(again, 3, [*tokens[3:], 2], "stop")

        assert await halfway(w, its_end_is_lost) == "one two three"


async def test_a_request_whose_engine_stands_still_goes_on_at_another_worker(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:

        async def its_engine_freezes(offered: Generate) -> None:
            async with reporting(w.workers[0], 7, [(offered.request, offered.attempt)]):
                await w.workers[1].generates.at_least(1)
            await w.workers[0].cancels.until(Cancel(offered.request, offered.attempt))

        assert await halfway(w, its_engine_freezes) == "one two three"


async def test_a_request_whose_worker_died_goes_on_before_its_lease_is_over(directory: Path) -> None:
    async with world(directory, limits=LimitsConfig(drain_s=0.0, quiet_s=0.5, frozen_s=60.0)) as w:

        async def it_dies(_offered: Generate) -> None:
            await w.workers[0].die()

        assert await halfway(w, it_dies) == "one two three"
        assert "w1" in w.registrations


async def test_a_worker_that_computes_for_long_is_left_alone(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        first = w.workers[0]
        tokens = w.ids("one two three")

        async def it_takes_its_time(offered: Generate) -> None:
            for progress in range(100):
                await first.report(progress, [(offered.request, offered.attempt)])
                await asyncio.sleep(QUICK.frozen_s / 50)
            await first.send(offered, 3, [*tokens[3:], 2], "stop")

        assert await halfway(w, it_takes_its_time) == "one two three"
        assert (len(first.generates.all), len(w.workers[1].generates.all)) == (1, 0)


async def test_a_frontend_that_stood_still_itself_blames_no_worker(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        first = w.workers[0]
        tokens = w.ids("one two three")

        async def the_frontend_stands_still(offered: Generate) -> None:
            async with reporting(first, 7, [(offered.request, offered.attempt)]):
                await w.counted("headrace_time_to_first_token_seconds_count", 1)
                time.sleep(QUICK.frozen_s * 1.2)  # noqa: ASYNC251 stopping the loop is the point
                await w.counted("headrace_inflight_requests", 1)
            await first.send(offered, 3, [*tokens[3:], 2], "stop")

        assert await halfway(w, the_frontend_stands_still) == "one two three"
        assert (len(first.generates.all), len(w.workers[1].generates.all)) == (1, 0)


async def test_a_router_that_has_not_heard_of_a_worker_yet_is_asked_again(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        w.say("hello")
        knows = w.router.answer

        def hears_late(select: Select) -> SelectReply | None:
            if len(w.router.asked.all) < 5:
                return SelectRefused(select.request, select.attempt, "unknown_model", "not heard of it")
            return knows(select)

        w.router.answer = hears_late
        async with clients(w) as (openai, _), asyncio.timeout(DEADLINE_S):
            answer = await openai.chat.completions.create(model=MODEL, messages=COUNT)
        assert answer.choices[0].message.content == "hello"


async def test_a_request_that_waits_for_a_worker_goes_on_when_one_comes(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", NEVER_S)
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", NEVER_S)
    async with world(directory, limits=LimitsConfig(drain_s=0.0, rescue_s=2 * NEVER_S)) as w:
        tokens = w.ids("one two three")

        async def the_last_worker_fails(offered: Generate) -> None:
            w.router.workers = []
            for worker in w.workers:
                await w.leave(worker.instance)

            def pauses(_: object) -> bool:
                notes = w.notes.find_request(offered.request, 0.0)
                return notes is not None and "asked again" in str(notes)

            await w.until("/health", pauses)
            w.router.workers = ["w2"]
            await w.announce_worker("w2")
            again = (await w.workers[1].generates.at_least(1))[0]
            await w.workers[1].send(again, 3, [*tokens[3:], 2], "stop")

        w.workers[1].output = None
        assert await halfway(w, the_last_worker_fails) == "one two three"


# --- the latency of cancellations


def measured() -> tuple[CancelLatency, CollectorRegistry]:
    registry = CollectorRegistry()
    return CancelLatency(Histogram("seconds", "", registry=registry)), registry


def offered(request: str) -> Session:
    session = Session(request, 8)
    session.start()
    session.on(Selected(request, 1, "w1", 0, "r1", Overlap(), "first"))
    return session


def test_a_cancellation_lasts_until_the_worker_reports_the_end_of_the_attempt() -> None:
    withdrawals, registry = measured()
    session = offered("a")
    session.on(Accepted("a", 1))
    withdrawals.client_gone(session, 10.0)
    session.on(ClientLeft())
    withdrawals.attempt_ended("a", 2, 10.1)
    withdrawals.attempt_ended("b", 1, 10.1)
    assert registry.get_sample_value("seconds_count") == 0
    withdrawals.attempt_ended("a", 1, 10.25)
    withdrawals.attempt_ended("a", 1, 11.0)
    assert registry.get_sample_value("seconds_count") == 1
    assert registry.get_sample_value("seconds_sum") == 0.25
    withdrawals.validate()


def test_requests_without_a_worker_and_ended_ones_are_not_measured() -> None:
    withdrawals, registry = measured()
    choosing = Session("a", 8)
    choosing.start()
    withdrawals.client_gone(choosing, 1.0)
    ended = offered("b")
    ended.on(ClientLeft())
    withdrawals.client_gone(ended, 1.0)
    for request in "ab":
        withdrawals.attempt_ended(request, 1, 2.0)
    assert registry.get_sample_value("seconds_count") == 0


def test_attempts_whose_workers_never_report_are_forgotten_at_the_limit() -> None:
    withdrawals, registry = measured()
    for number in range(CANCELS_LIMIT + 1):
        withdrawals.client_gone(offered(str(number)), 1.0)
        withdrawals.validate()
    withdrawals.attempt_ended("0", 1, 2.0)
    assert registry.get_sample_value("seconds_count") == 0
    withdrawals.attempt_ended("1", 1, 2.0)
    assert registry.get_sample_value("seconds_count") == 1


@pytest.mark.parametrize(
    ("fields", "whole"),
    [
        ({"presence_penalty": 0.5}, True),
        ({"frequency_penalty": -0.5}, True),
        ({"response_format": {"type": "json_object"}}, True),
        ({"temperature": 0.5, "seed": 3, "extra_body": {"repetition_penalty": 1.1}}, False),
    ],
    ids=["presence", "frequency", "grammar", "others"],
)
@pytest.mark.parametrize("forgets", [False, True], ids=["remembers", "forgets"])
async def test_one_worker_computes_what_another_one_could_not_continue_exactly(
    directory: Path, fields: dict[str, Any], whole: bool, forgets: bool
) -> None:
    third = card_entry("w3", directory, grammars=True, forgets_output=forgets)
    async with world(directory, grammars=True, more=third) as w, clients(w) as (openai, _):
        w.say('{"a": 1}')
        await openai.chat.completions.create(model=MODEL, messages=COUNT, **fields)
        [select] = await w.router.asked.at_least(1)
        assert select.whole is (whole and forgets)
