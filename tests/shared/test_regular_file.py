from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.regular_file import Denied, open_regular_file, ownership_fault, read_regular_file


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


@pytest.mark.parametrize(
    ("mode", "denied", "allowed"),
    [
        (0o700, "open", True),
        (0o701, "open", False),
        (0o740, "open", False),
        (0o755, "open", False),
        (0o755, "write to", True),
        (0o775, "write to", False),
        (0o757, "write to", False),
        (0o777, "", True),
    ],
)
def test_the_mode_lets_others_do_only_what_is_not_denied(
    tmp_path: Path, mode: int, denied: Denied, allowed: bool
) -> None:
    tmp_path.chmod(mode)
    (tmp_path / "file").touch()
    (tmp_path / "file").chmod(mode)
    rule = f"must belong to this user, and no other user may {denied} it"
    told = "" if allowed else f"{rule}: it belongs to user {os.geteuid()} and has mode {mode:04o}"
    assert ownership_fault(tmp_path.stat(), "directory", denied) == told
    assert ownership_fault((tmp_path / "file").stat(), "file", denied) == told


def test_what_is_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    os.mkfifo(tmp_path / "pipe", 0o600)
    assert ownership_fault(tmp_path.stat(), "file", "open") == "is not a file"
    assert ownership_fault((tmp_path / "pipe").stat(), "file", "") == "is not a file"
    assert ownership_fault((tmp_path / "link").lstat(), "directory", "open") == "is not a directory"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_what_belongs_to_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch(mode=0o600)
    os.chown(tmp_path / "file", 12345, -1)
    about = (tmp_path / "file").stat()
    told = "must belong to this user: it belongs to user 12345 and has mode 0600"
    assert ownership_fault(about, "file", "") == told
    assert ownership_fault(about, "file", "open").startswith("must belong to this user, and no other user may open it")
