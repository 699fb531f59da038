"""Warnings that come at most once a minute for each subject, so that a flood of bad input does not fill the log."""

from __future__ import annotations

import logging
from collections.abc import Callable

_EVERY_S = 60.0
_SUBJECTS = 1024

_log = logging.getLogger(__name__)


class Seldom:
    """Remembers what was said lately, of a bounded number of subjects. `now` is a clock that only grows, in seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._said: dict[str, float] = {}

    def warn(self, subject: str, problem: object) -> None:
        """Log `problem` of `subject`, unless one was logged within the last minute."""
        now_s = self._now()
        if now_s - self._said.get(subject, -_EVERY_S) < _EVERY_S:
            return
        self._said.pop(subject, None)
        self._said[subject] = now_s
        if len(self._said) > _SUBJECTS:
            del self._said[next(iter(self._said))]
        _log.warning("%s: %s (said once a minute)", subject, problem)
