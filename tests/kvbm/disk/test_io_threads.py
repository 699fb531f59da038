from __future__ import annotations

import asyncio
import errno
import logging
import threading

import pytest

from services.kvbm.disk.io_threads import DiskThreads

DEADLINE_S = 60.0


async def test_a_job_runs_in_a_thread_and_ends_in_the_loop() -> None:
    threads = DiskThreads(2, 4)
    ended: asyncio.Future[tuple[object, str]] = asyncio.get_running_loop().create_future()
    here = threading.current_thread()

    def done(result: object) -> None:
        assert threading.current_thread() is here
        ended.set_result((result, threading.current_thread().name))

    assert threads.submit("read", lambda page: (len(page), threading.current_thread() is here), done)
    assert (await ended)[0] == (4096, False)
    assert await threads.close(DEADLINE_S)


async def test_what_a_job_raises_is_its_result_and_its_thread_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    threads = DiskThreads(1, 4)
    results: asyncio.Queue[object] = asyncio.Queue()

    def fails(page: memoryview) -> None:
        raise OSError(errno.EIO, "no")

    def surprises(page: memoryview) -> None:
        raise KeyError("surprise")

    with caplog.at_level(logging.ERROR):
        for job in (fails, surprises):
            assert threads.submit("write", job, results.put_nowait)
        first, second = await results.get(), await results.get()
    assert isinstance(first, OSError)
    assert isinstance(second, KeyError)
    assert [record.levelname for record in caplog.records] == ["ERROR"], "the one that was not foreseen"
    assert await threads.upkeep(lambda _: "still there", lambda: None) == "still there"
    assert await threads.close(DEADLINE_S)


async def test_at_the_limit_of_its_kind_a_request_is_not_taken() -> None:
    threads = DiskThreads(1, 2)
    results: asyncio.Queue[object] = asyncio.Queue()
    go = threading.Event()
    assert threads.submit("read", lambda _: go.wait(DEADLINE_S), results.put_nowait)
    assert threads.submit("read", lambda _: None, results.put_nowait)
    assert not threads.submit("read", lambda _: None, results.put_nowait)
    assert threads.submit("write", lambda _: None, results.put_nowait), "another kind has its own limit"
    go.set()
    for _ in range(3):
        await results.get()
    assert threads.submit("read", lambda _: None, results.put_nowait)
    await results.get()
    assert await threads.close(DEADLINE_S)


async def test_reads_go_first_and_writes_do_not_starve() -> None:
    threads = DiskThreads(1, 100)
    order: list[str] = []
    go, over = threading.Event(), asyncio.Event()

    def done(result: object) -> None:
        order.append(str(result))
        if len(order) == 31:
            over.set()

    assert threads.submit("read", lambda _: go.wait(DEADLINE_S), done)
    for _ in range(10):
        assert threads.submit("write", lambda _: "write", done)
    for _ in range(20):
        assert threads.submit("read", lambda _: "read", done)
    go.set()
    await over.wait()
    assert order[1:4].count("read") >= 2
    last_read = 30 - order[::-1].index("read")
    assert 4 <= order[:last_read].count("write") <= 8
    assert await threads.close(DEADLINE_S)


async def test_closing_ends_what_waits_and_waits_for_what_runs() -> None:
    threads = DiskThreads(1, 4)
    results: list[object] = []
    started, go = threading.Event(), threading.Event()

    def runs(page: memoryview) -> str:
        started.set()
        go.wait(DEADLINE_S)
        return "ran"

    assert threads.submit("write", runs, results.append)
    assert threads.submit("write", lambda _: "not run", results.append)
    await asyncio.to_thread(started.wait, DEADLINE_S)
    assert not await threads.close(0.01), "a disk that hangs does not hold up the end"
    assert isinstance(results[0], OSError)
    assert results[0].errno == errno.ECANCELED
    assert not threads.submit("read", lambda _: None, results.append)
    with pytest.raises(OSError, match="closing"):
        await threads.upkeep(lambda _: None, lambda: None)
    go.set()
    assert await threads.close(DEADLINE_S)
    assert results[1:] == ["ran"]


async def test_a_wait_that_is_cancelled_leaves_the_job_running_and_hears_its_end() -> None:
    threads = DiskThreads(1, 4)
    started, go, over = threading.Event(), threading.Event(), asyncio.Event()

    def runs(page: memoryview) -> None:
        started.set()
        go.wait(DEADLINE_S)

    waits = asyncio.create_task(threads.upkeep(runs, over.set))
    await asyncio.to_thread(started.wait, DEADLINE_S)
    waits.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waits
    assert not over.is_set()
    go.set()
    await over.wait()
    assert await threads.close(DEADLINE_S)


@pytest.mark.parametrize(("threads", "limit"), [(0, 1), (1, 0)])
async def test_no_threads_or_no_requests_are_refused(threads: int, limit: int) -> None:
    with pytest.raises(ValueError, match="disk threads"):
        DiskThreads(threads, limit)
