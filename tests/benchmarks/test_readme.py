"""benchmarks/README.md: each row says which code it was measured on, as its result's file does."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def test_each_row_has_the_commit_of_a_result_that_its_benchmark_wrote() -> None:
    results = {file.stem: json.loads(file.read_text())["commit"][:7] for file in BENCHMARKS.glob("results/*.json")}
    text, _, on_a_gpu = (BENCHMARKS / "README.md").read_text(encoding="utf-8").partition("## On a GPU")
    shown: set[str] = set()
    for part, prefix in ((text, ""), (on_a_gpu, "gpu_")):
        rows = [line.strip("| ").split(" | ") for line in part.splitlines() if re.match(r"\| (?!question|---)", line)]
        assert rows
        for row in rows:
            commits = row[-1].split("; ")
            shown |= {*commits}
            assert {*commits} <= {*results.values()}, row[0]
            named = re.match(r"`(\w+)`", row[0])
            if named is not None and (benchmark := prefix + named[1]) in results:
                assert results[benchmark] in commits, row[0]
    assert shown == {commit for name, commit in results.items() if name != "gpu_raw"}, "a result without its row"


def test_each_commit_of_a_result_is_in_the_history() -> None:
    if git("rev-parse", "--is-shallow-repository").strip() != "false":
        pytest.skip("no git, no checkout, or one without its history")
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    commits = {json.loads(file.read_text())["commit"] for file in BENCHMARKS.glob("results/*.json")}
    commits |= set(re.findall(r"\b(?=[0-9a-f]*\d)(?=[0-9a-f]*[a-f])[0-9a-f]{7,8}\b", text))
    known = git("log", "--format=%H", "HEAD").split()
    assert {commit for commit in commits if not any(each.startswith(commit) for each in known)} == set()


def git(*words: str) -> str:
    try:
        return subprocess.run(
            ["git", "-C", str(BENCHMARKS), *words], capture_output=True, text=True, check=False
        ).stdout
    except FileNotFoundError:
        return ""
