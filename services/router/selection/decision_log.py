"""The latest choices and what came of them, for people who ask. Pure.

    chosen ──▶ first token told ──▶ end told

Kept as they were decided, and put into words only when somebody asks: most are never asked about.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import msgspec
from msgspec import Struct

from services.router.index.index import CandidateId
from services.router.selection.candidates import Question, Scored, predicted_s
from services.router.selection.load import AttemptId
from services.router.selection.policy import Policy, reason
from services.router.selection.policy_guard import Verdict
from shared.messages import Candidate, Prefilled, Selected

ROWS = 16
"""Candidates kept of a decision: the best, and the chosen one."""
_COUNT_MOST = (1 << 64) - 1
"""A message carries no more; sums of what workers report may be."""


class Decision(Struct):
    """A choice, and what came of it."""

    selected: Selected
    at_s: float
    prompt_tokens: int
    predicted_cached_tokens: int
    actual_cached_tokens: int | None = None
    """As the worker counted; None: not told yet."""
    first_token_s: float | None = None
    """As the client saw it; None: not told yet, or an earlier attempt brought it."""
    ended_s: float | None = None
    """From the choice until its end was told; None: not yet."""


class Prediction(Struct, frozen=True):
    """What a first token told about a choice of ours."""

    prompt_tokens: int
    predicted_tokens: int
    actual_tokens: int
    instance: str
    chosen_s: float
    """When."""
    new_blocks: int
    """Full blocks that were computed, less one that may have been cached: a prompt's last token always is computed."""


class _Kept(Struct):
    """A decision, and what its rows are made of."""

    decision: Decision
    question: Question
    policy: Policy
    scored: Sequence[Scored]


class Decisions:
    """Those of one model; over the limit the oldest goes."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._kept: dict[AttemptId, _Kept] = {}
        """Oldest first."""

    def add(self, selected: Selected, question: Question, verdict: Verdict, at_s: float) -> None:
        """A choice was made; `selected` has no rows."""
        rows = tuple(verdict.scored[:ROWS])
        if verdict.chosen not in rows:  # a policy may pick what it does not score best
            rows = (*rows[: ROWS - 1], verdict.chosen)
        cached = selected.overlap.blocks * question.block_size
        attempt = selected.request, selected.attempt
        self._kept.pop(attempt, None)
        self._kept[attempt] = _Kept(
            Decision(selected, at_s, question.prompt_tokens, cached), question, verdict.policy, rows
        )
        if len(self._kept) > self._limit:
            del self._kept[next(iter(self._kept))]

    def keeps(self, attempt: AttemptId, candidate: CandidateId) -> bool:
        """Whether this choice is here."""
        kept = self._kept.get(attempt)
        return kept is not None and (kept.decision.selected.instance, kept.decision.selected.rank) == candidate

    def prefilled(self, event: Prefilled) -> Prediction | None:
        """The first token was told; None if it was before, or is of no choice that is kept: two routers may have been
        asked, and only one's answer was in time."""
        kept = self._kept.get((event.request, event.attempt))
        if kept is None or kept.decision.actual_cached_tokens is not None:
            return None
        if event.instance not in ("", kept.decision.selected.instance):
            return None
        decision, block_size = kept.decision, kept.question.block_size
        actual_tokens = min(max(event.cached_tokens, 0), decision.prompt_tokens)
        decision.actual_cached_tokens = actual_tokens
        decision.first_token_s = event.first_token_s if event.first_token_s > 0 else None
        return Prediction(
            decision.prompt_tokens,
            decision.predicted_cached_tokens,
            actual_tokens,
            decision.selected.instance,
            decision.at_s,
            (decision.prompt_tokens - 1) // block_size - actual_tokens // block_size,
        )

    def ended(self, attempt: AttemptId, now_s: float) -> None:
        """Its end was told."""
        kept = self._kept.get(attempt)
        if kept is not None and kept.decision.ended_s is None:
            kept.decision.ended_s = now_s - kept.decision.at_s

    def of(self, attempt: AttemptId) -> Decision:
        """One that is kept, with its rows."""
        return _in_words(self._kept[attempt])

    def explain(self, request: str, latest: int) -> list[Decision]:
        """The latest kept of a request, or of all requests where it is empty; oldest first, with their rows. A client's
        own name for it does as well, before the hyphen and what the frontend added: then there may be several. So there
        are where the request asks for several things, whose names differ behind a slash."""
        found = [kept for (name, _), kept in self._kept.items() if request in ("", name, *_names(name))]
        return [_in_words(kept) for kept in found[-latest:]]

    def validate(self) -> None:
        """Assert every invariant."""
        assert len(self._kept) <= self._limit
        assert all(1 <= len(kept.scored) <= ROWS for kept in self._kept.values())


def _names(name: str) -> tuple[str, str]:
    """Of the whole request, and of that its client's own."""
    whole = name.partition("/")[0]
    return whole, whole.rpartition("-")[0]


def _in_words(kept: _Kept) -> Decision:
    rows = tuple(_row(kept, scored) for scored in kept.scored)
    selected = msgspec.structs.replace(kept.decision.selected, candidates=rows)
    return msgspec.structs.replace(kept.decision, selected=selected)


def _row(kept: _Kept, scored: Scored) -> Candidate:
    facts = scored.facts
    first_token_s = predicted_s(facts, kept.question)
    return Candidate(
        instance=facts.candidate[0],
        rank=facts.candidate[1],
        overlap=facts.overlap,
        score=_told(scored.score),
        active_blocks=min(facts.load.active_blocks, _COUNT_MOST),
        queued_tokens=min(facts.load.queued_tokens, _COUNT_MOST),
        reason=reason(kept.policy, kept.question, facts)[0],
        predicted_s=None if first_token_s is None else round(_told(first_token_s), 6),
    )


def _told(number: float) -> float:
    """As JSON can tell it, which knows no infinity."""
    return max(-sys.float_info.max, min(float(number), sys.float_info.max))
