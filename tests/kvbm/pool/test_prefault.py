"""Memory made in advance: all of it, changing nothing that is there, stopped at once, refused where there is none."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from services.kvbm.pool import prefault as module
from services.kvbm.pool.prefault import Prefault
from tests.kvbm.small_tmpfs import small_tmpfs

SIZE_BYTES = 5 << 20


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 1 << 18)


@pytest.fixture
def descriptor(tmp_path: Path, small_chunks: None) -> Iterator[int]:
    opened = os.open(tmp_path / "pool", os.O_RDWR | os.O_CREAT, 0o600)
    os.ftruncate(opened, SIZE_BYTES)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("threads", [1, 3])
def test_all_memory_is_there_at_the_end_and_what_was_written_stays(descriptor: int, threads: int) -> None:
    os.pwrite(descriptor, b"stays", 3 << 20)
    ended = threading.Event()
    prefault = Prefault(descriptor, SIZE_BYTES, threads, ended.set)
    assert not prefault.complete
    prefault.start()
    assert ended.wait(60)
    assert prefault.complete
    assert prefault.done_bytes == SIZE_BYTES
    assert not prefault.failure
    assert os.fstat(descriptor).st_blocks * 512 >= SIZE_BYTES
    assert os.pread(descriptor, 5, 3 << 20) == b"stays"
    prefault.stop()


def test_it_goes_behind_other_work_and_leaves_the_rest_of_the_process_as_it_is(
    descriptor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()
    before = os.getpriority(os.PRIO_PROCESS, 0)
    niceness: list[int] = []
    make = module._make

    def observed(descriptor: int, start: int, length: int) -> None:
        niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        make(descriptor, start, length)

    monkeypatch.setattr(module, "_make", observed)
    Prefault(descriptor, SIZE_BYTES, 1, ended.set).start()
    assert ended.wait(60)
    assert set(niceness) == {module.NICENESS}
    assert os.getpriority(os.PRIO_PROCESS, 0) == before


def test_it_stops_after_the_chunk_it_is_at(descriptor: int, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ended = threading.Event(), threading.Event()
    prefault = Prefault(descriptor, SIZE_BYTES, 1, ended.set)
    make = module._make

    def held_up(descriptor: int, start: int, length: int) -> None:
        begun.set()
        assert prefault.stopping.wait(60)
        make(descriptor, start, length)

    monkeypatch.setattr(module, "_make", held_up)
    prefault.start()
    assert begun.wait(60)
    prefault.stop()
    assert ended.is_set()
    assert prefault.done_bytes == module.CHUNK_BYTES
    assert not prefault.complete
    prefault.stop()


def test_a_file_system_without_room_is_a_reason_and_no_signal(tmp_path: Path, small_chunks: None) -> None:
    with small_tmpfs(tmp_path / "small") as directory:
        opened = os.open(directory / "pool", os.O_RDWR | os.O_CREAT, 0o600)
        os.ftruncate(opened, SIZE_BYTES)
        ended = threading.Event()
        prefault = Prefault(opened, SIZE_BYTES, 2, ended.set)
        prefault.start()
        assert ended.wait(60)
        prefault.stop()
        os.close(opened)
    assert prefault.failure == "No space left on device"
    assert not prefault.complete
    assert prefault.done_bytes < SIZE_BYTES
