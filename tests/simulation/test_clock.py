from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import copy_context

import pytest

from tests.simulation.clock import OWNER, Deadlock, Livelock, SimulatedLoop


def run(main: Callable[[SimulatedLoop], Coroutine[None, None, None]]) -> None:
    async def started() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, SimulatedLoop)
        await main(loop)

    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(started())


def test_an_hour_passes_in_one_jump() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await asyncio.sleep(3600.0)
        assert loop.time() == 3600.0
        assert loop.callbacks < 10

    run(main)


def test_timers_run_in_order_of_time_and_equal_ones_in_order_of_setting() -> None:
    seen: list[str] = []

    async def main(loop: SimulatedLoop) -> None:
        loop.call_later(2.0, seen.append, "later")
        loop.call_later(1.0, seen.append, "first")
        loop.call_later(1.0, seen.append, "second")
        loop.call_later(1.0, seen.append, "never").cancel()
        await asyncio.sleep(3.0)

    run(main)
    assert seen == ["first", "second", "later"]


def test_a_time_out_comes_at_its_time() -> None:
    async def main(loop: SimulatedLoop) -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1.5):
                await asyncio.Event().wait()
        assert loop.time() == 1.5

    run(main)


def test_what_goes_to_a_thread_is_done_at_once() -> None:
    async def main(loop: SimulatedLoop) -> None:
        assert await asyncio.to_thread(divmod, 7, 2) == (3, 1)
        with pytest.raises(ZeroDivisionError):
            await asyncio.to_thread(divmod, 7, 0)

    run(main)


def test_waiting_for_what_no_task_will_do_is_a_deadlock() -> None:
    async def main(loop: SimulatedLoop) -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        run(main)


def test_going_round_without_time_is_a_livelock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.simulation.clock.CALLBACKS_LIMIT", 100)

    async def main(loop: SimulatedLoop) -> None:
        for _ in range(200):
            await asyncio.sleep(0)

    with pytest.raises(Livelock):
        run(main)


def test_a_frozen_owner_does_nothing_until_it_is_thawed_and_loses_nothing() -> None:
    seen: list[tuple[str, float]] = []

    async def tick(loop: SimulatedLoop, name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(1.0)
            seen.append((name, loop.time()))

    async def main(loop: SimulatedLoop) -> None:
        frozen = copy_context()
        frozen.run(OWNER.set, "a")
        tasks = [loop.create_task(tick(loop, "a"), context=frozen), loop.create_task(tick(loop, "b"))]
        await asyncio.sleep(1.5)
        loop.freeze("a")
        await asyncio.sleep(3.0)
        loop.thaw("a")
        await asyncio.gather(*tasks)

    run(main)
    assert [when for name, when in seen if name == "a"] == [1.0, 4.5, 5.5]
    assert [when for name, when in seen if name == "b"] == [1.0, 2.0, 3.0]


def test_what_was_held_runs_before_what_came_just_before_the_thaw() -> None:
    seen: list[str] = []

    async def main(loop: SimulatedLoop) -> None:
        frozen = copy_context()
        frozen.run(OWNER.set, "a")
        loop.freeze("a")
        loop.call_soon(seen.append, "data", context=frozen)
        await asyncio.sleep(1.0)
        loop.call_soon(seen.append, "end", context=frozen)
        loop.thaw("a")
        await asyncio.sleep(1.0)

    run(main)
    assert seen == ["data", "end"]
