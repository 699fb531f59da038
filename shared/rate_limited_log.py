"""What came from others and could not be read: every one counted, and one line in the log a minute at most."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

COMPLAIN_INTERVAL_S = 60.0

_log = logging.getLogger(__name__)


@dataclass
class Tally:
    """The sum over many complaints, those that are over included."""

    count: int = 0


class RateLimitedLog:
    """About one source. `what` begins its lines in the log; `tally` counts with it."""

    def __init__(self, what: str, tally: Tally | None = None) -> None:
        self._what = what
        self._tally = Tally() if tally is None else tally
        self._logged_at_s: float | None = None
        self.count = 0

    def add(self, wrong: object, count: int = 1) -> None:
        """`count` more; `wrong` says what is wrong with the latest. Within a running event loop."""
        self.count += count
        self._tally.count += count
        now_s = asyncio.get_running_loop().time()
        if self._logged_at_s is None or now_s - self._logged_at_s >= COMPLAIN_INTERVAL_S:
            self._logged_at_s = now_s
            _log.warning("%s (%d so far, told once a minute): %s", self._what, self.count, wrong)
