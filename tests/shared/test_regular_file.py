from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.regular_file import open_regular_file, read_regular_file


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"12345")
    assert read_regular_file(tmp_path / "file", 5) == b"12345"
    with pytest.raises(OSError, match="larger than 4 bytes"):
        read_regular_file(tmp_path / "file", 4)


@pytest.mark.parametrize("kind", ["a pipe", "a directory", "a device"])
def test_what_is_not_a_regular_file_is_refused_without_waiting(tmp_path: Path, kind: str) -> None:
    path = {"a pipe": tmp_path / "pipe", "a directory": tmp_path, "a device": Path("/dev/zero")}[kind]
    if kind == "a pipe":
        os.mkfifo(path)
    with pytest.raises(OSError, match="not a regular file"):
        open_regular_file(path)


def test_a_missing_file_and_a_path_that_none_can_have_are_errors_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_regular_file(tmp_path / "gone")
    with pytest.raises(OSError, match="null byte"):
        open_regular_file(Path("a\0b"))
