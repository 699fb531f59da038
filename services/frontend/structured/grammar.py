"""Joins all that a request demands of its answer into one grammar for the engine. Pure.

    response_format, structured_outputs ─┐
    tool_choice that forces calls       ─┼▶ the answer's grammar ─▶ put after reasoning and its budget ─▶ text
    a tool that is strict               ─┘

The text is llguidance's JSON: a list of grammars, of which the first is the start and may refer to the others.

A budget of thinking is a part of the grammar, so it needs no state in an engine and survives a lost worker. Marks of
calls and of thinking are named by token id: as text, a model would have to spell them out of pieces, which it has not
learned.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct

from services.frontend.protocol import structured
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.completions import CompletionRequest
from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.ignored_fields import REFUSE, IgnoredFields
from services.frontend.protocol.reasoning import DEFAULT_REASONING, ReasoningPlan
from services.frontend.protocol.structured import Constraint, ConstraintPart, SchemaReader, json_grammar
from services.frontend.protocol.tools import CustomFunction, InputGrammar, Tool, input_schema
from services.frontend.structured.lark_regex import NotRegular, lark_regex
from services.frontend.tool_parsers import lark, reasoning
from services.frontend.tool_parsers.parser import FORMATS, FormatName, ParsePlan


class AnswerGrammar(Struct, frozen=True):
    """The grammar that constrains an answer."""

    grammar: str
    """The grammar for the engine."""
    checked: str
    """The grammar of the answer alone, with its marks spelled out as text, since it is checked with a vocabulary that
    has none. Empty if nothing in the grammar comes from the request."""
    param: str
    """The field that it comes from."""
    parts: Sequence[ConstraintPart] = ()
    """The grammars in `checked` that come from different fields, to find the one at fault."""


def answer_grammar(
    request: ChatRequest | CompletionRequest,
    plan: ParsePlan,
    tokens: lark.Tokens,
    thought: ReasoningPlan = DEFAULT_REASONING,
    ignored: IgnoredFields = REFUSE,
    *,
    close: bool = False,
) -> AnswerGrammar | None:
    """Return the grammar that constrains an answer, or None. `tokens` are the model's marks; `close`: whether objects
    in schemas are closed.

    Raise InvalidRequest, naming the field."""
    form = _constraint(request, plan, tokens, SchemaReader(ignored, close))
    if form is None and thought.budget is None:
        return None
    param = thought.param if form is None else form.param
    if request.ignore_eos:
        raise field_error("ignore_eos", f"cannot be combined with {param}, which decides where the answer ends")
    named = [] if form is None or form.content is None else [{"name": "content", **form.content}]
    checked = "" if form is None else _text([form.spelled or form.grammar, *named], param)
    if plan.reasoning:
        grammars = _after_reasoning(form, thought, tokens, begun=plan.reasoning_open)
    else:
        assert form is not None, "only models that reason have a budget"
        grammars = [form.grammar]
    return AnswerGrammar(_text([*grammars, *named], param), checked, param, () if form is None else form.parts)


def _text(grammars: Sequence[dict[str, Any]], param: str) -> str:
    text = msgspec.json.encode({"grammars": grammars}).decode()
    if len(text) > structured.GRAMMAR_LIMIT_CHARACTERS:
        why = f"its grammar has {len(text)} characters; the limit is {structured.GRAMMAR_LIMIT_CHARACTERS}"
        raise field_error(param, why)
    return text


# --- the answer


def _constraint(
    request: ChatRequest | CompletionRequest, plan: ParsePlan, tokens: lark.Tokens, schemas: SchemaReader
) -> Constraint | None:
    """Return the constraint of the answer, without reasoning. Raise InvalidRequest."""
    ignored = schemas.ignored
    forms: list[Constraint] = []
    if request.structured_outputs is not None:
        forms.append(structured.structured_outputs_constraint(request.structured_outputs, schemas))
    guided = (request.guided_json, request.guided_regex, request.guided_choice, request.guided_grammar)
    if any(field is not None for field in guided):
        asked = structured.StructuredOutputs(*guided)
        forms.append(structured.structured_outputs_constraint(asked, schemas, "guided_"))
    if (form := structured.response_format_constraint(request.response_format, schemas)) is not None:
        forms.append(form)
    if len(forms) > 1:
        first, second = (one.param.partition(".")[0] for one in forms[:2])
        raise field_error(first, f"cannot be combined with {second}, which constrains the answer already")
    content = forms[0] if forms else None
    if not isinstance(request, ChatRequest) or request.tool_choice == "none":
        return content
    if content is None or not (request.tools or structured.is_forced(request.tool_choice)):
        return _calls(request, plan.calls, tokens, schemas) or content
    if structured.is_forced(request.tool_choice) and not ignored.refuse:  # the answer is calls, so there is no content
        ignored.add(content.param.partition(".")[0])
        return _calls(request, plan.calls, tokens, schemas)
    apart = plan.calls is not None and FORMATS[plan.calls].json_is_never_a_call
    if structured.is_forced(request.tool_choice) or request.response_format is None or not apart:
        why = "cannot be combined with tools that may be called; set tool_choice to none"
        raise field_error(content.param, why, UNSUPPORTED)
    return _calls(request, plan.calls, tokens, schemas, content)


def _calls(
    request: ChatRequest,
    written: FormatName | None,
    tokens: lark.Tokens,
    schemas: SchemaReader,
    content: Constraint | None = None,
) -> Constraint | None:
    """Return the constraint of calls; None if no tool is strict, none must be called and any content is allowed.

    Raise InvalidRequest."""
    tools, choice = request.tools or (), request.tool_choice
    offered, forced = structured.offered(tools, choice), structured.is_forced(choice)
    if not forced and content is None and not any(tool.function.strict for tool in offered):
        return None
    named = choice.name if isinstance(choice, structured.NamedTool) else None
    callable_ = [tool for tool in offered if named in (None, tool.function.name)]
    if not callable_:
        wrong = (
            "there is no tool to call: none was sent, or none of them is served"
            if named is None
            else f"there is no tool named {named!r}"
        )
        raise field_error("tool_choice", wrong)
    assert written is not None, "a request with tools for such a model has been refused"
    how: lark.AnswerKind = "any" if content is None else "or"
    if forced:
        how = "one" if named is not None or request.parallel_tool_calls is False else "some"
    places = {
        tool.function.name: f"tools[{at}].{tool.place}."
        + ("format" if isinstance(tool.function, CustomFunction) else "parameters")
        for at, tool in enumerate(tools)
    }
    calls = [
        lark.CallableTool(tool.function.name, _arguments(tool, places[tool.function.name], schemas, forced=forced))
        for tool in callable_
    ]
    try:
        rules, spelled = (FORMATS[written].rules(calls, marks, how) for marks in (tokens, {}))
    except lark.UnsupportedSchema as wrong_:
        param = f"{places[wrong_.tool]}.{wrong_.place}"
        raise field_error(param, str(wrong_), UNSUPPORTED) from None
    pieces = [{"lark_grammar": "\n".join(one)} for one in (rules, spelled)]
    parts = [] if content is None else [ConstraintPart(content.grammar, content.param)]
    parts += [
        ConstraintPart(json_grammar(call.arguments), places[call.name]) for call in calls if call.arguments is not None
    ]
    return Constraint(pieces[0], "tools", pieces[1], None if content is None else content.grammar, parts)


def _arguments(tool: Tool, where: str, schemas: SchemaReader, *, forced: bool) -> dict[str, Any] | None:
    """Return the schema that a call's arguments must follow: the tool's if the call is forced or the tool is strict."""
    parameters = tool.function.parameters
    if not forced and not tool.function.strict:
        return None
    if isinstance(tool.function, CustomFunction):
        return _input(tool.function.grammar, where, schemas.ignored)
    if not parameters:
        return NO_ARGUMENTS
    return {"type": "object", "properties": {}, **schemas.served(parameters, where)}


def _input(grammar: InputGrammar | None, where: str, ignored: IgnoredFields) -> dict[str, Any]:
    """Return the schema of a custom tool's arguments. A grammar that no regular expression can stand for is ignored.
    Raise InvalidRequest."""
    if grammar is None:
        return input_schema()
    try:
        regex = lark_regex(grammar.definition) if grammar.syntax == "lark" else grammar.definition
    except NotRegular as why:
        ignored.add_or_raise(re.sub(r"\[\d+\]", "[]", where), field_error(where, f"the grammar is not served: {why}"))
        return input_schema()
    return input_schema(pattern=f"^(?:{regex})$")


NO_ARGUMENTS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


# --- the reasoning before it

_BYTES = r"(?s-u:[\x00-\xfe]*)"
"""Any bytes, since a budget may end within a character; no special tokens, which begin with 0xFF."""


def _after_reasoning(
    form: Constraint | None, thought: ReasoningPlan, tokens: lark.Tokens, *, begun: bool
) -> list[dict[str, Any]]:
    """Return grammars for reasoning and the answer after it. `form` None: any answer; `begun`: the prompt ends within
    reasoning. Raise InvalidRequest."""
    named = [] if form is None else [{"name": "answer", **form.grammar}]
    if not {reasoning.OPEN, reasoning.CLOSE} <= tokens.keys():
        if thought.budget is not None:
            why = "this model ends its reasoning with several tokens, which cannot be forced"
            raise field_error(thought.param, why, UNSUPPORTED)
        start = "thought white @answer" if begun else '("<think>" thought white)? @answer'
        rules = [f"start: {start}", "thought[lazy]: /(.|\\n)*<\\/think>/", _WHITE]  # lazy: up to the first tag
        return [{"lark_grammar": "\n".join(rules)}, *named]
    opening, closing = f"<[{tokens[reasoning.OPEN]}]>", f"<[{tokens[reasoning.CLOSE]}]>"
    limit = "" if thought.budget is None else f"[max_tokens={thought.budget}]"
    thinks = f"{opening}? " if begun else f"{opening} "
    thinks += closing if thought.budget == 0 else f"thought {closing}"
    if form is not None:
        start = f"{thinks} white @answer" if begun else f"({thinks} white)? @answer"
    else:  # reasoning that begins later would not be limited
        start = f"{thinks} <[*]>*" if begun else f"{thinks} <[*]>* | <[^{tokens[reasoning.OPEN]}]>*"
    rules = [
        '%llguidance {"allow_invalid_utf8": true}',
        f"start: {start}",
        f"thought{limit}: THOUGHT",
        f"THOUGHT: /{_BYTES}/ & ~/{_BYTES}<\\/think>{_BYTES}/",
        _WHITE,
    ]
    return [{"lark_grammar": "\n".join(rules)}, *named]


_WHITE = "white: /[ \\n]{0,4}/"
