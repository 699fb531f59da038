"""Refusals of a Select: what a router cannot work with, and what would wait too long in a worker's queue. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec.structs import replace

from services.router.selection.candidates import CandidateState, predicted_start_s
from services.router.selection.eligibility import Refusal
from shared.errors import ProtocolError
from shared.hashing import unpack_hashes
from shared.messages.select import Select, SelectRefused

RETRY_AFTER_LIMIT_S = 60.0
"""Upper limit in seconds of `retry_after_s` when a request is refused because its wait would be too long."""
ID_LIMIT = 256
"""The most characters of a name in a Select."""
_EXCLUDED_LIMIT = 4096


def validated_hashes(select: Select, most_hashes: int, block_size: int) -> list[int]:
    """Return the prompt's hashes. Raise ProtocolError, which names the field. `most_hashes` is the most blocks of a
    prompt; `block_size` is 0 without instances."""
    if (
        max(len(select.request), len(select.frontend), len(select.session), len(select.lora)) > ID_LIMIT
        or not select.request
    ):
        raise ProtocolError(
            f"request is empty, or request, frontend, session or lora has more than {ID_LIMIT} characters"
        )
    if len(select.excluded) > _EXCLUDED_LIMIT:
        raise ProtocolError(f"excluded may have at most {_EXCLUDED_LIMIT} instances")
    if select.attempt < 0 or select.prompt_tokens < 1 or select.max_tokens < 0:
        raise ProtocolError("attempt and max_tokens must not be negative, and prompt_tokens must be positive")
    if not (select.time_left_s >= 0 and select.wait_limit_s >= 0):  # also refuses NaN
        raise ProtocolError("time_left_s and wait_limit_s must not be negative: the request's time is over")
    if len(select.hashes) > 8 * most_hashes:
        raise ProtocolError(f"hashes has more than {most_hashes} blocks")
    try:
        hashes = unpack_hashes(select.hashes)
    except ValueError as wrong:
        raise ProtocolError(f"hashes: {wrong}") from None
    if block_size:
        blocks = select.prompt_tokens // block_size
        if blocks > most_hashes:
            raise ProtocolError(f"prompt_tokens has more than {most_hashes} blocks")
        if len(hashes) > blocks:
            raise ProtocolError(f"{len(hashes)} hashes for a prompt of {select.prompt_tokens} tokens")
    if len(set(hashes)) != len(hashes):
        raise ProtocolError("hashes repeat: the hashes of one prompt must all be different")
    return hashes


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
