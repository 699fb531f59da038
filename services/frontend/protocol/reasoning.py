"""The fields of a request about reasoning: how long it may be, or how much effort to make. Pure.

thinking_token_budget   tokens of reasoning; then a grammar forces the end of reasoning (structured/grammar.py)
reasoning_effort        passed to the chat template; `none` uses the template's switch or, without one, a budget of 0;
                        a template without a place for it ignores the other values
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from shared.errors import InvalidRequest

ThinkingBudget = Annotated[int, Meta(ge=-1, le=(1 << 31) - 1)]
"""Tokens of reasoning at most; -1 is no limit, as in vLLM."""
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""OpenAI's and vLLM's values of `reasoning_effort`."""


class ReasoningPlan(Struct, frozen=True):
    """What a request's reasoning fields come to."""

    template_kwargs: Mapping[str, Any]
    """Variables for the chat template."""
    budget: int | None = None
    """Tokens of reasoning at most. None means no limit."""
    param: str = "thinking_token_budget"
    """The field that set the budget, for errors."""


DEFAULT_REASONING = ReasoningPlan({})


def plan_reasoning(
    effort: Effort | None,
    budget: int | None,
    kwargs: Mapping[str, Any],
    ignored: IgnoredFields = REFUSE,
    *,
    reads: Collection[str],
    reasons: bool,
) -> ReasoningPlan:
    """Combine the reasoning fields of a request. `kwargs` are its own template variables; `reads` are those that the
    chat template reads; `reasons` says whether the model is known to reason. Raise InvalidRequest, naming the field.
    """
    if budget == -1:
        budget = None
    if budget is not None and not reasons:
        wrong = "thinking_token_budget: the model is not known to reason: its chat template does not show it, and no"
        raise InvalidRequest(f"{wrong} `reasoning_parser` is set", param="thinking_token_budget", code=UNSUPPORTED)
    if effort is None:
        return ReasoningPlan(kwargs, budget)
    variable: tuple[str, Any] | None = None
    if "reasoning_effort" in reads:
        variable = ("reasoning_effort", effort)
    elif effort == "none" and "enable_thinking" in reads:
        variable = ("enable_thinking", False)
    if variable is not None:
        name, value = variable
        if kwargs.get(name, value) != value:
            raise field_error("reasoning_effort", f"chat_template_kwargs.{name} contradicts it")
        return ReasoningPlan({**kwargs, name: value}, budget)
    if effort != "none" and not ignored.refuse:
        ignored.add("reasoning_effort")
        return ReasoningPlan(kwargs, budget)
    if effort != "none":
        wrong = f"reasoning_effort: the chat template does not support {effort!r}"
        wrong += "; set thinking_token_budget instead" if reasons else ", and the model is not known to reason"
        raise InvalidRequest(wrong, param="reasoning_effort", code=UNSUPPORTED)
    if budget:
        raise field_error("reasoning_effort", "thinking_token_budget contradicts it")
    return ReasoningPlan(kwargs, 0 if reasons else None, "reasoning_effort")
