"""The ways of the latest requests through the services, for the page at /ui. Pure.

    body complete ──▶ tokenised ──▶ selected ──▶ accepted ──▶ first token ──▶ ended
                      the Way begins              ▲ of the first attempt

A request keeps its Way while it runs, and the log keeps the latest ones. A session's events mark it by `note`; what has
no session, since its server takes text alone, marks it step by step. Times are seconds on the loop's clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from msgspec import Struct

from services.frontend.requests.session import Session, State
from shared.messages.frontends import RecentRequests, RequestWay
from shared.request_names import short_name

INSTANCES_KEPT = 8
"""Chosen workers that a Way keeps: the latest ones."""


WayCounts = tuple[int, tuple[int, int, int]]
"""Output tokens, and cached prompt tokens: all, in host memory, on disk."""


class Way(Struct):
    """The way of one request."""

    counts: Callable[[], WayCounts] | None
    """Returns the request's counts as of now. None once it has ended."""
    name: str
    model: str
    prompt_tokens: int
    received_s: float
    tokenised_s: float
    attempt: int = 0
    instances: tuple[str, ...] = ()
    selected_s: float | None = None
    accepted_s: float | None = None
    first_token_s: float | None = None
    ended_s: float | None = None
    outcome: str = ""
    output_tokens: int = 0
    cached_tokens: tuple[int, int, int] = (0, 0, 0)
    """Cached prompt tokens: all, in host memory, on disk."""

    def note(self, session: Session, now_s: float) -> None:
        """Record what the session has come to. Called after each of its events; most change nothing."""
        if self.counts is None or (self.first_token_s is not None and self.attempt == session.attempt):
            return
        if session.instance:
            self.choose(session.attempt, session.instance, now_s)
        if session.state is State.STREAMING:
            self.accept(now_s)
        if session.tokens:
            self.begin_output(now_s)

    def choose(self, attempt: int, instance: str, now_s: float) -> None:
        """Record the worker of an attempt. Idempotent, as what follows is."""
        if self.attempt != attempt or self.instances[-1:] != (instance,):
            self.attempt = attempt
            self.instances = (*self.instances, instance)[-INSTANCES_KEPT:]
            self.selected_s = now_s if self.selected_s is None else self.selected_s

    def accept(self, now_s: float) -> None:
        """Record that a worker has accepted it."""
        self.accepted_s = now_s if self.accepted_s is None else self.accepted_s

    def begin_output(self, now_s: float) -> None:
        """Record the first token, or the first bytes of an answer."""
        self.first_token_s = now_s if self.first_token_s is None else self.first_token_s

    def end(self, outcome: str, now_s: float) -> None:
        """Record the end, and let go of the request. Idempotent."""
        if self.counts is None:
            return
        self.output_tokens, self.cached_tokens = self.counts()
        self.outcome, self.ended_s, self.counts = outcome, now_s, None

    def message(self, now_s: float) -> RequestWay:
        """Return what other frontends and the page are given."""
        output_tokens, cached = (self.output_tokens, self.cached_tokens) if self.counts is None else self.counts()
        return RequestWay(
            name=self.name,
            model=self.model,
            age_s=round(now_s - self.received_s, 6),
            prompt_tokens=self.prompt_tokens,
            output_tokens=output_tokens,
            cached_tokens=cached[0],
            cached_host_tokens=cached[1],
            cached_disk_tokens=cached[2],
            attempt=self.attempt,
            instances=self.instances,
            tokenised_s=round(self.tokenised_s - self.received_s, 6),
            selected_s=self._after(self.selected_s),
            accepted_s=self._after(self.accepted_s),
            first_token_s=self._after(self.first_token_s),
            ended_s=self._after(self.ended_s),
            outcome=self.outcome,
        )

    def _after(self, at_s: float | None) -> float | None:
        return None if at_s is None else round(at_s - self.received_s, 6)


def session_counts(session: Session) -> WayCounts:
    """Return the counts of a session as of now."""
    cached = (session.cached_tokens, session.cached_host_tokens, session.cached_disk_tokens)
    return len(session.tokens), cached


class WayLog:
    """The ways of the latest requests of one frontend, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ways: deque[Way] = deque(maxlen=limit)
        self._begun = 0
        self._passing = 0
        """Requests that run and have no session."""

    def begin(
        self,
        request: str,
        model: str,
        prompt_tokens: int,
        counts: Callable[[], WayCounts],
        received_s: float,
        now_s: float,
        *,
        passes: bool = False,
    ) -> Way:
        """Add a request whose prompt is tokenised, and return its Way; at the limit the oldest one is forgotten. One
        that `passes` has no session, and `end_passing` follows."""
        self._passing += passes
        self._begun += 1
        way = Way(counts, short_name(request), model, prompt_tokens, min(received_s or now_s, now_s), now_s)
        self._ways.append(way)
        return way

    def end_passing(self, way: Way, outcome: str, now_s: float) -> None:
        """Record the end of a request that passes."""
        self._passing -= 1
        way.end(outcome, now_s)

    def report(self, frontend: str, arriving: int, streams: int, now_s: float) -> RecentRequests:
        """Return the log as a message; the counts are those of the whole frontend, `streams` those with a session."""
        running, ways = streams + self._passing, [way.message(now_s) for way in self._ways]
        return RecentRequests(frontend, arriving, running, self._begun, ways)

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._ways) <= self._limit
        assert 0 <= self._passing <= self._begun
        for way in self._ways:
            assert (way.counts is None) == (way.ended_s is not None)
            assert len(way.instances) <= INSTANCES_KEPT
            times = (way.tokenised_s, way.selected_s, way.accepted_s, way.first_token_s, way.ended_s)
            known = [way.received_s, *(each for each in times if each is not None)]
            assert known == sorted(known)
