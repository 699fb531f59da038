from __future__ import annotations

from typing import Any

import pytest

from services.frontend.protocol.reasoning import Effort, ReasoningPlan, plan_reasoning
from shared.errors import InvalidRequest

QWEN = frozenset({"enable_thinking", "tools"})
GPT_OSS = frozenset({"reasoning_effort"})
NOTHING: frozenset[str] = frozenset()


@pytest.mark.parametrize(
    ("effort", "budget", "words", "reads", "thinks", "becomes"),
    [
        (None, None, {}, QWEN, True, ReasoningPlan({})),
        (None, 7, {"a": 1}, QWEN, True, ReasoningPlan({"a": 1}, 7)),
        (None, 0, {}, NOTHING, True, ReasoningPlan({}, 0)),
        ("none", None, {}, QWEN, True, ReasoningPlan({"enable_thinking": False})),
        ("none", 7, {"enable_thinking": False}, QWEN, True, ReasoningPlan({"enable_thinking": False}, 7)),
        ("none", None, {}, NOTHING, True, ReasoningPlan({}, 0, "reasoning_effort")),
        ("none", 0, {}, NOTHING, True, ReasoningPlan({}, 0, "reasoning_effort")),
        ("none", None, {}, NOTHING, False, ReasoningPlan({}, None, "reasoning_effort")),
        ("low", 9, {}, GPT_OSS, True, ReasoningPlan({"reasoning_effort": "low"}, 9)),
        ("xhigh", None, {}, GPT_OSS, False, ReasoningPlan({"reasoning_effort": "xhigh"})),
    ],
)
def test_an_effort_becomes_template_variables_or_a_budget(
    effort: Effort | None,
    budget: int | None,
    words: dict[str, Any],
    reads: frozenset[str],
    thinks: bool,
    becomes: ReasoningPlan,
) -> None:
    assert plan_reasoning(effort, budget, words, reads=reads, reasons=thinks) == becomes


@pytest.mark.parametrize(
    ("effort", "budget", "words", "reads", "thinks", "param"),
    [
        (None, 7, {}, QWEN, False, "thinking_token_budget"),
        ("low", None, {}, QWEN, True, "reasoning_effort"),
        ("high", 7, {}, NOTHING, True, "reasoning_effort"),
        ("none", 7, {}, NOTHING, True, "reasoning_effort"),
        ("none", None, {"enable_thinking": True}, QWEN, True, "reasoning_effort"),
        ("low", None, {"reasoning_effort": "high"}, GPT_OSS, True, "reasoning_effort"),
    ],
)
def test_what_cannot_be_done_and_what_contradicts_itself_is_refused_by_name(
    effort: Effort | None, budget: int | None, words: dict[str, Any], reads: frozenset[str], thinks: bool, param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        plan_reasoning(effort, budget, words, reads=reads, reasons=thinks)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("thinks", "said"), [(True, "set thinking_token_budget instead$"), (False, "is not known to reason$")]
)
def test_an_unsupported_effort_is_refused_and_the_error_names_the_alternative(thinks: bool, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        plan_reasoning("high", None, {}, reads=NOTHING, reasons=thinks)
