from __future__ import annotations

import asyncio
import errno
import logging
import os
import random
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.kvbm.tiers.disk_records import DiskFailure, LoadedFromDisk, WrittenToDisk
from shared.blocks import Content
from tests.kvbm.disk_rig import LAYOUT, RECORD_BYTES, content, memory, running, small

Vector = Sequence[memoryview]


def why(outcome: WrittenToDisk | LoadedFromDisk | DiskFailure | tuple[LoadedFromDisk | DiskFailure, bytes]) -> str:
    outcome = outcome[0] if isinstance(outcome, tuple) else outcome
    return outcome.reason if isinstance(outcome, DiskFailure) else ""


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 60 pages."""
    place = tmp_path / "mount"
    place.mkdir(mode=0o700)
    options = f"size={60 * 4096},mode=0700"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", place], capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.decode().strip()}")
    yield place
    subprocess.run(["umount", place], check=True)


def remount(place: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", place], check=True)


def fill(place: Path) -> None:
    with suppress(OSError), (place / "filler").open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


async def test_what_was_written_is_read_verified_and_found_again(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        assert await rig.back() == {}
        for number in range(8):
            assert isinstance(await rig.write(number, content(number)), WrittenToDisk)
        assert [await rig.holds(number, content(number)) for number in range(8)] == [True] * 8
        assert rig.disk.statistics().state == "on"
    async with running(tmp_path) as rig:
        assert await rig.back() == {content(number).key: number for number in range(8)}
        assert [await rig.holds(number, content(number)) for number in range(8)] == [True] * 8


async def test_a_block_is_found_once_in_its_newest_record_and_the_oldest_comes_first(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.back()
        for record, number in ((5, 1), (0, 2), (3, 1), (7, 3), (0, 4)):
            await rig.write(record, content(number))
    async with running(tmp_path) as rig:
        found = await rig.back()
        assert list(found.items()) == [(content(1).key, 3), (content(3).key, 7), (content(4).key, 0)]
        await rig.write(5, content(4))
    async with running(tmp_path) as rig:
        assert (await rig.back())[content(4).key] == 5, "sequences go on after a restart"


async def test_an_erased_block_is_found_neither_now_nor_after_a_restart_and_its_neighbours_are(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.back()
        for number in range(3):
            await rig.write(number, content(number))
        assert isinstance(await rig.erase(1), WrittenToDisk)
        assert isinstance(await rig.erase(7), WrittenToDisk), "of a segment that was never made"
        assert [await rig.holds(number, content(number)) for number in range(3)] == [True, False, True]
    async with running(tmp_path) as rig:
        assert (await rig.back()).keys() == {content(0).key, content(2).key}


async def test_a_record_with_another_block_or_none_is_a_miss(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.back()
        await rig.write(0, content(1))
        assert why(await rig.read(0, content(2).key)) == "other key"
        assert why(await rig.read(1, content(2).key)) == "blank"
        assert why(await rig.read(7, content(2).key)) == "missing"


async def test_a_block_whose_tokens_do_not_fit_a_header_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as rig:
        await rig.back()
        assert why(await rig.write(0, Content(bytes(16), None, bytes(5000)))) == "too large"


async def test_at_the_limit_a_request_is_refused_and_the_record_stands(tmp_path: Path) -> None:
    async with running(tmp_path, limit=1) as rig:
        await rig.back()
        outcomes = await asyncio.gather(*(rig.write(number, content(number)) for number in range(4)))
        assert sorted(map(why, outcomes)) == ["", "busy", "busy", "busy"]
        assert not any(outcome.tried for outcome in outcomes if isinstance(outcome, DiskFailure))
        assert isinstance(await rig.write(1, content(1)), WrittenToDisk)


async def test_no_request_ends_before_its_call_returns(tmp_path: Path) -> None:
    ended: list[WrittenToDisk | DiskFailure] = []
    async with running(tmp_path) as rig:
        rig.disk.write(0, content(0), memory(small()), ended.append)
        assert not ended
        await rig.back()
        assert [why(outcome) for outcome in ended] == ["off"]


async def test_without_o_direct_it_goes_through_the_page_cache_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    really = os.open

    def no_direct(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT")
        return really(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", no_direct)
    with caplog.at_level(logging.INFO):
        async with running(tmp_path) as rig:
            await rig.back()
            await rig.write(0, content(0))
            assert await rig.holds(0, content(0))
    assert "O_DIRECT does not work" in caplog.text


# --- files that change under the tier


def corrupt(path: Path, seed: int) -> None:
    """Damage a file: flip bits, copy pages over others, zero some, cut off, in any order."""
    draw = random.Random(seed)
    for _ in range(draw.randint(1, 6)):
        size_bytes = path.stat().st_size
        with path.open("r+b") as file:
            raw = bytearray(file.read())
            if not raw:
                return
            at = draw.randrange(size_bytes)
            page = at // 4096 * 4096
            other = draw.randrange(size_bytes) // 4096 * 4096
            match draw.randrange(5):
                case 0:
                    raw[at] ^= 1 << draw.randrange(8)
                case 1:
                    raw[page : page + 4096] = raw[other : other + 4096]
                case 2:
                    raw[page : page + 4096] = bytes(len(raw[page : page + 4096]))
                case 3:
                    record = other // RECORD_BYTES * RECORD_BYTES
                    start = at // RECORD_BYTES * RECORD_BYTES
                    raw[start : start + RECORD_BYTES] = raw[record : record + RECORD_BYTES]
                case _:
                    raw = raw[: at if draw.random() < 0.3 else size_bytes]
            file.seek(0)
            file.write(raw)
            file.truncate(len(raw))


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32), while_running=st.booleans())
async def test_whatever_is_damaged_nothing_wrong_is_ever_read(tmp_path: Path, seed: int, while_running: bool) -> None:
    shutil.rmtree(tmp_path / "disk", ignore_errors=True)
    segments = [tmp_path / "disk" / LAYOUT / f"segment-{number:06d}" for number in range(2)]
    async with running(tmp_path / "disk") as rig:
        await rig.back()
        for record in range(8):
            await rig.write(record, content(record))
        if while_running:
            corrupt(segments[seed % 2], seed)
        for record in range(8):
            await rig.holds(record, content(record))  # asserts that what it gives is right
    if not while_running:
        corrupt(segments[seed % 2], seed)
    async with running(tmp_path / "disk") as rig:
        found = await rig.back()
        kept = {content(record).key: content(record) for record in range(8)}
        for key, record in found.items():
            await rig.holds(record, kept[key])
        untouched = range(4) if seed % 2 else range(4, 8)
        for record in untouched:
            assert found[content(record).key] == record
            assert await rig.holds(record, content(record))
        for record in range(8):
            assert isinstance(await rig.write(record, content(record + 8)), WrittenToDisk)
            assert await rig.holds(record, content(record + 8))


async def test_memory_that_changes_while_it_is_written_is_a_miss_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = os.pwritev

    def changes(file: int, buffers: Vector, offset: int) -> int:
        if len(buffers) == 2:
            buffers[1][100] ^= 1
        return really(file, buffers, offset)

    async with running(tmp_path) as rig:
        await rig.back()
        monkeypatch.setattr(os, "pwritev", changes)
        assert isinstance(await rig.write(0, content(0)), WrittenToDisk)
        assert why(await rig.read(0, content(0).key)) == "damaged"


# --- the tier goes off and on again


async def test_a_directory_that_is_removed_switches_the_tier_off_and_it_comes_back_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path / "disk") as rig:
        await rig.back()
        await rig.write(0, content(0))
        shutil.rmtree(tmp_path / "disk")
        assert "vanished" in await rig.went()
        assert await rig.back() == {}
        assert isinstance(await rig.write(0, content(0)), WrittenToDisk)
        assert await rig.holds(0, content(0))
    assert "vanished" in caplog.text


async def test_a_directory_whose_parent_is_gone_is_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = tmp_path / "mount"
    async with running(place / "disk") as rig:
        assert why(await rig.write(0, content(0))) == "off"
        place.mkdir()
        assert await rig.back() == {}
        assert isinstance(await rig.write(0, content(0)), WrittenToDisk)
        place.rename(tmp_path / "away")
        assert "vanished" in await rig.went()
        outcome = await rig.write(0, content(0))
        assert isinstance(outcome, DiskFailure)
        assert (outcome.reason, outcome.tried) == ("off", False)
        (tmp_path / "away").rename(place)
        assert await rig.back() == {content(0).key: 0}
        assert await rig.holds(0, content(0))
    off = [record for record in caplog.records if "tried again every" in record.getMessage()]
    assert len(off) <= 2, "a reason is told once, however often it is tried"


async def test_unsafe_paths_keep_the_tier_off_until_they_are_put_right(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "disk").chmod(0o755)
    async with running(tmp_path / "disk") as rig:
        await rig.off_because("0755")
        assert why(await rig.write(0, content(0))) == "off"
        (tmp_path / "disk").chmod(0o700)
        assert await rig.back() == {}


async def test_a_full_disk_keeps_what_it_has_and_grows_when_there_is_space_again(
    small_mount: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shape = small(records=32, per_segment=4)  # 8 segments of 16 pages; the file system has room for 3
    async with running(small_mount, shape) as rig:
        await rig.back()
        outcomes = [await rig.write(record, content(record)) for record in range(32)]
        stored = [record for record, outcome in enumerate(outcomes) if isinstance(outcome, WrittenToDisk)]
        assert stored == list(range(12))
        assert {why(outcome) for outcome in outcomes[12:]} == {"no space"}
        assert [await rig.holds(record, content(record)) for record in stored] == [True] * 12
        assert isinstance(await rig.write(3, content(40)), WrittenToDisk), "what is made already goes on"
        told = [record for record in caplog.records if "full for now" in record.getMessage()]
        assert len(told) == 1
        remount(small_mount, f"size={200 * 4096}")
        async with asyncio.timeout(60):
            while not isinstance(await rig.write(31, content(31)), WrittenToDisk):
                pass
        assert await rig.holds(31, content(31))
        assert rig.gone.empty()
    async with running(small_mount, shape) as rig:
        assert len(await rig.back()) == 13


async def test_a_full_disk_is_opened_and_read(small_mount: Path) -> None:
    async with running(small_mount) as rig:
        await rig.back()
        await rig.write(0, content(0))
    fill(small_mount)
    async with running(small_mount) as rig:
        assert await rig.back() == {content(0).key: 0}
        assert await rig.holds(0, content(0))
        assert why(await rig.write(7, content(7))) == "no space"
        assert rig.disk.statistics().reason


async def test_a_read_only_file_system_keeps_the_tier_off_until_it_can_be_written(small_mount: Path) -> None:
    remount(small_mount, "ro")
    async with running(small_mount) as rig:
        await rig.off_because("Read-only")
        remount(small_mount, "rw")
        assert await rig.back() == {}
        assert isinstance(await rig.write(0, content(0)), WrittenToDisk)


def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, number: int, when: Callable[[int], bool]
) -> Callable[[int, Vector, int], int]:
    """Make `os.preadv` or `os.pwritev` fail from here on, for whole records at offsets for which `when` holds."""
    really: Callable[[int, Vector, int], int] = getattr(os, name)

    def fails(file: int, buffers: Vector, offset: int) -> int:
        if len(buffers) == 2 and when(offset):
            raise OSError(number, os.strerror(number))
        return really(file, buffers, offset)

    monkeypatch.setattr(os, name, fails)
    return fails


async def test_one_bad_sector_costs_its_record_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(tmp_path) as rig:
        await rig.back()
        await asyncio.gather(*(rig.write(record, content(record)) for record in range(4)))
        failing(monkeypatch, "preadv", errno.EIO, lambda offset: offset == RECORD_BYTES)
        for _ in range(8):
            assert [await rig.holds(record, content(record)) for record in range(4)] == [True, False, True, True]
        assert why(await rig.read(1, content(1).key)) == "error"
        assert rig.gone.empty()


async def test_requests_that_fail_in_a_row_switch_the_tier_off_and_it_comes_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as rig:
        await rig.back()
        await rig.write(0, content(0))
        failing(monkeypatch, "pwritev", errno.EIO, lambda offset: True)
        outcomes = [await rig.write(record, content(record)) for record in range(4)]
        assert set(map(why, outcomes)) == {"error"}
        assert why(await rig.write(0, content(0))) == "off"
        assert "Input/output" in await rig.went()
        monkeypatch.undo()
        assert await rig.back() == {content(0).key: 0}
        assert await rig.holds(0, content(0))


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENODEV, errno.ESTALE])
async def test_one_answer_that_all_is_gone_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    async with running(tmp_path) as rig:
        await rig.back()
        failing(monkeypatch, "pwritev", number, lambda offset: True)
        assert why(await rig.write(0, content(0))) == "error"
        assert os.strerror(number) in await rig.went()
        monkeypatch.undo()
        await rig.back()


async def test_a_disk_that_has_no_space_even_in_what_was_made_is_left_alone_until_the_next_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def when(offset: int) -> bool:
        tried.append(offset)
        return True

    async with running(tmp_path, retry_s=0.2) as rig:
        await rig.back()
        await rig.write(0, content(0))
        failing(monkeypatch, "pwritev", errno.ENOSPC, when)
        assert {why(await rig.write(0, content(1))) for _ in range(5)} == {"no space"}
        assert len(tried) <= 2
        monkeypatch.undo()
        async with asyncio.timeout(60):
            while not isinstance(await rig.write(0, content(2)), WrittenToDisk):
                pass
        assert await rig.holds(0, content(2))


async def test_a_tier_that_goes_off_while_requests_hang_lets_them_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that the disk holds keeps its memory, its descriptors and the lock; then the tier comes up again."""
    hangs, go = threading.Event(), threading.Event()
    really = os.pwritev

    def slow(file: int, buffers: Vector, offset: int) -> int:
        if len(buffers) == 2:
            hangs.set()
            go.wait(20)
        return really(file, buffers, offset)

    async with running(tmp_path / "disk") as rig:
        await rig.back()
        await rig.write(0, content(0))
        monkeypatch.setattr(os, "pwritev", slow)
        hanging = asyncio.create_task(rig.write(1, content(1)))
        await asyncio.to_thread(hangs.wait, 20)
        (tmp_path / "disk").rename(tmp_path / "away")
        await rig.went()
        (tmp_path / "away").rename(tmp_path / "disk")
        await rig.off_because("in use")
        assert not hanging.done()
        go.set()
        assert isinstance(await hanging, WrittenToDisk)
        assert await rig.back() == {content(0).key: 0, content(1).key: 1}


async def test_a_scan_of_many_segments_finds_every_block(tmp_path: Path) -> None:
    shape = small(records=40, per_segment=2, payload_bytes=100)
    async with running(tmp_path, shape) as rig:
        await rig.back()
        await asyncio.gather(*(rig.write(record, content(record)) for record in range(40)))
    async with running(tmp_path, shape) as rig:
        assert len(await rig.back()) == 40


async def test_two_tiers_in_one_directory_keep_out_of_each_others_way(tmp_path: Path) -> None:
    async with running(tmp_path) as first:
        await first.back()
        async with running(tmp_path) as second:
            await second.off_because("in use")
            assert second.found.empty()
        assert isinstance(await first.write(0, content(0)), WrittenToDisk)
