"""The ways of the latest requests through the services, for the page at /ui. Pure.

    body complete ──▶ tokenised ──▶ selected ──▶ accepted ──▶ first token ──▶ ended
                      the Way begins              ▲ of the first attempt

A request keeps its Way while it runs, and the log keeps the latest ones. Times are seconds on the loop's clock.
"""

from __future__ import annotations

from collections import deque

from msgspec import Struct

from services.frontend.requests.session import Session, State
from shared.messages.frontends import RecentRequests, RequestWay
from shared.request_names import short_name

INSTANCES_KEPT = 8
"""Chosen workers that a Way keeps: the latest ones."""


class Way(Struct):
    """The way of one request."""

    session: Session | None
    """The request's states, while it runs."""
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

    def note(self, now_s: float) -> None:
        """Record what the session has come to. Called after each of its events; most change nothing."""
        session = self.session
        if session is None or (self.first_token_s is not None and self.attempt == session.attempt and self.instances):
            return
        if session.instance and (self.attempt != session.attempt or self.instances[-1:] != (session.instance,)):
            self.attempt = session.attempt
            self.instances = (*self.instances, session.instance)[-INSTANCES_KEPT:]
            self.selected_s = now_s if self.selected_s is None else self.selected_s
        if self.accepted_s is None and session.state is State.STREAMING:
            self.accepted_s = now_s
        if self.first_token_s is None and session.tokens:
            self.first_token_s = now_s

    def end(self, outcome: str, now_s: float) -> None:
        """Record the end, and let go of the session. Idempotent."""
        if self.session is None:
            return
        self.note(now_s)
        self.output_tokens, self.cached_tokens = _counts(self.session)
        self.outcome, self.ended_s, self.session = outcome, now_s, None

    def message(self, now_s: float) -> RequestWay:
        """Return what other frontends and the page are given."""
        output_tokens, cached = (self.output_tokens, self.cached_tokens)
        if self.session is not None:
            output_tokens, cached = _counts(self.session)
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


def _counts(session: Session) -> tuple[int, tuple[int, int, int]]:
    cached = (session.cached_tokens, session.cached_host_tokens, session.cached_disk_tokens)
    return len(session.tokens), cached


class WayLog:
    """The ways of the latest requests of one frontend, at most `limit`."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._ways: deque[Way] = deque(maxlen=limit)
        self._begun = 0

    def begin(
        self, request: str, model: str, prompt_tokens: int, session: Session, received_s: float, now_s: float
    ) -> Way:
        """Add a request whose prompt is tokenised, and return its Way; at the limit the oldest one is forgotten."""
        self._begun += 1
        way = Way(session, short_name(request), model, prompt_tokens, min(received_s or now_s, now_s), now_s)
        self._ways.append(way)
        return way

    def report(self, frontend: str, arriving: int, running: int, now_s: float) -> RecentRequests:
        """Return the log as a message; the counts are those of the whole frontend."""
        return RecentRequests(frontend, arriving, running, self._begun, [way.message(now_s) for way in self._ways])

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self._ways) <= self._limit
        for way in self._ways:
            assert (way.session is None) == (way.ended_s is not None)
            assert len(way.instances) <= INSTANCES_KEPT
            times = (way.tokenised_s, way.selected_s, way.accepted_s, way.first_token_s, way.ended_s)
            known = [way.received_s, *(each for each in times if each is not None)]
            assert known == sorted(known)
