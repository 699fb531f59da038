from __future__ import annotations

import logging
from pathlib import Path

import msgspec
import pytest

from services.worker.transfer.path_choice import PathTiming
from services.worker.transfer.path_table import TableKey, read_table, write_table

KEY = TableKey(
    gpu="NVIDIA H200",
    driver="13000",
    cupy="14.2.0",
    fragments=64,
    fragment_bytes=4096,
    even=True,
    blocks=(1, 8),
    paths=("rows", "staged"),
)
MEASURED = [
    PathTiming(path, loads, blocks, 1e-6 * blocks, 1e-7)
    for path in KEY.paths
    for loads in (False, True)
    for blocks in KEY.blocks
]


def test_a_table_is_read_only_with_the_key_it_was_written_with(tmp_path: Path) -> None:
    directory = tmp_path / "not" / "there yet"
    assert read_table(directory, KEY) is None
    write_table(directory, KEY, MEASURED)
    assert read_table(directory, KEY) == MEASURED
    for other in ({"gpu": "another"}, {"driver": "13010"}, {"even": False}, {"blocks": (1,)}, {"paths": ("rows",)}):
        assert read_table(directory, msgspec.structs.replace(KEY, **other)) is None
    assert len(list(directory.iterdir())) == 1, "something was left beside it"


def test_after_a_failed_path_nothing_is_kept_and_the_next_start_measures_again(tmp_path: Path) -> None:
    write_table(tmp_path, KEY, [row for row in MEASURED if row.path == "rows"])
    assert not list(tmp_path.iterdir())
    assert read_table(tmp_path, KEY) is None


@pytest.mark.parametrize(
    "wrong",
    [
        MEASURED[1:],
        [*MEASURED[:-1], msgspec.structs.replace(MEASURED[-1], took_s=0.0)],
    ],
)
def test_an_incomplete_table_is_not_used(tmp_path: Path, wrong: list[PathTiming]) -> None:
    write_table(tmp_path, KEY, wrong)
    assert read_table(tmp_path, KEY) is None


def test_a_file_torn_anywhere_is_not_used_and_written_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_table(tmp_path, KEY, MEASURED)
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    for size in range(0, len(whole) - 1, 7):
        file.write_bytes(whole[:size])
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            assert read_table(tmp_path, KEY) is None
        assert len(caplog.records) == 1
    write_table(tmp_path, KEY, MEASURED)
    assert read_table(tmp_path, KEY) == MEASURED


@pytest.mark.parametrize("other", [b"\xff\xfe", b"{}", b"[1]", b'{"key": 1}', b"null"])
def test_a_file_with_other_content_is_not_used(tmp_path: Path, other: bytes) -> None:
    write_table(tmp_path, KEY, MEASURED)
    [file] = tmp_path.iterdir()
    file.write_bytes(other)
    assert read_table(tmp_path, KEY) is None


def test_another_keys_file_under_this_ones_name_is_not_used(tmp_path: Path) -> None:
    write_table(tmp_path, msgspec.structs.replace(KEY, gpu="another"), MEASURED)
    write_table(tmp_path, KEY, MEASURED)
    [one, other] = tmp_path.iterdir()
    contents = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(contents)
    assert read_table(tmp_path, KEY) is None


def test_a_directory_that_cannot_be_written_is_logged_and_nothing_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.WARNING):
        write_table(tmp_path / "file", KEY, MEASURED)
        assert read_table(tmp_path / "file", KEY) is None
    assert "cannot be kept" in caplog.records[0].message
