"""Answers of a router to users: its choices, what came of them, and its state. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from services.router.selection.decision_log import Decision
from services.router.selection.model_router import ModelRouter
from shared.messages.people import Explanation, Explanations, ModelState
from shared.request_names import bare_id

DECISIONS_IN_ANSWER = 20
"""Most decisions in one answer: the latest ones."""


def requested_id(payload: bytes) -> str:
    """Return the request id in a query; empty asks for the latest decisions."""
    return bare_id(payload.decode("utf-8", "replace"))


def explain(router: str, models: Iterable[ModelRouter], request: str, now_s: float) -> Explanations:
    """Return the decisions of a request, or of all requests if `request` is empty."""
    found = [
        (decision.at_s, model.model, decision)
        for model in models
        for decision in model.decisions.find(request, DECISIONS_IN_ANSWER)
    ]
    found.sort(key=lambda each: each[0])
    latest = found[-DECISIONS_IN_ANSWER:]
    return Explanations(router, [_explained(name, decision, now_s) for _, name, decision in latest])


def _explained(model: str, decision: Decision, now_s: float) -> Explanation:
    selected = decision.selected
    return Explanation(
        model=model,
        router=selected.router,
        request=selected.request,
        attempt=selected.attempt,
        age_s=round(now_s - decision.at_s, 6),
        instance=selected.instance,
        rank=selected.rank,
        reason=selected.reason,
        candidates=selected.candidates,
        prompt_tokens=decision.request.prompt_tokens,
        predicted_cached_tokens=decision.predicted_cached_tokens,
        actual_cached_tokens=decision.actual_cached_tokens,
        first_token_s=_rounded(decision.first_token_s),
        ended_s=_rounded(decision.ended_s),
        lora=decision.request.lora,
        trace=decision.trace,
        passed_over=decision.passed_over,
    )


def _rounded(seconds: float | None) -> float | None:
    """Round to microseconds."""
    return None if seconds is None else round(seconds, 6)


def policy_problem(models: Iterable[ModelRouter]) -> str:
    """Return why kv made choices instead of the policy, for the worst of the models; empty if it made none."""
    guards = [model.guard for model in models]
    if any(guard.disabled for guard in guards):
        return "off: kv chooses"
    failures = sum(guard.failures for guard in guards)
    return f"failed: kv made {failures} of its choices" if failures else ""


def model_state(model: ModelRouter) -> ModelState:
    """Return the sizes of a model's state."""
    index = model.index.statistics()
    return ModelState(
        model=model.model,
        instances=len(model.cards),
        reservations=model.load.statistics().reservations,
        index_blocks=index.blocks,
        index_bytes=index.bytes,
    )
