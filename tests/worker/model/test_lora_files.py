"""services/worker/model/lora_files.py"""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from services.worker.model import lora_files
from services.worker.model.lora_files import CONFIG, FILES, TENSORS, check_files, digest_lora
from shared.errors import ModelError


@pytest.fixture
def lora(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).write_bytes(name.encode())
    return tmp_path


def test_the_digest_is_of_the_contents_of_both_files_and_of_nothing_else(lora: Path) -> None:
    before = digest_lora(lora)
    assert len(before) == 64
    (lora / "README.md").write_text("another file", encoding="utf-8")
    assert digest_lora(lora) == before
    for name in FILES:
        content = (lora / name).read_bytes()
        (lora / name).write_bytes(content[:-1] + b"?")
        assert digest_lora(lora) != before
        (lora / name).write_bytes(content)
    assert digest_lora(lora) == before


def test_a_byte_that_moves_from_one_file_to_the_other_makes_another_digest(lora: Path) -> None:
    before = digest_lora(lora)
    first, second = (lora / name for name in FILES)
    moved = first.read_bytes()
    first.write_bytes(moved[:-1])
    second.write_bytes(moved[-1:] + second.read_bytes())
    assert digest_lora(lora) != before


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_not_there_is_named(lora: Path, name: str) -> None:
    (lora / name).unlink()
    with pytest.raises(ModelError, match=f"^path: {lora / name} is not there$"):
        digest_lora(lora)


def test_a_pickle_is_not_read_and_the_error_says_what_to_do(lora: Path) -> None:
    (lora / "adapter_model.safetensors").rename(lora / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin is a pickle, save it as safetensors"):
        digest_lora(lora)


def test_a_path_that_is_no_directory_is_refused(lora: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory that this worker sees"):
        digest_lora(lora / FILES[0])


def test_what_the_operating_system_refuses_is_an_error_of_the_path(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"^path: .*: File name too long$"):
        digest_lora(tmp_path / ("a" * 300))
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    with pytest.raises(ModelError, match=r"^path: "):
        digest_lora(tmp_path / "circle")


def test_a_file_that_is_too_large_is_not_read(lora: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lora_files, "LIMIT_BYTES", 10)
    with pytest.raises(ModelError, match=r"adapter_config\.json has 19 bytes; at most 10 are read"):
        digest_lora(lora)


def test_a_file_whose_size_is_not_what_was_read_is_being_written(tmp_path: Path) -> None:
    # A file of the kernel: it has 0 bytes by its size, and more when it is read, as one that has just been appended to.
    (tmp_path / "adapter_config.json").symlink_to("/proc/self/status")
    with pytest.raises(ModelError, match="is being written; try again when it is complete"):
        digest_lora(tmp_path)


def write_tensors(file: Path, shape: list[int], size_bytes: int, behind: int = 0) -> None:
    """A sparse file with one tensor of bfloat16, whose header says `size_bytes`, and `behind` bytes more."""
    entry = {"dtype": "BF16", "shape": shape, "data_offsets": [0, size_bytes]}
    header = json.dumps({"t": entry}).encode()
    with file.open("wb") as opened:
        opened.write(len(header).to_bytes(8, "little") + header)
        opened.truncate(8 + len(header) + size_bytes + behind)


def test_what_fits_passes_the_check(lora: Path) -> None:
    write_tensors(lora / TENSORS, [8, 4], 64)
    check_files(lora)
    check_files(lora, 128)


def test_tensors_that_take_more_than_the_limit_as_float32_are_refused_unread(lora: Path) -> None:
    write_tensors(lora / TENSORS, [1 << 15, 1 << 16], 1 << 32)
    check_files(lora, 1 << 33)
    with pytest.raises(ModelError, match=r"^path: .*: 8589934592 bytes as float32; lora_bytes allows 536870912"):
        check_files(lora, 512 << 20)


@pytest.mark.parametrize(
    ("shape", "size_bytes", "behind", "said"),
    [
        ([8, 4], 64, 2 << 30, "torn: the header lists 64 bytes of tensors, the file has 2147483712"),
        ([8, 4], 32, 0, "the header is inconsistent at t"),
        ([1 << 40, 1 << 40], 64, 0, "the header is inconsistent at t"),
    ],
)
def test_a_header_that_does_not_fit_its_file_is_refused_unread(
    lora: Path, shape: list[int], size_bytes: int, behind: int, said: str
) -> None:
    write_tensors(lora / TENSORS, shape, size_bytes, behind)
    with pytest.raises(ModelError, match=rf"^path: .*{said}"):
        check_files(lora)


@pytest.mark.parametrize(
    ("name", "size_bytes", "said"),
    [
        (CONFIG, (1 << 20) + 1, "adapter_config.json has 1048577 bytes; at most 1048576 are read"),
        (TENSORS, (8 << 30) + 1, "adapter_model.safetensors has 8589934593 bytes; at most 8589934592 are read"),
        (TENSORS, 8 << 30, r"torn or not a safetensors file \(8589934592 bytes\)"),
        (TENSORS, 0, r"torn or not a safetensors file \(0 bytes\)"),
    ],
)
def test_a_file_of_a_wrong_size_is_refused_unread(lora: Path, name: str, size_bytes: int, said: str) -> None:
    with (lora / name).open("wb") as opened:
        opened.truncate(size_bytes)
    with pytest.raises(ModelError, match=f"^path: .*{said}$"):
        check_files(lora)


def test_a_missing_file_and_no_directory_are_refused_by_the_check_too(lora: Path) -> None:
    with pytest.raises(ModelError, match="is not a directory that this worker sees"):
        check_files(lora / CONFIG)
    (lora / TENSORS).rename(lora / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin is a pickle, save it as safetensors"):
        check_files(lora)


def test_a_digest_that_is_no_longer_wanted_ends(lora: Path) -> None:
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(ModelError, match="is no longer wanted"):
        digest_lora(lora, given_up)
