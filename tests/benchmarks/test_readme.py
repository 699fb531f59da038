"""benchmarks/README.md: each row says which code it was measured on, as its result's file does."""

from __future__ import annotations

import json
import re
from pathlib import Path

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
