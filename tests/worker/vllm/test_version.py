"""A vLLM of another version is refused by what it lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.worker.vllm.used_names import Used
from services.worker.vllm.version import check
from shared.errors import ConfigError

TABLE = {"vllm.engine:Engine": Used(calls={"add": ("request", "/", "rank")})}


@pytest.mark.parametrize("version", ["0.32.0", "0.33.0+cpu"])
def test_a_promised_version_starts(version: str, tmp_path: Path) -> None:
    check(version, table=TABLE, root=tmp_path)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("", ": there is no vllm.engine.Engine"),
        ("class Engine:\n  def add(self, request): ...", ": vllm.engine.Engine.add has no parameter rank"),
        ("class Engine:\n  def add(self, request, rank=0): ...", ""),
    ],
)
def test_another_one_is_refused_by_what_it_lacks_and_else_by_its_version(source: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "engine.py").write_text(source)
    with pytest.raises(ConfigError) as wrong:
        check("0.29.0", "this worker", TABLE, tmp_path)
    works = "this worker works with 0.32 and 0.33: ./headrace install-vllm"
    assert str(wrong.value) == f"vLLM 0.29.0 is not supported{why}; {works}"
