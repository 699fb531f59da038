"""Files with arguments of vLLM."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.errors import ConfigError
from shared.vllm_args import FILE_LIMIT_BYTES, read_file


def test_a_file_is_a_table(tmp_path: Path) -> None:
    file = tmp_path / "args.yaml"
    file.write_text("tensor-parallel-size: 2\n", encoding="utf-8")
    assert read_file(str(file)) == {"tensor-parallel-size": 2}
    file.write_text("", encoding="utf-8")
    assert read_file(str(file)) == {}
    assert read_file("") == {}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"- a\n", "not a table of arguments"),
        (b"a: [\n", "while parsing"),
        (b"\xff\xfe\xff", "vllm_args: "),
        (b"seed: 2024-13-45\n", "month must be in"),
        (b"a: " + b"[" * 3000 + b"]" * 3000, "nested too deep"),
        (b"a: &a [1, 1]\nb: [*a, *a]\n", r"aliases \(\*name\) are not read"),
        (b"#" * (FILE_LIMIT_BYTES + 1), "has more than 1048576 bytes"),
    ],
)
def test_other_files_are_refused(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "args.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=said):
        read_file(str(file))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"vllm_args: .*none\.yaml: No such file"):
        read_file(str(tmp_path / "none.yaml"))
