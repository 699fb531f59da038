"""docs/metrics.md is what the rows of all metrics make, and every registry's metrics are among them."""

from __future__ import annotations

import re

from tests.metric_names import every_metric
from tests.metrics_page import PAGE, written

DOCUMENT = PAGE.read_text(encoding="utf-8")
_LINE = re.compile(r"^\| `(headrace_\w+)` \| (\w+) \| (.*?) \| (.+?)\. \|", re.MULTILINE)


def test_the_page_is_what_its_program_writes() -> None:
    assert written(DOCUMENT) == DOCUMENT, "run `python -m tests.metrics_page`"


async def test_the_page_has_the_metrics_that_the_services_show() -> None:
    listed = sorted(
        (name, kind, tuple(re.findall(r"`(\w+)`", labels)), text)
        for name, kind, labels, text in _LINE.findall(DOCUMENT)
    )
    shown = sorted(
        (name, one.kind, one.labels, one.help.rstrip("."))
        for name, kinds in (await every_metric()).items()
        for one in kinds
    )
    assert listed == shown
