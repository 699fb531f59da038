"""The pool's memory, made in real file systems."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from services.kvbm.pool import reservation
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.pool.reservation import Reservation
from tests.kvbm.small_tmpfs import small_tmpfs
from tests.kvbm.store_rig import until


async def test_memory_is_made_and_then_it_is_there_for_good(tmp_path: Path) -> None:
    pool = HostPool.open(tmp_path, 1 << 20)
    made = Reservation(pool, 2)
    assert (made.complete, made.share, made.reason) == (False, 0.0, "making the pool's memory: 0 %")
    await made.run()
    assert (made.complete, made.share, made.reason) == (True, 1.0, "")
    pool.close()
    again = HostPool.open(tmp_path, 1 << 20)
    assert Reservation(again, 2).complete
    again.close()


async def test_where_there_is_no_memory_it_says_why_and_goes_on_once_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reservation, "AGAIN_AFTER_S", 0.01)
    with small_tmpfs(tmp_path / "small") as directory:
        pool = HostPool.open(directory, 1 << 20)
        (directory / "other").write_bytes(os.urandom(1792 << 10))
        made = Reservation(pool, 1)
        running = asyncio.create_task(made.run())
        await until(lambda: "No space left on device" in made.reason)
        (directory / "other").unlink()
        async with asyncio.timeout(60):
            await running
        assert (made.complete, made.reason) == (True, "")
        assert caplog.text.count("cannot be made") == 1, "told once"
        pool.close()
