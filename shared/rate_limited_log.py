"""Log lines about input from outside: each key has at most one line in an interval.

Other processes decide how often such a problem occurs, so a flood of them must not fill the log.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable

INTERVAL_S = 60.0
KEYS_LIMIT = 1024
"""At most this many keys are remembered. Beyond it the one that was logged longest ago is forgotten."""

_log = logging.getLogger(__name__)


class RateLimitedLog:
    """Counts problems, and logs each key's problems at most once in `interval_s`."""

    def __init__(self, interval_s: float = INTERVAL_S, clock: Callable[[], float] | None = None) -> None:
        """Without a `clock` that of the running event loop is used."""
        self._interval_s = interval_s
        self._clock = clock
        self._keys: dict[str, tuple[int, float]] = {}
        """Key → its problems so far, and when one was logged; the key that was logged longest ago is first."""
        self.count = 0
        """The problems of all keys so far."""

    def warn(self, key: str, problem: object, count: int = 1) -> None:
        """Count `count` problems of `key`. Log a warning with `key` and `problem` if a line of the key is due."""
        self._add(logging.WARNING, key, problem, count)

    def error(self, key: str, problem: object) -> None:
        """Count one problem of `key`. Log an error with `key` and `problem` if a line of the key is due."""
        self._add(logging.ERROR, key, problem, 1)

    def reset(self, key: str) -> bool:
        """Forget `key`, so that its next problem is logged at once. Return whether it had any."""
        return self._keys.pop(key, None) is not None

    def _add(self, level: int, key: str, problem: object, count: int) -> None:
        self.count += count
        now_s = self._clock() if self._clock is not None else asyncio.get_running_loop().time()
        so_far, logged_at_s = self._keys.get(key, (0, -math.inf))
        so_far += count
        if now_s - logged_at_s < self._interval_s:
            self._keys[key] = so_far, logged_at_s
            return
        self._keys.pop(key, None)
        self._keys[key] = so_far, now_s
        if len(self._keys) > KEYS_LIMIT:
            del self._keys[next(iter(self._keys))]
        _log.log(level, "%s: %s (seen %d times; logged every %g s at most)", key, problem, so_far, self._interval_s)
