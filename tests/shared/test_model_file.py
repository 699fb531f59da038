"""Files of a model's directory that are irregular, endless, too long or nested: the error names each at once."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shared.errors import ModelError
from shared.model_file import CONFIG_LIMIT_BYTES, open_model_file, read_model_file, read_model_json


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_directory(path: Path) -> None:
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.symlink_to(path)


def make_long(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 40)  # sparse: no disk is written


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (make_pipe, "not a regular file"),
        (link_to_device, "not a regular file"),
        (make_directory, "not a regular file"),
        (link_to_itself, "Too many levels of symbolic links"),
        (make_long, f"{1 << 40} bytes; at most {CONFIG_LIMIT_BYTES} are read"),
        (lambda _: None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_read_whole_is_named_at_once(
    tmp_path: Path, make: Callable[[Path], None], complaint: str
) -> None:
    make(tmp_path / "config.json")
    with pytest.raises(ModelError, match=re.escape(f"{tmp_path / 'config.json'}: {complaint}")):
        read_model_file(tmp_path / "config.json", CONFIG_LIMIT_BYTES)


def test_a_file_of_just_the_limit_is_read(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    assert read_model_file(tmp_path / "x", 4) == b"1234"
    with pytest.raises(ModelError, match="x: 4 bytes; at most 3 are read"):
        read_model_file(tmp_path / "x", 3)


def test_a_file_that_is_longer_than_it_says_is_read_up_to_the_limit_alone() -> None:
    with pytest.raises(ModelError, match="/proc/self/maps: 11 bytes; at most 10 are read"):
        read_model_file(Path("/proc/self/maps"), 10)


def test_a_file_that_may_be_missing_has_a_content_then(tmp_path: Path) -> None:
    assert read_model_file(tmp_path / "none", 10, missing=b"{}") == b"{}"
    assert read_model_json(tmp_path / "no" / "none", dict[str, Any], missing=b"{}") == {}
    make_pipe(tmp_path / "pipe")
    with pytest.raises(ModelError, match="pipe: not a regular file"):
        read_model_file(tmp_path / "pipe", 10, missing=b"{}")


def test_json_that_is_nested_too_deeply_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}")
    with pytest.raises(ModelError, match=r"x\.json: nested too deeply"):
        read_model_json(tmp_path / "x.json", dict[str, Any])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "not JSON: Input"),
        (b"{", "not JSON: Input"),
        (b"nope", "not JSON: invalid"),
        (b"[]", "Expected `object`"),
        (b"\xff\xfe", "not JSON: invalid"),
        (b'{"\xff": 1}', "not JSON: not UTF-8"),
    ],
)
def test_json_that_is_none_is_named(tmp_path: Path, content: bytes, said: str) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(ModelError, match=rf"x\.json: {said}"):
        read_model_json(tmp_path / "x.json", dict[str, Any])


def test_an_opened_file_is_at_its_start_and_a_path_may_be_any_text(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"1234")
    with open_model_file(tmp_path / "x") as file:
        assert file.read(2) == b"12"
    with pytest.raises(ModelError, match="null byte"):
        open_model_file(Path("no\0where"))
