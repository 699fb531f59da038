"""Refusals of a Select, and the limit of the time that a request may wait in a worker's queue. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from services.router.selection.candidates import CandidateState, predicted_start_s
from services.router.selection.eligibility import Refusal
from services.router.selection.validation import ID_LIMIT
from shared.messages.select import Select, SelectRefused

RETRY_AFTER_LIMIT_S = 60.0
"""Upper limit in seconds of `retry_after_s` when a request is refused because its wait would be too long."""


def in_time(candidates: Sequence[CandidateState], select: Select) -> list[CandidateState]:
    """Return the candidates that would begin the prompt within the frontend's limit, or whose speed is unknown. The
    time for the prompt itself does not count: it is the same later, so an idle candidate refuses none."""
    waits = [predicted_start_s(each) for each in candidates]
    return [
        each for each, wait_s in zip(candidates, waits, strict=True) if wait_s is None or wait_s <= select.wait_limit_s
    ]


def overloaded(select: Select, candidates: Sequence[CandidateState]) -> SelectRefused:
    """Refuse a request for which no candidate is in time; `retry_after_s` is when the soonest will have caught up."""
    soonest_s = min(predicted_start_s(each) or 0.0 for each in candidates)
    limit_s = select.wait_limit_s
    reason = f"it would wait at least {soonest_s:.0f} s for earlier prompts, the limit is {limit_s:g} s"
    retry_after_s = min(max(soonest_s - limit_s, 1.0), RETRY_AFTER_LIMIT_S)
    return replace(refused(select, "overloaded", reason), retry_after_s=retry_after_s)


def refused(select: Select, code: Refusal | Literal["bad_request", "overloaded"], reason: str) -> SelectRefused:
    """Refuse a request, which may be malformed."""
    return SelectRefused(select.request[:ID_LIMIT], select.attempt, code, reason)
