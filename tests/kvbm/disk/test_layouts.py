from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.kvbm.disk.format import disk_geometry
from services.kvbm.disk.layouts import make_room, stored_layouts
from tests.kvbm.disk_rig import RECORD_BYTES, content, running

LAYOUTS = [f"{number:016x}" for number in range(3)]
SEGMENT_BYTES = 4 * RECORD_BYTES


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
