"""deploy/local/size/files.py: files that flags name."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from deploy.local.size.files import check_parent, read_given
from shared.errors import ConfigError


def test_a_file_at_the_limit_is_read_and_a_larger_one_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"12345")
    assert read_given(file, 5) == b"12345"
    with pytest.raises(ConfigError, match=r"^--trace .*/a: larger than 4 bytes$"):
        read_given(file, 4, "--trace")


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"x" * 100_000,))
    writer.start()
    assert read_given(pipe, 1 << 20) == b"x" * 100_000
    writer.join()


def test_what_is_no_file_and_a_file_without_a_directory_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r": Is a directory$"):
        read_given(tmp_path, 5)
    with pytest.raises(ConfigError, match=r"^--out .*: no such directory: "):
        check_parent("--out", tmp_path / "none" / "a")
    check_parent("--out", "a")
