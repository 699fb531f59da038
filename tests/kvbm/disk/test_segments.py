from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.kvbm.disk.format import DiskGeometry, disk_geometry
from services.kvbm.disk.segments import Segments, make_room, stored_layouts
from tests.kvbm.disk_rig import LAYOUT, RECORD_BYTES, content, memory, running, small

LAYOUTS = [f"{number:016x}" for number in range(3)]
SEGMENT_BYTES = 4 * RECORD_BYTES


@contextmanager
def opened(directory: Path, shape: DiskGeometry | None = None, min_free_bytes: int = 0) -> Iterator[Segments]:
    segments = Segments(directory, small() if shape is None else shape, min_free_bytes)
    segments.acquire()
    try:
        segments.open()
        yield segments
    finally:
        segments.release()


def open_files() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def put(segments: Segments, record: int, letter: bytes = b"x") -> None:
    page = memoryview(mmap.mmap(-1, 4096))
    page[:] = letter * 4096
    segments.write(record, page, memory(small(), letter * small().memory_bytes))


def get(segments: Segments, record: int) -> bytes | None:
    page, into = memoryview(mmap.mmap(-1, 4096)), memory(small())
    return bytes(page[:1]) + bytes(into[-1:]) if segments.read(record, page, into) else None


def sizes(directory: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in (directory / LAYOUT).iterdir()}


def test_directories_and_files_are_made_for_this_user_alone(tmp_path: Path) -> None:
    with opened(tmp_path / "disk") as segments:
        put(segments, 5)
        made = [tmp_path / "disk", tmp_path / "disk" / LAYOUT, tmp_path / "disk" / LAYOUT / "segment-000001"]
        assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700", "0o700", "0o600"]
        assert sizes(tmp_path / "disk") == {"segment-000001": 4 * RECORD_BYTES}, "whole, and no probe is left"
        assert segments.existing() == [1]


def test_records_come_back_after_reopening_and_what_was_never_made_is_no_record(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        put(segments, 0, b"a")
        put(segments, 3, b"d")
    with opened(tmp_path) as segments:
        assert [get(segments, record) for record in (0, 1, 3, 4)] == [b"aa", b"\0\0", b"dd", None]


def test_a_missing_parent_is_not_made(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError), opened(tmp_path / "mount" / "disk"):
        pass
    assert not (tmp_path / "mount").exists()


def test_a_directory_that_lets_others_in_is_refused(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir(mode=0o700)
    (tmp_path / "disk").chmod(0o750)
    with pytest.raises(PermissionError, match="0750"), opened(tmp_path / "disk"):
        pass


def test_symbolic_links_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="symbolic link"), opened(tmp_path / "link"):
        pass
    (tmp_path / "real" / LAYOUT).symlink_to(tmp_path)
    with pytest.raises(OSError, match="symbolic link"), opened(tmp_path / "real"):
        pass
    with opened(tmp_path):
        (tmp_path / "elsewhere").write_bytes(b"precious")
        (tmp_path / LAYOUT / "segment-000000").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link") as raised, opened(tmp_path):
        pass
    assert raised.value.errno == errno.ELOOP
    assert (tmp_path / "elsewhere").read_bytes() == b"precious"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        put(segments, 0)
    os.chown(tmp_path / LAYOUT / "segment-000000", 12345, -1)
    with (
        pytest.raises(PermissionError, match="000000 must belong to this user: it belongs to user 12345"),
        opened(tmp_path),
    ):
        pass
    os.chown(tmp_path / LAYOUT, 12345, -1)
    with pytest.raises(PermissionError, match="belongs to user 12345"), opened(tmp_path):
        pass


def test_a_segment_with_a_second_name_or_that_is_no_file_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        put(segments, 0)
    segment = tmp_path / LAYOUT / "segment-000000"
    (tmp_path / "second").hardlink_to(segment)
    with pytest.raises(PermissionError, match="has 2 names"), opened(tmp_path):
        pass
    segment.unlink()
    os.mkfifo(segment, 0o600)
    with pytest.raises(OSError, match="segment-000000"), opened(tmp_path):  # O_DIRECT refuses it before we do
        pass


def test_one_process_at_a_time(tmp_path: Path) -> None:
    with opened(tmp_path):
        with pytest.raises(OSError, match="in use") as raised, opened(tmp_path):
            pass
        assert raised.value.errno == errno.EBUSY
    with opened(tmp_path):
        pass


def test_a_smaller_limit_cuts_off_what_exceeds_it(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        put(segments, 0, b"a")
        put(segments, 7, b"h")
    with opened(tmp_path, small(records=3)) as segments:
        assert sizes(tmp_path) == {"segment-000000": 3 * RECORD_BYTES}
        assert get(segments, 0) == b"aa"


def test_a_file_that_was_cut_off_is_made_whole_by_its_next_write(tmp_path: Path) -> None:
    with opened(tmp_path) as segments:
        put(segments, 3)
        os.truncate(tmp_path / LAYOUT / "segment-000000", 2 * RECORD_BYTES)
        assert get(segments, 3) is None
        segments.check()
        put(segments, 0)
        assert sizes(tmp_path) == {"segment-000000": 4 * RECORD_BYTES}
    os.truncate(tmp_path / LAYOUT / "segment-000000", 100)
    with opened(tmp_path) as segments:
        put(segments, 2, b"c")
        assert get(segments, 2) == b"cc"
        assert sizes(tmp_path) == {"segment-000000": 4 * RECORD_BYTES}


def test_no_segment_is_made_where_too_little_would_stay_free_until_the_next_look(tmp_path: Path) -> None:
    room = os.statvfs(tmp_path)
    with opened(tmp_path, min_free_bytes=2 * room.f_bavail * room.f_frsize) as segments:
        for _ in range(2):
            with pytest.raises(OSError, match="would stay free") as raised:
                put(segments, 0)
            assert raised.value.errno == errno.ENOSPC
        assert segments.no_space
        segments.check()
        assert not segments.no_space
    assert sizes(tmp_path) == {}


def test_a_look_finds_a_segment_or_directory_that_vanished_or_was_replaced(tmp_path: Path) -> None:
    with opened(tmp_path / "disk") as segments:
        put(segments, 0)
        segments.check()
        (tmp_path / "disk" / LAYOUT / "segment-000000").unlink()
        with pytest.raises(OSError, match="segment-000000 has vanished"):
            segments.check()
    with opened(tmp_path / "disk") as segments:
        (tmp_path / "disk" / LAYOUT).rename(tmp_path / "away")
        with pytest.raises(OSError, match="vanished"):
            segments.check()
        (tmp_path / "disk" / LAYOUT).mkdir()
        with pytest.raises(OSError, match="another directory"):
            segments.check()


def test_descriptors_stay_open_until_their_last_user_has_gone(tmp_path: Path) -> None:
    segments = Segments(tmp_path, small(), 0)
    segments.acquire()
    segments.open()
    put(segments, 0, b"a")
    segments.acquire()
    segments.release()
    assert get(segments, 0) == b"aa"
    before = open_files()
    segments.release()
    assert open_files() == before - 3


def test_other_names_in_the_directory_are_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path):
        pass
    (tmp_path / LAYOUT / "notes").write_text("mine")
    (tmp_path / LAYOUT / "segment-1").write_text("mine")
    with opened(tmp_path) as segments:
        assert segments.existing() == []
    assert sorted(sizes(tmp_path)) == ["notes", "segment-1"]


async def fill(directory: Path) -> None:
    """Make three layouts with a segment each; the first was opened last."""
    for age, layout in enumerate(LAYOUTS):
        async with running(directory, disk_geometry(layout, 9000, 2 * SEGMENT_BYTES, SEGMENT_BYTES)) as rig:
            await rig.back()
            await rig.write(0, content(0))
        os.utime(directory / layout, (1000 - age, 1000 - age))


def names(directory: Path) -> list[str]:
    return [layout.layout for layout in stored_layouts(directory)]


async def test_layouts_are_listed_with_their_size_the_least_recently_opened_first(tmp_path: Path) -> None:
    await fill(tmp_path)
    assert names(tmp_path) == LAYOUTS[::-1]
    assert [layout.opened_s for layout in stored_layouts(tmp_path)] == [998.0, 999.0, 1000.0]
    assert all(layout.used_bytes >= SEGMENT_BYTES for layout in stored_layouts(tmp_path))


async def test_opening_a_layout_makes_it_the_most_recent(tmp_path: Path) -> None:
    await fill(tmp_path)
    async with running(tmp_path, disk_geometry(LAYOUTS[2], 9000, 2 * SEGMENT_BYTES, SEGMENT_BYTES)) as rig:
        await rig.back()
    assert names(tmp_path)[-1] == LAYOUTS[2]


async def test_the_least_recently_opened_go_until_the_rest_fits(tmp_path: Path) -> None:
    await fill(tmp_path)
    used_bytes = stored_layouts(tmp_path)[0].used_bytes
    assert make_room(tmp_path, 3 * used_bytes) == []
    assert [gone.layout for gone in make_room(tmp_path, 3 * used_bytes - 1)] == [LAYOUTS[2]]
    assert [gone.layout for gone in make_room(tmp_path, 0, frozenset(LAYOUTS[1:2]))] == [LAYOUTS[0]]
    assert names(tmp_path) == [LAYOUTS[1]]


async def test_a_layout_in_use_stays(tmp_path: Path) -> None:
    await fill(tmp_path)
    async with running(tmp_path, disk_geometry(LAYOUTS[1], 9000, 2 * SEGMENT_BYTES, SEGMENT_BYTES)) as rig:
        await rig.back()
        make_room(tmp_path, 0)
        assert names(tmp_path) == [LAYOUTS[1]]
        assert await rig.holds(0, content(0))


async def test_what_we_did_not_make_is_left_alone(tmp_path: Path) -> None:
    await fill(tmp_path)
    (tmp_path / LAYOUTS[0] / "notes").write_text("mine")
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "elsewhere" / "segment-000000").write_text("mine")
    (tmp_path / ("f" * 16)).symlink_to(tmp_path / "elsewhere")
    (tmp_path / LAYOUTS[1]).chmod(0o755)
    make_room(tmp_path, 0)
    assert (tmp_path / LAYOUTS[0] / "notes").read_text() == "mine"
    assert (tmp_path / "elsewhere" / "segment-000000").read_text() == "mine"
    assert (tmp_path / LAYOUTS[1] / "segment-000000").exists()
    assert not (tmp_path / LAYOUTS[2]).exists()


def test_a_missing_directory_is_an_error_with_a_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        stored_layouts(tmp_path / "none")
