"""services/worker/vllm/interface.py: what a vLLM lacks is found in its sources."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from services.worker.vllm.interface import missing_names
from services.worker.vllm.used_names import Used
from tests.vllm_interface import lacks, main
from tests.worker.vllm.environment import PYTHON, needs_vllm

TABLE = {
    "vllm.config:Config": Used(passes=("size", "kind"), reads=("shape", "limit")),
    "vllm.engine:Engine": Used(
        passes=("config", "/"),
        reads=("config", "errored", "dead"),
        calls={"make": ("config", "/"), "add": ("name", "prompt", "/", "rank"), "get": ()},
        overrides={"record": ("stats", "rank")},
    ),
    "vllm.engine:compile": Used(passes=("text", "/", "strict")),
    "vllm.envs:variables": Used(reads=("VLLM_X",)),
}
GOOD = {
    "__init__.py": "",
    "config/__init__.py": "from .parts import Config",
    "config/parts.py": "class Base:\n  kind: str\n  limit = 3\n"
    "class Config(Base):\n  size: int\n  @property\n  def shape(self): ...",
    "base.py": "from typing import Generic\nclass Base(Generic):\n  def __init__(self, config):\n"
    "    self.config, self.dead = config, None\n"
    "  async def get(self): ...\n  def record(self, stats, rank=0, **more): ...",
    "engine.py": "import typing\nif typing.TYPE_CHECKING:\n  from vllm.base import Base\n"
    "class Engine(Base[int]):\n  errored = False\n  @classmethod\n  def make(cls, config): ...\n"
    "  async def add(self, name, prompt, *, rank=None, more=None): ...\n"
    "try:\n  def compile(text, *, strict): ...\nexcept ImportError: ...",
    "envs.py": "variables = {'VLLM_X': lambda: 1}",
}


def tree(directory: Path, **changed: tuple[str, str]) -> Path:
    """Write a made-up vLLM. `changed` has a file's name without its end, and what is replaced in it by what."""
    for name, text in GOOD.items():
        file = directory / "vllm" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        before, after = changed.get(file.stem, ("", ""))
        assert before in text
        file.write_text(text.replace(before, after) if before else text)
    return directory


def test_what_has_all_names_lacks_nothing(tmp_path: Path) -> None:
    assert missing_names(TABLE, tree(tmp_path)) == []


@pytest.mark.parametrize(
    ("file", "before", "after", "fault"),
    [
        ("engine", "rank=None", "dp_rank=None", "vllm.engine.Engine.add has no parameter rank"),
        ("engine", "name, prompt", "prompt, name", "vllm.engine.Engine.add has no parameter name at place 1"),
        ("engine", "prompt, *,", "*, prompt,", "vllm.engine.Engine.add has no parameter prompt at place 2"),
        ("engine", "def make", "def build", "vllm.engine.Engine has no method make"),
        ("engine", "errored", "failed", "vllm.engine.Engine has no attribute errored"),
        ("engine", "strict", "loose", "vllm.engine.compile has no parameter strict"),
        ("engine", "compile", "parse", "there is no vllm.engine.compile"),
        ("engine", "(Base[int])", "", "vllm.engine.Engine has no method get"),
        ("base", "rank=0", "rank=0, kind=0", "vllm.engine.Engine.record takes ['stats', 'rank', 'kind'], not "),
        ("base", "self.dead", "self.end", "vllm.engine.Engine has no attribute dead"),
        ("base", "self, config)", "self, settings)", "vllm.engine.Engine has no parameter config at place 1"),
        ("parts", "kind: str", "sort: str", "vllm.config.Config has no parameter kind"),
        ("parts", "class Config", "class Settings", "there is no vllm.config.Config"),
        ("parts", "size: int", "size: ", "there is no vllm.config.Config"),
        ("envs", "VLLM_X", "VLLM_Y", "vllm.envs.variables has no VLLM_X"),
    ],
)
def test_what_is_missing_is_named(file: str, before: str, after: str, fault: str, tmp_path: Path) -> None:
    faults = missing_names(TABLE, tree(tmp_path, **{file: (before, after)}))
    assert any(each.startswith(fault) for each in faults), faults


def test_a_module_that_is_gone_is_named_and_names_that_import_each_other_end(tmp_path: Path) -> None:
    (tree(tmp_path) / "vllm" / "envs.py").unlink()
    (tmp_path / "vllm" / "config" / "parts.py").write_text("from vllm.config import Config")
    assert missing_names(TABLE, tmp_path) == ["there is no vllm.config.Config", "there is no module vllm.envs"]


def test_a_wheel_is_read_as_a_directory_is_and_the_program_fails_if_anything_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = tmp_path / "vllm-0.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, text in GOOD.items():
            archive.writestr(f"vllm/{name}", text)
    assert missing_names(TABLE, zipfile.Path(wheel)) == []
    assert lacks(wheel) == lacks(tree(tmp_path))
    assert main([str(wheel)]) == 1
    assert "there is no module vllm.v1.engine.async_llm" in capsys.readouterr().out
    assert main([]) == 2


@needs_vllm
def test_the_installed_vllm_has_all_names_that_we_use() -> None:
    (packages,) = PYTHON.parents[1].glob("lib/python3.*/site-packages")
    assert lacks(packages) == []
