"""Detects a source that sends no events while requests compute blocks there: a wrong port, or events disabled. Pure.

    heard ──a request computed new blocks, and no batch came──▶ suspected ──again, `limit_s` later──▶ silent
      ▲                                                             │                                   │
      └──────────────────────── a batch comes ──────────────────────┴───────────────────────────────────┘

A worker sends the events of a prompt's blocks before its first token, so a batch comes between the reservation and the
first token. An idle source, or one whose prompts are all cached, is therefore never suspected. One lost batch is not
enough either: it takes requests `limit_s` apart, and no batch from the first to the last of them.
"""

from __future__ import annotations


class Silence:
    """Detects whether one source is silent. Times are seconds on a monotonic clock; `limit_s` 0 disables it."""

    def __init__(self, *, limit_s: float) -> None:
        self._limit_s = limit_s
        self._suspected_s: float | None = None
        """When the first request was prefilled without a batch; None if there is none."""
        self.last_batch_s: float | None = None
        """When the last batch came by itself, not by replay; None if none came yet."""
        self.silent = False

    def batch_received(self, now_s: float) -> None:
        """Record a batch that came by itself."""
        self.last_batch_s = now_s
        self._suspected_s = None
        self.silent = False

    def prefill_seen(self, since_s: float, now_s: float) -> None:
        """Record a request, reserved at `since_s`, that computed at least one full block and has its first token
        now."""
        if not self._limit_s or (self.last_batch_s is not None and self.last_batch_s >= since_s):
            return
        if self._suspected_s is None:
            self._suspected_s = now_s
        self.silent = now_s - self._suspected_s >= self._limit_s

    def validate(self) -> None:
        """Assert every invariant."""
        assert not self.silent or self._suspected_s is not None
