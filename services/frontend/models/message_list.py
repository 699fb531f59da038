"""Makes a list of messages one that the model's chat template takes. Pure.

    messages ─▶ fit(messages, rules) ─▶ ChatTemplate.render

The rules of a template say what it refuses, or leaves out of its prompt; `find_rules` finds them by trial. What a
template takes stays as the client wrote it. The other changes are those that peers make for strict templates.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, groupby
from operator import itemgetter
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shared.errors import MALFORMED, InvalidRequest

Turn = dict[str, Any]
"""A message in the form that chat templates read. The arguments of its calls are still a text. Its content is a text,
or a list of parts if it has images."""

BETWEEN = "\n\n"
"""What stands between the texts of messages that become one."""
DONE = "Done."
"""The answer that stands between a tool's result and the next message of the user, for templates that demand one."""
_SHORT_ID = re.compile(r"[0-9A-Za-z]{9}")


class TemplateRules(Struct, frozen=True):
    """What a template does not take. Each rule names what is done about it."""

    content_parts: bool = False
    """Texts become lists with one part, as templates of models for images may demand."""
    one_system: bool = False
    """The system messages at the beginning become one."""
    system_in_user: bool = False
    """The system message is put before the text of the first user."""
    late_system_as_user: bool = False
    """System messages after the beginning become messages of the user, at their place."""
    user_first: bool = False
    """An empty message of the user comes first, if another message would."""
    some_user: bool = False
    """An empty message of the user comes first, if the list has none of the user."""
    alternating: bool = False
    """Neighbouring messages of the user become one, and so do those of the assistant."""
    answered_results: bool = False
    """Results come directly after their calls, and an answer before the user's next message. The result of a call that
    is not in the list is the user's."""
    no_empty_answers: bool = False
    """Messages of the assistant with neither text nor calls are left out."""
    calls_apart: bool = False
    """A message with calls has no content; its text is a message before it."""
    text_arguments: bool = False
    """The arguments of a call are the text that the model wrote, in place of an object."""
    one_call: bool = False
    """Calls of one message are messages of their own, each with its result after it."""
    short_ids: bool = False
    """Ids of calls are nine letters and digits."""

    def strict(self) -> TemplateRules:
        """Return these rules with all those that templates of alternating roles may have."""
        names = ("one_system", "late_system_as_user", "user_first", "some_user", "alternating")
        also = ("answered_results", "no_empty_answers", "one_call", "short_ids")
        return replace(self, **dict.fromkeys((*names, *also), True))


def fit(messages: Sequence[Mapping[str, Any]], rules: TemplateRules) -> list[Turn]:
    """Return the messages as a template with these rules takes them. The last message stays the last, even if it is
    empty, unless it has to go by a rule."""
    turns = [dict(message) for message in messages]
    if rules.no_empty_answers:
        turns = [turn for turn in turns if turn["role"] != "assistant" or turn["content"] or turn.get("tool_calls")]
    if rules.one_system or rules.system_in_user:
        turns = _one_system(turns)
    if rules.late_system_as_user or rules.system_in_user:
        turns = list(_late_systems_as_users(turns))
    if rules.answered_results:
        turns = _results_after_calls(turns)
    if rules.user_first or (rules.some_user and all(turn["role"] != "user" for turn in turns)):
        turns = _user_first(turns)
    if rules.system_in_user:
        turns = _system_in_user(turns)
    if rules.alternating:
        turns = _alternating(turns)
    if rules.answered_results:
        turns = list(_answered(turns))
    if rules.one_call:
        turns = list(_single_calls(turns))
    if rules.calls_apart:
        turns = list(_calls_apart(turns))
    return [_written(turn, rules) for turn in turns]


def _one_system(turns: list[Turn]) -> list[Turn]:
    count = next((at for at, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    return turns if count < 2 else [turns[0] | {"content": _joined(turns[:count], "content")}, *turns[count:]]


def _late_systems_as_users(turns: list[Turn]) -> Iterable[Turn]:
    begun = False
    for turn in turns:
        begun = begun or turn["role"] != "system"
        yield turn | {"role": "user"} if begun and turn["role"] == "system" else turn


def _user_first(turns: list[Turn]) -> list[Turn]:
    at = next((at for at, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    if at < len(turns) and turns[at]["role"] == "user":
        return turns
    return [*turns[:at], {"role": "user", "content": ""}, *turns[at:]]


def _system_in_user(turns: list[Turn]) -> list[Turn]:
    if not turns or turns[0]["role"] != "system":
        return turns
    first, *rest = turns
    if not rest or rest[0]["role"] != "user":
        return [first | {"role": "user"}, *rest]
    return [rest[0] | {"content": _joined((first, rest[0]), "content")}, *rest[1:]]


def _alternating(turns: list[Turn]) -> list[Turn]:
    return [one for role, run in groupby(turns, itemgetter("role")) for one in _as_one(role, list(run))]


def _as_one(role: str, run: list[Turn]) -> list[Turn]:
    """Return neighbouring messages of one role as one, if two of that role may not follow one another."""
    if role not in ("user", "assistant") or len(run) == 1:
        return run
    calls = [call for turn in run for call in turn.get("tool_calls", ())]
    joined = {field: text for field in ("content", "reasoning_content") if (text := _joined(run, field))}
    return [{"role": role, "content": "", **joined, **({"tool_calls": calls} if calls else {})}]


def _joined(turns: Iterable[Turn], field: str) -> str | list[Turn]:
    """Return the texts of a field as one; a list of parts if one of them is a list, because it has images."""
    found = [value for turn in turns if (value := turn.get(field))]
    if all(isinstance(value, str) for value in found):
        return BETWEEN.join(found)
    between, parts = [{"type": "text", "text": BETWEEN}], list[Turn]()
    for value in found:
        parts += between if parts else []
        parts += value if isinstance(value, list) else [{"type": "text", "text": value}]
    return parts


def _results_after_calls(turns: list[Turn]) -> list[Turn]:
    """Move results up to the calls that they belong to. Those whose call a client has cut off are the user's."""
    found: list[Turn] = []
    callers: dict[str, int] = {}
    """The id of each call → the place of its message in `found`."""
    results: dict[int, list[Turn]] = defaultdict(list)
    for turn in turns:
        caller = callers.get(turn.get("tool_call_id", "")) if turn["role"] == "tool" else None
        if caller is not None:
            results[caller].append(turn)
            continue
        if turn["role"] == "tool":
            turn = {"role": "user", "content": turn["content"]}
        callers |= dict.fromkeys((call["id"] for call in turn.get("tool_calls", ())), len(found))
        found.append(turn)
    return [one for at, turn in enumerate(found) for one in (turn, *results.get(at, ()))]


def _answered(turns: list[Turn]) -> Iterable[Turn]:
    for at, turn in enumerate(turns):
        if turn["role"] == "user" and at and (turns[at - 1]["role"] == "tool" or turns[at - 1].get("tool_calls")):
            yield {"role": "assistant", "content": DONE}
        yield turn


def _single_calls(turns: list[Turn]) -> Iterable[Turn]:
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            yield turn
            continue
        results: dict[str, list[Turn]] = defaultdict(list)
        while at < len(turns) and turns[at]["role"] == "tool":
            results[turns[at].get("tool_call_id", "")].append(turns[at])
            at += 1
        for number, call in enumerate(calls):
            yield (turn if number == 0 else {"role": "assistant", "content": ""}) | {"tool_calls": [call]}
            yield from results.pop(call["id"], ())
        yield from chain.from_iterable(results.values())


def _calls_apart(turns: list[Turn]) -> Iterable[Turn]:
    for turn in turns:
        if not turn.get("tool_calls"):
            yield turn
            continue
        if turn["content"]:
            yield {field: value for field, value in turn.items() if field != "tool_calls"}
        yield turn | {"content": None}


def _written(turn: Turn, rules: TemplateRules) -> Turn:
    """Return one message with its calls, ids and content in the form that the template reads."""
    if rules.short_ids and "tool_call_id" in turn:
        turn["tool_call_id"] = _short_id(turn["tool_call_id"])
    if turn.get("tool_calls"):
        turn["tool_calls"] = [_call(call, rules) for call in turn["tool_calls"]]
    if rules.content_parts and isinstance(turn["content"], str):
        turn["content"] = [{"type": "text", "text": turn["content"]}]
    return turn


def _call(call: Turn, rules: TemplateRules) -> Turn:
    function = call["function"]
    if not rules.text_arguments:
        function = function | {"arguments": object_arguments(function["arguments"])}
    return call | {"id": _short_id(call["id"]) if rules.short_ids else call["id"], "function": function}


def _short_id(given: str) -> str:
    """Return an id as Mistral's templates demand it: the same for the same id, whatever else is in the conversation."""
    if _SHORT_ID.fullmatch(given):
        return given
    return base64.b32encode(hashlib.blake2b(given.encode(), digest_size=6).digest()).decode()[:9]


_NO_ESCAPE = re.compile(r'\\(?!["/bfnrt]|u[0-9A-Fa-f]{4})')
"""A backslash that begins no escape of JSON, in a text without pairs of them."""
_PAIR = "\ud800"
"""What stands for two backslashes meanwhile: no text of a request has it."""


def object_arguments(text: str) -> dict[str, Any]:
    """Return the arguments of a call as an object, which is what most templates read, and what they iterate over.

    Text that is none becomes an empty one, as in vLLM: a model that saw a text there would write texts itself."""
    found = _decoded(text)
    if isinstance(found, str):  # models also write the object as JSON in a text
        found = _decoded(found)
    return found if isinstance(found, dict) else {}


def _decoded(text: str) -> object:
    """Decode JSON, also with raw line ends and unknown escapes in its texts, which models write. Return None if it is
    none."""
    try:
        return msgspec.json.decode(text)
    except MALFORMED:
        pass
    paired = text.replace(r"\\", _PAIR)  # with no function that is called for each: a text may have a million
    escaped = _NO_ESCAPE.sub(r"\\\\", paired).replace(_PAIR, r"\\")
    try:
        return json.loads(escaped, strict=False)
    except (ValueError, RecursionError):
        return None


# --- the rules of a template

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
    """Return the rules of the template that `render` renders. Raise MemoryError if it takes too much memory.

    Templates have rules that no field names: one system message, roles that alternate, ids of nine letters. Some raise
    an error then, others leave a message out. So each rule has conversations whose texts are marks. If a mark is
    missing in the prompt, and is there once the conversation is changed by the rule, the template has the rule. A rule
    that does not help is not kept.

        (rules, conversation) ─▶ is each mark in the prompt? ── no ──▶ and by the rules? ── yes ──▶ TemplateRules
    """

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
