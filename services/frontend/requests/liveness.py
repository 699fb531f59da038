"""Judges attempts that have gone quiet by their workers' load reports. Pure.

    an attempt's last sign of life        now
    ──────────┼──────── quiet ─────────────┤
              the worker's reports meanwhile:
                name it, progress grows     it is computed, or waits: nothing to do
                do not name it              it has ended, and its last part was lost on the way: `ended`
                name it, progress stands    the engine is frozen: `frozen`, after `frozen_s`
                none for `quiet_s`          the worker has to be pinged: `silent`; after `frozen_s` it is `frozen`

A wrong verdict costs a new attempt elsewhere and never a token: parts of the old attempt are dropped.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from shared.messages.load import LoadReport

LivenessVerdict = Literal["alive", "ended", "frozen", "silent"]


class _LastReport(Struct):
    heard_s: float
    """When the latest report came."""
    moved_s: float
    """When `progress` last changed, or first came."""
    progress: int
    attempts: frozenset[tuple[str, int]]


class Liveness:
    """The latest report of each worker; the caller forgets workers that are gone. Times are seconds on one clock."""

    def __init__(self, *, quiet_s: float, frozen_s: float) -> None:
        self._quiet_s = quiet_s
        self._frozen_s = frozen_s
        self._reports: dict[str, _LastReport] = {}
        self._excused_s = float("-inf")

    def report_received(self, report: LoadReport, now_s: float) -> None:
        """Record a worker's load report."""
        before = self._reports.get(report.instance)
        stands = before is not None and before.progress == report.progress
        moved_s = before.moved_s if before is not None and stands else now_s
        self._reports[report.instance] = _LastReport(now_s, moved_s, report.progress, frozenset(report.attempts))

    def forget(self, instance: str) -> None:
        """Forget a worker that is gone."""
        self._reports.pop(instance, None)

    def excuse_silence(self, now_s: float) -> None:
        """Excuse all silence up to now, because no message could arrive."""
        self._excused_s = now_s

    def judge(self, instance: str, attempt: tuple[str, int], last_sign_s: float, now_s: float) -> LivenessVerdict:
        """Return what became of an attempt at `instance` that gave its last sign of life at `last_sign_s`."""
        since_s = max(last_sign_s, self._excused_s)
        if now_s - since_s < self._quiet_s:
            return "alive"
        pulse = self._reports.get(instance)
        heard_s = since_s if pulse is None else max(pulse.heard_s, since_s)
        if pulse is None or now_s - heard_s >= self._quiet_s:
            return "frozen" if now_s - heard_s >= self._frozen_s else "silent"
        if attempt not in pulse.attempts:
            # A report that was sent before the attempt arrived would not name it either.
            return "ended" if pulse.heard_s - since_s >= self._quiet_s else "alive"
        return "frozen" if now_s - max(pulse.moved_s, since_s) >= self._frozen_s else "alive"
