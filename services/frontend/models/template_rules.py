"""Finds out by trial which lists of messages a chat template takes. Pure.

Templates have rules that no field names: one system message, roles that alternate, ids of nine letters. Some raise an
error then, others leave a message out. So each rule has conversations whose texts are marks. If a mark is missing in
the prompt, and is there once the conversation is changed by the rule, the template has the rule. A rule that does not
help is not kept.

    (rules, conversation) of _TRIALS ─▶ is each mark in the prompt? ── no ──▶ and by the rules? ── yes ──▶ TemplateRules
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from services.frontend.models.message_list import TemplateRules, Turn, fit
from shared.errors import InvalidRequest

Render = Callable[[Sequence[Turn]], str]
"""Renders messages. Raises InvalidRequest if the template refuses them."""


def _marked(role: str, mark: str, **more: Any) -> Turn:
    return {"role": role, "content": mark, **more}


def _calling(*calls: tuple[str, str], content: str = "") -> Turn:
    """An assistant's message with calls, each given by its id and the mark in its arguments."""
    functions = [(name, {"name": "look", "arguments": json.dumps({"at": mark})}) for name, mark in calls]
    return _marked(
        "assistant",
        content,
        tool_calls=[{"id": name, "type": "function", "function": function} for name, function in functions],
    )


def _result(call: str, mark: str) -> Turn:
    return _marked("tool", mark, tool_call_id=call, name="look")


_SYSTEM, _OTHER = _marked("system", "qzsys"), _marked("system", "qzdev")
_USER, _AGAIN = _marked("user", "qzask"), _marked("user", "qzmore")
_ANSWER, _FURTHER = _marked("assistant", "qzsay"), _marked("assistant", "qztell")
_EMPTY = _marked("assistant", "")
_ONE, _TWO = "qzid00001", "qzid00002"
_CALL, _RESULT = _calling((_ONE, "qzarg")), _result(_ONE, "qzout")
_BOTH = _calling((_ONE, "qzarg"), (_TWO, "qzval"))

_TRIALS: Sequence[tuple[tuple[str, ...], Sequence[Turn]]] = (
    (("content_parts",), (_USER,)),
    (("system_in_user",), (_SYSTEM, _USER)),
    (("one_system",), (_SYSTEM, _OTHER, _USER)),
    (("user_first",), (_ANSWER, _USER)),
    (("some_user",), (_SYSTEM,)),
    (("alternating",), (_USER, _AGAIN)),
    (("alternating",), (_USER, _ANSWER, _FURTHER, _AGAIN)),
    (("late_system_as_user",), (_SYSTEM, _USER, _ANSWER, _OTHER, _AGAIN)),
    (("late_system_as_user",), (_USER, _ANSWER, _SYSTEM)),
    (("no_empty_answers",), (_USER, _EMPTY, _AGAIN)),
    (("text_arguments",), (_USER, _CALL, _RESULT)),
    (("calls_apart",), (_USER, _CALL, _RESULT)),
    (("calls_apart", "text_arguments"), (_USER, _CALL, _RESULT)),
    (("content_parts",), (_USER, _CALL, _RESULT)),
    (("one_call",), (_USER, _BOTH, _RESULT, _result(_TWO, "qzend"))),
    (("answered_results",), (_USER, _CALL, _RESULT, _AGAIN)),
    (("short_ids",), (_USER, _calling(("qz-1", "qzarg")), _result("qz-1", "qzout"))),
    (("short_ids",), (_USER, _calling(("call_qz0123456789", "qzarg")), _result("call_qz0123456789", "qzout"))),
)


def find_rules(render: Render) -> TemplateRules:
    """Return the rules of the template that `render` renders. Raise MemoryError if it takes too much memory."""

    def shows(messages: Sequence[Turn], rules: TemplateRules) -> bool:
        try:
            prompt = render(fit(messages, rules))
        except InvalidRequest as refused:
            if isinstance(refused.__context__, MemoryError):
                raise refused.__context__ from None
            return False
        return all(mark in prompt for mark in _marks(messages))

    rules = TemplateRules()
    for names, messages in _TRIALS:
        if not shows(messages, rules):
            by_them = replace(rules, **dict.fromkeys(names, True))
            rules = by_them if shows(messages, by_them) else rules
    return rules


def _marks(messages: Sequence[Turn]) -> list[str]:
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    arguments = [json.loads(call["function"]["arguments"])["at"] for call in calls]
    return [*(message["content"] for message in messages), *arguments]
