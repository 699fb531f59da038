"""What a request says of thinking: how long it may be, or how hard to try. Pure.

thinking_token_budget   so many tokens, then the engine is held to the end of thinking (structured/grammar.py)
reasoning_effort        as the chat template has it; none: a template's own way, else a budget of nothing
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shared.errors import InvalidRequest

ThinkingBudget = Annotated[int, Meta(ge=0, le=(1 << 31) - 1)]
"""Tokens."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]
"""OpenAI's."""
_UNSUPPORTED = "unsupported_parameter"


class ReasoningPlan(Struct, frozen=True):
    """What becomes of it."""

    template_kwargs: Mapping[str, Any]
    """The chat template's."""
    budget: int | None = None
    """Tokens of thinking; None: as many as there are."""
    param: str = "thinking_token_budget"
    """The field that says so."""


DEFAULT_REASONING = ReasoningPlan({})


def plan_reasoning(
    effort: Effort | None, budget: int | None, words: Mapping[str, Any], *, reads: Collection[str], thinks: bool
) -> ReasoningPlan:
    """`words`: those that the request gives itself; `reads`: those that the template reads; `thinks`: the model is
    known to. Raises InvalidRequest, naming the field."""
    if budget is not None and not thinks:
        wrong = "thinking_token_budget: the model is not known to think: its template does not show it, and no"
        raise InvalidRequest(f"{wrong} `reasoning_parser` is set", param="thinking_token_budget", code=_UNSUPPORTED)
    if effort is None:
        return ReasoningPlan(words, budget)
    word: tuple[str, Any] | None = None
    if "reasoning_effort" in reads:
        word = ("reasoning_effort", effort)
    elif effort == "none" and "enable_thinking" in reads:
        word = ("enable_thinking", False)
    if word is not None:
        if words.get(word[0], word[1]) != word[1]:
            wrong = f"reasoning_effort: chat_template_kwargs.{word[0]} says something else"
            raise InvalidRequest(wrong, param="reasoning_effort")
        return ReasoningPlan({**words, word[0]: word[1]}, budget)
    if effort != "none":
        wrong = f"reasoning_effort: the chat template has no place for {effort!r}"
        wrong += "; thinking_token_budget takes a number" if thinks else ", and the model is not known to think"
        raise InvalidRequest(wrong, param="reasoning_effort", code=_UNSUPPORTED)
    if budget:
        wrong = "reasoning_effort: thinking_token_budget says something else"
        raise InvalidRequest(wrong, param="reasoning_effort")
    return ReasoningPlan(words, 0 if thinks else None, "reasoning_effort")
