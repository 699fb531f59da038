"""Alarm for a source of which nothing is heard while requests flow: a wrong port, events switched off. Pure.

    heard ──a request computed new blocks, and no batch came in its time──▶ doubted ──again, `limit_s` later──▶ silent
      ▲                                                                        │                                  │
      └────────────────────────────── a batch is heard ────────────────────────┴──────────────────────────────────┘

A block that a request computed is told of before its first token is: a batch comes between the reservation and
the first token. So an idle source, and one whose prompts are all cached, is never doubted; and one lost batch is no
alarm, for it takes requests `limit_s` apart with nothing heard from the first to the last.
"""

from __future__ import annotations


class Silence:
    """Of one source. Times are seconds on a clock that only grows; with `limit_s` 0 nothing is silent."""

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._suspected_s: float | None = None
        """When the first request was prefilled of which no batch told."""
        self.heard_s: float | None = None
        """When the last batch came by itself; None: never."""
        self.silent = False

    def batch_received(self, now_s: float) -> None:
        """A batch came by itself."""
        self.heard_s = now_s
        self._suspected_s = None
        self.silent = False

    def prefill_seen(self, since_s: float, now_s: float) -> None:
        """A request that was reserved at `since_s` computed at least one full block, and has its first token now."""
        if not self._limit_s or (self.heard_s is not None and self.heard_s >= since_s):
            return
        if self._suspected_s is None:
            self._suspected_s = now_s
        self.silent = now_s - self._suspected_s >= self._limit_s

    def validate(self) -> None:
        """Assert every invariant."""
        assert not self.silent or self._suspected_s is not None
