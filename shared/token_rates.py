"""Tokens a second of each worker, from the totals of its load reports. Pure."""

from __future__ import annotations

from collections.abc import Container

from msgspec import Struct

from shared.messages.load import LoadReport


class _Mark(Struct):
    tokens: int
    at_s: float
    per_s: float | None = None


class TokenRates:
    """The rates of all workers whose reports are shown. Times are seconds on the loop's clock."""

    def __init__(self) -> None:
        self._marks: dict[str, _Mark] = {}
        """Instance → what its last report said."""

    def update(self, report: LoadReport, at_s: float) -> float | None:
        """Return the tokens per second since the report before, given the last report and when it came; None without
        one before. A report that is given again changes nothing."""
        mark = self._marks.get(report.instance)
        if mark is None:
            self._marks[report.instance] = _Mark(report.output_tokens, at_s)
            return None
        if at_s > mark.at_s:
            mark.per_s = max(0, report.output_tokens - mark.tokens) / (at_s - mark.at_s)
            mark.tokens, mark.at_s = report.output_tokens, at_s
        return mark.per_s

    def forget_all_but(self, instances: Container[str]) -> None:
        """Forget the workers that are gone."""
        for gone in [each for each in self._marks if each not in instances]:
            del self._marks[gone]
