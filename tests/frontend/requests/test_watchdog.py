"""requests/watchdog.py: what is missing is asked for again, and what stands still goes on elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import openai
import pytest

from services.frontend.config import LimitsConfig
from services.frontend.requests import frames
from services.frontend.requests.service import PARTS_PER_TURN
from shared import subjects
from shared.hashing import pack_tokens, unpack_tokens
from shared.messages.frames import STEP_FRAME, Part, StepFrame, StreamState
from shared.messages.generate import Cancel, Generate
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, ScriptedWorker, World, clients, world

QUICK = LimitsConfig(drain_s=0.0, deadline_s=60.0, quiet_s=0.5, frozen_s=5.0)
COUNT: Any = [{"role": "user", "content": "count"}]
TEXT = "one two three"
END = 2


async def answer(w: World, meanwhile: Callable[[Generate], Awaitable[None]]) -> str:
    """The text that a client gets; `meanwhile` plays the first worker, and the second one says TEXT."""
    w.say(TEXT)
    w.workers[0].output = None
    async with clients(w) as (client, _), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(client.chat.completions.create(model=MODEL, messages=COUNT))
        await meanwhile((await w.workers[0].generates.at_least(1))[0])
        async with asyncio.timeout(DEADLINE_S):
            return (await asking).choices[0].message.content or ""


@asynccontextmanager
async def reporting(worker: ScriptedWorker, attempts: list[tuple[str, int]]) -> AsyncIterator[None]:
    """Its engine works, and `attempts` run there."""

    async with repeating(lambda progress: worker.report(progress, attempts)):
        yield


@asynccontextmanager
async def repeating(say: Callable[[int], Awaitable[None]]) -> AsyncIterator[None]:
    """`say` is called with 0, 1, 2 …, on and on."""

    async def go_on() -> None:
        for number in count():
            await say(number)
            await asyncio.sleep(0.01)

    task = asyncio.create_task(go_on())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_frame_that_was_lost_in_the_middle_is_asked_for_again_and_no_attempt_with_it(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        worker, tokens = w.workers[0], [*w.ids(TEXT), END]

        async def lose_one(offered: Generate) -> None:
            worker.streams = [StreamState(offered.request, 1, 4)]
            await worker.send(offered, 0, tokens[:1])
            worker.loses = 1
            await worker.send(offered, 1, tokens[1:3])
            await worker.send(offered, 3, tokens[3:4])
            assert (await worker.resends.at_least(1))[0].first == 1
            await worker.send(offered, 4, tokens[4:], "stop")

        assert await answer(w, lose_one) == TEXT
        assert (len(worker.generates.all), len(w.workers[1].generates.all)) == (1, 0)
        assert w.metric("headrace_resends_total", outcome="resent") == 1
        assert w.metric("headrace_frames_out_of_turn_total", kind="ahead") == 1


async def test_a_last_frame_that_was_lost_shows_in_the_reports_and_is_asked_for_again(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        worker, tokens = w.workers[0], [*w.ids(TEXT), END]

        async def lose_the_end(offered: Generate) -> None:
            await worker.send(offered, 0, tokens[:3])
            worker.loses = 1
            await worker.send(offered, 3, tokens[3:], "stop")
            async with reporting(worker, []):
                await worker.resends.at_least(1)

        assert await answer(w, lose_the_end) == TEXT
        assert (len(worker.generates.all), len(w.workers[1].generates.all)) == (1, 0)


async def test_an_end_that_cannot_be_had_again_costs_a_new_attempt_anywhere(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        worker, tokens = w.workers[0], [*w.ids(TEXT), END]

        async def lose_the_end_for_good(offered: Generate) -> None:
            await worker.send(offered, 0, tokens[:3])
            worker.loses, worker.keeps_from = 1, 2
            await worker.send(offered, 3, tokens[3:], "stop")
            async with reporting(worker, []):
                again = (await worker.generates.at_least(2))[1]
            assert unpack_tokens(again.tokens)[again.prompt_tokens :] == tokens[:3]
            await worker.send(again, 3, tokens[3:], "stop")

        assert await answer(w, lose_the_end_for_good) == TEXT
        assert w.metric("headrace_attempts_lost_total", reason="unheard") == 1
        assert w.metric("headrace_resends_total", outcome="too_old") == 1


async def test_an_end_that_was_lost_and_forgotten_with_its_frontend_costs_a_new_attempt(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        worker, tokens = w.workers[0], [*w.ids(TEXT), END]

        async def forget_the_end(offered: Generate) -> None:
            await worker.send(offered, 0, tokens[:3])
            worker.loses = 1
            await worker.send(offered, 3, tokens[3:], "stop")
            await worker.report(0, [])
            worker.forget()
            async with reporting(worker, []):
                again = (await worker.generates.at_least(2))[1]
            assert unpack_tokens(again.tokens)[again.prompt_tokens :] == tokens[:3]
            await worker.send(again, 3, tokens[3:], "stop")

        assert await answer(w, forget_the_end) == TEXT


async def test_tokens_that_cannot_be_resent_cost_a_new_attempt_after_those_before(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        worker, tokens = w.workers[0], [*w.ids(TEXT), END]

        async def lose_one_for_good(offered: Generate) -> None:
            worker.streams = [StreamState(offered.request, offered.attempt, 4)]
            await worker.send(offered, 0, tokens[:2])
            worker.loses, worker.keeps_from = 1, 2
            await worker.send(offered, 2, tokens[2:3])
            await worker.send(offered, 3, tokens[3:4])
            again = (await worker.generates.at_least(2))[1]
            assert unpack_tokens(again.tokens)[again.prompt_tokens :] == tokens[:2]
            await worker.cancels.until(Cancel(offered.request, 1))
            await worker.send(again, 2, tokens[2:], "stop")

        assert await answer(w, lose_one_for_good) == TEXT
        assert w.metric("headrace_attempts_lost_total", reason="gap") == 1


async def test_an_end_in_a_long_frame_that_is_being_read_is_not_lost(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        worker, tokens = w.workers[0], [*w.ids(TEXT), END]

        async def end_in_a_long_frame(offered: Generate) -> None:
            await worker.send(offered, 0, tokens[:3])
            others = [Part("another", number, 0, b"", "stop") for number in range(40 * PARTS_PER_TURN)]
            end = Part(offered.request, 1, 3, pack_tokens(tokens[3:]), "stop")
            worker.at_hand = [[*others, end]]  # its answer names no stream, and comes while that is read
            async with reporting(worker, []):
                await worker.resends.at_least(1)

        assert await answer(w, end_in_a_long_frame) == TEXT
        assert w.metric("headrace_attempts_lost_total", reason="unheard") == 0
        assert (len(worker.generates.all), len(w.workers[1].generates.all)) == (1, 0)


async def test_torn_repeated_early_and_strange_frames_are_counted_and_nothing_else_notices(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        worker, tokens = w.workers[0], [*w.ids(TEXT), END]

        async def disturb(offered: Generate) -> None:
            subject = subjects.stream(NAMESPACE, offered.frontend)
            worker.streams = [StreamState(offered.request, 1, 2)]
            good = Part(offered.request, 1, 0, pack_tokens([9]))
            strange = Part(offered.request, 7, 0, pack_tokens([9]))
            await worker.send(offered, 0, tokens[:2])
            for frame in (
                StepFrame("w1", 1, 0, [good]),
                StepFrame("w1", 1, -5, [good]),
                StepFrame("w1", 0, 1, [good]),
                StepFrame("w1", 1, 1 << 60, [good]),
                StepFrame("w2", 1, 0, [good, strange]),
                StepFrame("nobody", 9, 0, [good]),
                StepFrame("no subject", 9, 0, [good]),
                StepFrame("*", 9, 5, []),
            ):
                whole = STEP_FRAME.encode(frame)
                for payload in (whole[:-1], whole[1:], whole):
                    await worker.bus.publish(subject, payload)
            await worker.resends.at_least(1)
            await worker.send(offered, 2, tokens[2:], "stop")

        assert await answer(w, disturb) == TEXT
        assert (len(worker.generates.all), len(w.workers[1].generates.all)) == (1, 0)
        assert w.metric("headrace_frames_out_of_turn_total", kind="repeated") == 3
        assert w.metric("headrace_frames_out_of_turn_total", kind="ahead") == 2
        assert w.bus.malformed == 16


async def test_a_worker_that_does_not_send_again_is_not_asked_for_ever(directory: Path) -> None:
    async with world(directory, limits=QUICK) as w:
        worker, tokens = w.workers[0], [*w.ids(TEXT), END]

        async def go_on_regardless(offered: Generate) -> None:
            worker.sends_again = False
            worker.streams = [StreamState(offered.request, 1, 4)]
            await worker.send(offered, 0, tokens[:2])
            worker.loses = 1
            await worker.send(offered, 2, tokens[2:3])
            async with repeating(lambda at: worker.send(offered, 3 + at, [9])):
                again = (await worker.generates.at_least(2))[1]
            await worker.send(again, 2, tokens[2:], "stop")

        assert await answer(w, go_on_regardless) == TEXT
        assert len(worker.resends.all) == frames.RESENDS_LIMIT
        assert w.metric("headrace_attempts_lost_total", reason="gap") == 1
        assert w.metric("headrace_attempts_lost_total", reason="frozen") == 0


async def test_an_attempt_that_streamed_and_then_brings_nothing_goes_on_elsewhere(directory: Path) -> None:
    limits = LimitsConfig(drain_s=0.0, quiet_s=0.5, stall_s=2.0)
    async with world(directory, limits=limits) as w:
        worker = w.workers[0]

        async def stall(offered: Generate) -> None:
            await worker.send(offered, 0, w.ids(TEXT)[:3])
            async with reporting(worker, [(offered.request, 1)]):
                await worker.cancels.until(Cancel(offered.request, 1))

        assert await answer(w, stall) == TEXT
        assert w.metric("headrace_attempts_lost_total", reason="stalled") == 1
        assert w.router.asked.all[1].excluded == ("w1",)


async def test_a_first_token_that_does_not_come_in_time_is_504_over_all_attempts(directory: Path) -> None:
    limits = LimitsConfig(drain_s=0.0, quiet_s=0.5, stall_s=2.0, first_token_s=5.0)
    async with world(directory, limits=limits) as w, clients(w) as (client, _):
        for worker in w.workers:
            worker.output = None
        asking = asyncio.create_task(client.chat.completions.create(model=MODEL, messages=COUNT))
        [offered] = await w.workers[0].generates.at_least(1)
        await w.workers[0].send(offered, 0, [], "error", "it died")
        [again] = await w.workers[1].generates.at_least(1)
        async with reporting(w.workers[1], [(again.request, again.attempt)]):
            with pytest.raises(openai.InternalServerError) as error:
                await asking
        assert error.value.status_code == 504
        assert "no token came in time; attempt 1 at w1: the worker failed: it died" in error.value.message
        await w.workers[1].cancels.until(Cancel(again.request, again.attempt))


async def test_a_worker_thawed_after_its_request_went_elsewhere_mixes_into_nothing(directory: Path) -> None:
    limits = LimitsConfig(drain_s=0.0, quiet_s=0.5, stall_s=2.0)
    async with world(directory, limits=limits) as w:
        old, new = w.workers
        tokens = [*w.ids(TEXT), END]

        async def freeze_and_thaw(offered: Generate) -> None:
            new.output = None
            await old.send(offered, 0, tokens[:2])
            async with reporting(old, [(offered.request, 1)]):
                [again] = await new.generates.at_least(1)
            await new.send(again, 2, tokens[2:4])
            before = len(old.cancels.all)
            for at in range(2, 6):
                await old.send(offered, at, [9])
            await old.cancels.at_least(before + 4)
            await old.send(offered, 6, [9], "stop")
            await new.send(again, 4, tokens[4:], "stop")

        assert await answer(w, freeze_and_thaw) == TEXT
