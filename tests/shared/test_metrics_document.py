"""docs/metrics.md lists every metric that there is, as it is."""

from __future__ import annotations

import re
from pathlib import Path

from tests.metric_names import every_metric

DOCUMENT = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `(headrace_\w+)` \| (\w+) \| (.*?) \| (.*?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


async def test_the_page_and_the_code_have_the_same_metrics() -> None:
    listed = sorted(
        (name, kind, tuple(re.findall(r"`(\w+)`", labels))) for name, kind, labels, *_ in _ROW.findall(DOCUMENT)
    )
    there = sorted((name, one.kind, one.labels) for name, kinds in (await every_metric()).items() for one in kinds)
    assert listed == there


def test_a_unit_is_the_end_of_the_name() -> None:
    for name, _, _, unit, _, _ in _ROW.findall(DOCUMENT):
        if unit in ("seconds", "bytes", "tokens", "blocks"):
            assert name.removesuffix("_total").endswith(f"_{unit}")


async def test_every_metric_has_an_explanation_of_its_own() -> None:
    rows = _ROW.findall(DOCUMENT)
    assert all(meaning.strip(". ") and advice for *_, meaning, advice in rows)
