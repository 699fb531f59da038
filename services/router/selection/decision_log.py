"""Log of the latest choices and their outcomes, for `headrace explain`. Pure.

    chosen ──▶ first token reported ──▶ end reported

An entry keeps the inputs of the policy. Reasons are put into words only when a user asks, because most entries are
never read.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import islice

import msgspec
from msgspec import Struct

from services.router.index.index import CandidateId
from services.router.selection.candidates import RoutingRequest, ScoredCandidate, predicted_first_token_s
from services.router.selection.load import AttemptId
from services.router.selection.policy import Policy, explain_candidate
from services.router.selection.policy_guard import PolicyChoice
from shared.messages.select import Candidate, Prefilled, Selected
from shared.request_names import is_named

KEPT_CANDIDATES = 16
"""Number of candidates kept of a decision: the best ones and the chosen one."""
KEPT_HASHES = 512
"""Number of leading blocks whose hashes are kept of a decision: 4 KiB."""
_COUNT_MOST = (1 << 64) - 1
"""Largest count that a message can carry; sums of the numbers that workers report may be larger."""


class Decision(Struct):
    """A choice, the inputs that its rows are made from, and its outcome."""

    selected: Selected
    request: RoutingRequest
    policy: Policy
    scored: Sequence[ScoredCandidate]
    at_s: float
    predicted_cached_tokens: int
    passed_over: dict[str, str]
    """Instances that could not be chosen, at most KEPT_CANDIDATES, each with why."""
    actual_cached_tokens: int | None = None
    """Cached prompt tokens as the worker counted them; None until it reported them."""
    first_token_s: float | None = None
    """Seconds to the first token as the client saw it; None until it is reported, or if an earlier attempt produced
    it."""
    ended_s: float | None = None
    """Seconds from the choice to the reported end; None until then."""
    trace: str = ""
    """The id of the request's trace. Empty if it is not traced."""
    hashes: bytes = b""
    """The sequence hashes of the prompt's leading blocks, packed u64; at most KEPT_HASHES."""


class Prediction(Struct, frozen=True):
    """Predicted and actual cached tokens of one choice, known at its first token."""

    prompt_tokens: int
    predicted_tokens: int
    actual_tokens: int
    instance: str
    chosen_s: float
    """When the choice was made, in seconds on the router's clock."""
    new_blocks: int
    """Number of full blocks that were computed, without one that may have been cached: the last token of a prompt is
    always computed."""


class DecisionLog:
    """The decisions of one model; at the limit the oldest is dropped."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._entries: dict[AttemptId, Decision] = {}
        """Decisions by attempt; oldest first."""

    def add(
        self,
        selected: Selected,
        request: RoutingRequest,
        choice: PolicyChoice,
        at_s: float,
        passed_over: dict[str, str],
        hashes: bytes = b"",
    ) -> None:
        """Add a choice; `selected` has no rows yet. `passed_over` has the instances that could not be chosen, and
        why, `hashes` the sequence hashes of the prompt."""
        rows = tuple(choice.scored[:KEPT_CANDIDATES])
        if choice.chosen not in rows:  # a policy may pick a candidate that it does not score best
            rows = (*rows[: KEPT_CANDIDATES - 1], choice.chosen)
        cached = selected.overlap.blocks * request.block_size
        attempt = selected.request, selected.attempt
        self._entries.pop(attempt, None)
        some = dict(islice(passed_over.items(), KEPT_CANDIDATES))
        kept = hashes[: 8 * KEPT_HASHES]
        self._entries[attempt] = Decision(selected, request, choice.policy, rows, at_s, cached, some, hashes=kept)
        if len(self._entries) > self._limit:
            del self._entries[next(iter(self._entries))]

    def contains(self, attempt: AttemptId, candidate: CandidateId) -> bool:
        """Return whether the log has a choice of this candidate for the attempt."""
        entry = self._entries.get(attempt)
        return entry is not None and (entry.selected.instance, entry.selected.rank) == candidate

    def record_first_token(self, event: Prefilled) -> Prediction | None:
        """Record a reported first token. Return None if it was recorded before, if what was cached is unknown, or if
        the log has no such choice: a frontend may ask two routers and use only the first answer."""
        decision = self._entries.get((event.request, event.attempt))
        if decision is None or decision.actual_cached_tokens is not None:
            return None
        if event.instance not in ("", decision.selected.instance):
            return None
        decision.first_token_s = event.first_token_s if event.first_token_s > 0 else None
        if event.cached_tokens < 0:
            return None
        prompt_tokens, block_size = decision.request.prompt_tokens, decision.request.block_size
        decision.actual_cached_tokens = actual_tokens = min(event.cached_tokens, prompt_tokens)
        return Prediction(
            prompt_tokens,
            decision.predicted_cached_tokens,
            actual_tokens,
            decision.selected.instance,
            decision.at_s,
            (prompt_tokens - 1) // block_size - actual_tokens // block_size,
        )

    def record_end(self, attempt: AttemptId, now_s: float) -> None:
        """Record the end of an attempt."""
        decision = self._entries.get(attempt)
        if decision is not None and decision.ended_s is None:
            decision.ended_s = now_s - decision.at_s

    def record_trace(self, attempt: AttemptId, trace: str) -> None:
        """Record the id of the trace that an attempt belongs to."""
        decision = self._entries.get(attempt)
        if decision is not None:
            decision.trace = trace

    def get(self, attempt: AttemptId) -> Decision:
        """Return a decision of the log, with its rows."""
        return _with_candidates(self._entries[attempt])

    def find(self, request: str, latest: int) -> list[Decision]:
        """Return the latest decisions of a request, or of all requests if `request` is empty; oldest first, with their
        rows. `is_named` says what `request` may be; several requests may have a client's own id, and a request for
        several choices has several decisions."""
        found = [entry for (name, _), entry in self._entries.items() if is_named(name, request)]
        return [_with_candidates(entry) for entry in found[-latest:]]

    def entries(self) -> list[Decision]:
        """Return all decisions, oldest first, without their rows."""
        return list(self._entries.values())

    def validate(self) -> None:
        """Assert every invariant."""
        assert all(len(entry.hashes) <= 8 * KEPT_HASHES for entry in self._entries.values())
        assert len(self._entries) <= self._limit
        assert all(1 <= len(entry.scored) <= KEPT_CANDIDATES for entry in self._entries.values())
        assert all(len(entry.passed_over) <= KEPT_CANDIDATES for entry in self._entries.values())


def _with_candidates(decision: Decision) -> Decision:
    rows = tuple(_row(decision, scored) for scored in decision.scored)
    selected = msgspec.structs.replace(decision.selected, candidates=rows)
    return msgspec.structs.replace(decision, selected=selected)


def _row(decision: Decision, scored: ScoredCandidate) -> Candidate:
    candidate = scored.candidate
    first_token_s = predicted_first_token_s(candidate, decision.request)
    return Candidate(
        instance=candidate.id[0],
        rank=candidate.id[1],
        overlap=candidate.overlap,
        score=_finite(scored.score),
        active_blocks=min(candidate.load.active_blocks, _COUNT_MOST),
        queued_tokens=min(candidate.load.queued_tokens, _COUNT_MOST),
        reason=explain_candidate(decision.policy, decision.request, candidate)[0],
        predicted_s=None if first_token_s is None else round(_finite(first_token_s), 6),
    )


def _finite(number: float) -> float:
    """Return a number that JSON can express, which has no infinity."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))
