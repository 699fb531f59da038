"""shared/file_reads.py: a read that hangs keeps one thread, and the next one waits for it no longer than itself."""

from __future__ import annotations

import threading

import pytest

from shared import file_reads
from shared.file_reads import FileReads


async def test_a_read_gives_what_it_reads_and_raises_what_it_raises() -> None:
    reads = FileReads()
    assert await reads.read(lambda: 7) == 7
    with pytest.raises(OSError, match="gone"):
        await reads.read(missing)
    assert await reads.read(lambda: 8) == 8


async def test_one_read_hangs_however_often_it_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reads, "READ_LIMIT_S", 0.05)
    goes_on, begun, reads = threading.Event(), list[int](), FileReads()

    def hanging() -> int:
        begun.append(1)
        assert goes_on.wait(60)
        return len(begun)

    for _ in range(3):
        with pytest.raises(TimeoutError):
            await reads.read(hanging)
    assert begun == [1]
    goes_on.set()
    monkeypatch.setattr(file_reads, "READ_LIMIT_S", 60.0)
    assert await reads.read(hanging) == 2


def missing() -> None:
    raise OSError("gone")
