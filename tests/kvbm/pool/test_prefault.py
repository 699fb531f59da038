"""Memory that is made in advance, in real file systems; what was written stays; too little is tried again."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kvbm.pool import prefault as module
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.pool.prefault import Prefault
from tests.kvbm.small_tmpfs import small_tmpfs
from tests.kvbm.store_rig import until

SIZE_BYTES = 5 << 20


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 18)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[HostPool]:
    opened = HostPool.open(tmp_path, SIZE_BYTES)
    yield opened
    opened.close()


@pytest.mark.parametrize("threads", [1, 3])
async def test_all_memory_is_there_at_the_end_and_what_was_written_stays(pool: HostPool, threads: int) -> None:
    os.pwrite(pool.descriptor, b"stays", 3 << 20)
    prefault = Prefault(pool, threads)
    assert (prefault.complete, prefault.share, prefault.reason) == (False, 0.0, "making the pool's memory: 0 %")
    await prefault.run()
    assert (prefault.complete, prefault.share, prefault.reason) == (True, 1.0, "")
    assert prefault.done_bytes == SIZE_BYTES
    assert os.fstat(pool.descriptor).st_blocks * 512 >= SIZE_BYTES
    assert os.pread(pool.descriptor, 5, 3 << 20) == b"stays"
    assert Prefault(pool, threads).complete, "it is there for good"


async def test_its_threads_have_low_priority_and_the_rest_of_the_process_stays_as_it_is(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    niceness: list[int] = []
    make = module.make_memory

    def observed(descriptor: int, start: int, length: int) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        make(descriptor, start, length)

    monkeypatch.setattr(module, "make_memory", observed)
    await Prefault(pool, 1).run()
    assert set(niceness) == {module.NICENESS}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


async def test_cancelled_it_waits_for_the_chunk_it_is_at_and_makes_no_other(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, going_on = threading.Event(), threading.Event()
    made: list[int] = []
    make = module.make_memory

    def held_up(descriptor: int, start: int, length: int) -> None:
        begun.set()
        assert going_on.wait(60)
        make(descriptor, start, length)
        made.append(start)

    monkeypatch.setattr(module, "make_memory", held_up)
    prefault = Prefault(pool, 1)
    running = asyncio.create_task(prefault.run())
    assert await asyncio.to_thread(begun.wait, 60)
    running.cancel()
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert made == [0]
    assert not prefault.complete


async def test_after_a_failure_the_loop_turns_while_another_chunk_ends_and_a_cancellation_counts(
    pool: HostPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, going_on = threading.Event(), threading.Event()

    def first_fails(_descriptor: int, start: int, _length: int) -> None:
        if start == 0:
            assert begun.wait(60)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        begun.set()
        assert going_on.wait(60)

    monkeypatch.setattr(module, "make_memory", first_fails)
    prefault = Prefault(pool, 2)
    running = asyncio.create_task(prefault.run())
    assert await asyncio.to_thread(begun.wait, 60)
    for _ in range(100):  # the failure arrives, and the loop is free while the second chunk is being made
        await asyncio.sleep(0)
    running.cancel()
    going_on.set()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert not prefault.complete


async def test_chunks_that_end_after_a_failure_are_counted(pool: HostPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER_S", 60)
    begun, failed = threading.Event(), threading.Event()

    def first_fails(_descriptor: int, start: int, _length: int) -> None:
        if start == 0:
            assert begun.wait(60)
            failed.set()
            raise OSError(errno.ENOSPC, "")
        begun.set()
        assert failed.wait(60)

    monkeypatch.setattr(module, "make_memory", first_fails)
    prefault = Prefault(pool, 2)
    running = asyncio.create_task(prefault.run())
    await until(lambda: bool(prefault.problem))
    assert prefault.done_bytes >= module.CHUNK_BYTES
    assert not prefault.complete
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_where_there_is_no_memory_it_says_why_and_goes_on_once_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "RETRY_AFTER_S", 0.01)
    with small_tmpfs(tmp_path / "small") as directory:
        pool = HostPool.open(directory, 1 << 20)
        (directory / "other").write_bytes(os.urandom(1792 << 10))
        prefault = Prefault(pool, 2)
        running = asyncio.create_task(prefault.run())
        await until(lambda: "No space left on device" in prefault.reason)
        assert prefault.share < 1
        (directory / "other").unlink()
        async with asyncio.timeout(60):
            await running
        assert (prefault.complete, prefault.reason) == (True, "")
        assert caplog.text.count("cannot be made") == 1, "the same problem is logged once"
        pool.close()
