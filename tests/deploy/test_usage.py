"""deploy/local/usage.py, and the flags of every program of this repository."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from deploy.local.cli import main
from deploy.local.usage import parse

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("words", [["up", "--worker", "3"], ["status", "--js"], ["bench", "--con", "1"], ["--vers"]])
def test_a_part_of_a_flags_name_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert words[-2 if words[-1].isdigit() else -1] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["up", "--worker", "3"],
            "headrace up: error: unrecognized: --worker 3; did you mean --workers?",
        ),
        (
            ["up", "--host", "0.0.0.0"],
            "headrace up: error: unrecognized: --host 0.0.0.0; did you mean --set frontend.http.host=ADDRESS?",
        ),
        (
            ["route", "http://a", "--api-key=k"],
            "headrace route: error: unrecognized: --api-key=k; did you mean --keys FILE?",
        ),
        (
            ["lora", "unload", "sql", "more"],
            "headrace lora unload: error: unrecognized: more; `headrace lora unload --help` says what it takes",
        ),
    ],
)
def test_what_a_command_does_not_take_is_one_line_of_that_command(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        parse(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines() == [said]


def test_no_program_of_this_repository_takes_a_part_of_a_flags_name() -> None:
    found = 0
    for directory in ("benchmarks", "deploy", "services", "shared", "tests"):
        for file in (ROOT / directory).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ArgumentParser"):
                    found += 1
                    assert "allow_abbrev=False" in ast.unparse(node), f"{file}:{node.lineno}"
    assert found > 30


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_of_flags_that_cannot_be_read_is_refused_with_what_is_meant(
    content: bytes | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "plan.up"
    if content is not None:
        file.write_bytes(content)
    assert main(["up", f"@{file}"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    why = "not text" if content else "No such file or directory"
    assert line.startswith(f"error: up @{file}: {why}; @FILE names a file with a flag or a value of `up` in each line")
    assert "--model DIRECTORY, FILE.gguf or ORG/NAME" in line
