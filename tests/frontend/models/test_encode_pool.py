from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

from services.frontend.models.encode_pool import EncodePool


async def test_keys_take_turns_at_the_threads() -> None:
    order: list[str] = []
    go_on = threading.Event()

    def job(key: str) -> None:
        order.append(key)
        go_on.wait()

    with ThreadPoolExecutor(1) as threads:
        pool = EncodePool(threads, 1)
        running = asyncio.gather(*(pool.of(key).run(partial(job, key)) for key in [*"aaaaab"]))
        await asyncio.sleep(0)
        go_on.set()
        await running
    assert order == [*"aabaaa"], "the second was next when the other came"


async def test_a_job_holds_its_place_until_it_ends_also_if_no_caller_waits_for_it() -> None:
    begun, go_on, second = threading.Event(), threading.Event(), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        pool = EncodePool(threads, 2).of("a")

        def large() -> None:
            begun.set()
            go_on.wait()

        first = asyncio.create_task(pool.run(large, large=True))
        await asyncio.to_thread(begun.wait)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        waiting = asyncio.create_task(pool.run(second.set, large=True))
        await pool.run(lambda: None)  # small ones go on
        assert not second.is_set()
        go_on.set()
        await waiting
    assert second.is_set()


async def test_what_a_job_raises_is_raised() -> None:
    with ThreadPoolExecutor(1) as threads:
        pool = EncodePool(threads, 1).of()
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda: 1 // 0)
