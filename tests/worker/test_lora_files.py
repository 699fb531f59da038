"""services/worker/lora_files.py"""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker import lora_files
from services.worker.lora_files import FILES, digest_lora
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
    with pytest.raises(ModelError, match="has 0 MiB; at most 0 are read"):
        digest_lora(lora)


def test_a_file_whose_size_is_not_what_was_read_is_being_written(tmp_path: Path) -> None:
    # A file of the kernel: it has 0 bytes by its size, and more when it is read, as one that has just been appended to.
    (tmp_path / "adapter_config.json").symlink_to("/proc/self/status")
    with pytest.raises(ModelError, match="is being written; try again when it is complete"):
        digest_lora(tmp_path)
