from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.reasoning import ReasoningPlan
from services.frontend.structured.grammar import AnswerGrammar, answer_grammar
from services.frontend.tool_parsers.parser import FORMATS, FormatName, ParsePlan
from shared.errors import InvalidRequest
from tests.frontend.tool_parsers.following import EOS, TOKENS, allowed, fits, follows, ids

OBJECT: dict[str, Any] = {"response_format": {"type": "json_object"}}
NUMBER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"], "additionalProperties": False}
CALLS: dict[FormatName, str] = {
    "hermes": '<tool_call>\n{"name": "NAME", "arguments": {"n": 1}}\n</tool_call>',
    "llama3_json": '{"name": "NAME", "parameters": {"n": 1}}',
    "mistral": '[TOOL_CALLS][{"name": "NAME", "arguments": {"n": 1}}]',
    "pythonic": "[NAME(n=1)]",
    "qwen3_coder": "<tool_call>\n<function=NAME>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
}


def request(**fields: Any) -> ChatRequest:
    return msgspec.convert({"messages": [{"role": "user", "content": "x"}], **fields}, ChatRequest)


def tool(name: str, *, strict: bool | None = None) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": NUMBER, "strict": strict}}


def some(found: AnswerGrammar | None) -> str:
    assert found is not None
    return found.grammar


def budgeted(tokens: int, begun: bool = False, /, **fields: Any) -> str:
    return some(
        answer_grammar(
            request(**fields), ParsePlan(reasoning=True, reasoning_open=begun), TOKENS, ReasoningPlan({}, tokens)
        )
    )


@pytest.mark.parametrize("tokens", [{}, TOKENS], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_forced_calls_are_in_the_models_own_format(name: FormatName, tokens: dict[str, int]) -> None:
    tools = [tool("a"), tool("b")]
    plan = ParsePlan(name)
    a, b = (CALLS[name].replace("NAME", called) for called in "ab")
    required = some(answer_grammar(request(tools=tools, tool_choice="required"), plan, tokens))
    assert [fits(required, written, tokens) for written in (a, b, "Hello.", a.replace("1", '"1"'))] == [
        True,
        True,
        False,
        False,
    ]
    only: Any = {"type": "function", "function": {"name": "b"}}
    named = some(answer_grammar(request(tools=tools, tool_choice=only), plan, tokens))
    assert [fits(named, written, tokens) for written in (a, b)] == [False, True]


@pytest.mark.parametrize("tokens", [{}, TOKENS], ids=["spelled", "tokens"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_strict_tools_call_follows_its_schema_even_if_the_model_chooses_to_call(
    name: FormatName, tokens: dict[str, int]
) -> None:
    found = some(answer_grammar(request(tools=[tool("a", strict=True), tool("b")]), ParsePlan(name), tokens))
    a, b, c = (CALLS[name].replace("NAME", called) for called in "abc")
    assert [fits(found, written, tokens) for written in ("Hello.", "", a, b, c)] == [True, True, True, True, False]
    assert not fits(found, a.replace("1", '"1"'), tokens)
    assert fits(found, b.replace("1", '"1"'), tokens), "b is not strict"
    assert answer_grammar(request(tools=[tool("a", strict=True)], tool_choice="none"), ParsePlan(name), tokens) is None
    assert answer_grammar(request(tools=[tool("a", strict=False)]), ParsePlan(name), tokens) is None


def test_reasoning_with_a_budget_ends_with_its_last_token_and_then_anything_follows() -> None:
    for begun, opening in ((False, "<think>"), (True, "")):
        found = budgeted(4, begun)
        for thought in ("", "a", "abcd", "a\nü"):
            assert fits(found, f"{opening}{thought}</think>\n\nYes. <tool_call>[ARGS]", TOKENS), thought
        assert not follows(found, f"{opening}abcde", TOKENS)
        half = follows(found, f"{opening}abc", TOKENS)
        assert half is not None
        assert half.consume_token("ü".encode()[0]), "half a character"
        assert allowed(half) == [TOKENS["</think>"]]
        assert not follows(found, f"{opening}a<|python_tag|>", TOKENS)
        spelled = follows(budgeted(20, begun), opening, TOKENS)
        assert spelled is not None
        assert spelled.try_consume_tokens(list(b"</think>")) == 7, "it would be read as the end all the same"


def test_the_budgets_place_is_the_same_wherever_the_grammar_is_taken_up() -> None:
    output = ids("<think>abcdef</think>", TOKENS)
    for cut in range(len(output)):
        found = follows(budgeted(6), "", TOKENS)
        assert found is not None
        assert found.consume_tokens(output[:cut])
        one_by_one = follows(budgeted(6), "", TOKENS)
        assert one_by_one is not None
        assert all(one_by_one.consume_token(token) for token in output[:cut])
        assert found.compute_bitmask() == one_by_one.compute_bitmask()


def test_a_budget_of_nothing_leaves_the_tags_alone() -> None:
    found = budgeted(0)
    assert fits(found, "<think></think>Yes.", TOKENS)
    assert not follows(found, "<think>a", TOKENS)
    assert fits(budgeted(0, True), "</think>Yes.", TOKENS)


def test_a_model_that_does_not_begin_with_reasoning_may_not_begin_it_later() -> None:
    found = budgeted(5)
    assert fits(found, "Hello. </think>[TOOL_CALLS]", TOKENS)
    assert not follows(found, "Hello.<think>", TOKENS)
    at_once = follows(found, "", TOKENS)
    assert at_once is not None
    assert at_once.is_accepting(), "nothing is an answer too"
    assert at_once.consume_token(EOS)


def test_the_constraint_on_an_answer_begins_after_reasoning() -> None:
    for tokens in (TOKENS, {}):
        found = some(answer_grammar(request(**OBJECT), ParsePlan(reasoning=True), tokens))
        fitting = ("{}", "<think>\nhm</think>\n\n{}", "<think>hm</think>no", "hm</think>{}")
        assert [fits(found, written, tokens) for written in fitting] == [True, True, False, False]
        begun = some(answer_grammar(request(**OBJECT), ParsePlan(reasoning=True, reasoning_open=True), tokens))
        assert [fits(begun, written, tokens) for written in ("hm</think>{}", "{}")] == [True, False]
    limited = budgeted(2, **OBJECT)
    assert fits(limited, "<think>hm</think>{}", TOKENS)
    assert not follows(limited, "<think>hmm", TOKENS)
    call = CALLS["hermes"].replace("NAME", "a")
    forced = answer_grammar(
        request(tools=[tool("a")], tool_choice="required"), ParsePlan("hermes", True), TOKENS, ReasoningPlan({}, 2)
    )
    assert fits(some(forced), f"<think>hm</think>\n\n{call}", TOKENS)


def test_with_tools_a_response_format_constrains_the_content_if_no_content_can_look_like_a_call() -> None:
    a, b = (CALLS["hermes"].replace("NAME", called) for called in "ab")
    asked = request(tools=[tool("a", strict=True), tool("b")], **OBJECT)
    for plan in (ParsePlan("hermes"), ParsePlan("hermes", True)):
        found = some(answer_grammar(asked, plan, TOKENS))
        for written in ('{"x": "<tool_call>"}', a, b.replace("1", '"1"'), f"{a}\n{b}"):
            assert fits(found, written, TOKENS if written[0] == "<" else {}), written
        for written in ("Hello.", "[]", f"{{}}{a}", a.replace("1", '"1"')):
            assert not fits(found, written, TOKENS), written
    assert (
        answer_grammar(request(tools=[tool("a")], response_format={"type": "text"}), ParsePlan("hermes"), TOKENS)
        is None
    )


def test_the_checked_grammar_has_no_token_and_no_reasoning() -> None:
    found = answer_grammar(
        request(tools=[tool("a", strict=True)]), ParsePlan("mistral", True), TOKENS, ReasoningPlan({}, 2)
    )
    assert found is not None
    assert "<[" in found.grammar
    assert "<[" not in found.checked
    assert "think>" not in found.checked
    alone = answer_grammar(request(), ParsePlan(reasoning=True), TOKENS, ReasoningPlan({}, 2))
    assert alone is not None
    assert (alone.checked, alone.param) == ("", "thinking_token_budget")


@pytest.mark.parametrize(
    ("fields", "plan", "tokens", "param"),
    [
        ({"tool_choice": "required"}, ParsePlan(), TOKENS, "tool_choice"),
        (
            {"tools": [tool("a")], "tool_choice": "required", "ignore_eos": True},
            ParsePlan("hermes"),
            TOKENS,
            "ignore_eos",
        ),
        ({"tools": [tool("a")], "tool_choice": "required", **OBJECT}, ParsePlan("hermes"), TOKENS, "response_format"),
        ({"tool_choice": "required", **OBJECT}, ParsePlan(), TOKENS, "response_format"),
        ({"tools": [tool("a")], **OBJECT}, ParsePlan("llama3_json"), TOKENS, "response_format"),
        (
            {"tools": [tool("a")], "structured_outputs": {"regex": "a"}},
            ParsePlan("hermes"),
            {},
            "structured_outputs.regex",
        ),
        ({"structured_outputs": {"regex": "a"}, **OBJECT}, ParsePlan(), TOKENS, "structured_outputs"),
        ({}, ParsePlan(reasoning=True), {}, "thinking_token_budget"),
        ({"ignore_eos": True}, ParsePlan(reasoning=True), TOKENS, "ignore_eos"),
    ],
)
def test_an_impossible_combination_is_refused_by_name(
    fields: dict[str, Any], plan: ParsePlan, tokens: dict[str, int], param: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        answer_grammar(request(**fields), plan, tokens, ReasoningPlan({}, 3 if plan.reasoning else None))
    assert refused.value.param == param


def test_a_schema_that_python_cannot_say_is_named_by_its_tool() -> None:
    odd = {"type": "function", "function": {"name": "b", "parameters": {"properties": {"a-b": {}}}}}
    with pytest.raises(InvalidRequest) as refused:
        answer_grammar(request(tools=[tool("a"), odd], tool_choice="required"), ParsePlan("pythonic"), {})
    assert refused.value.param == "tools[1].function.parameters.properties.a-b"


WORDS = st.sampled_from(["properties", "required", "$defs", "additionalProperties", "anyOf", "a", "type", "title"])
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(FORMATS)), st.dictionaries(WORDS, JSON, max_size=4), st.booleans())
@settings(max_examples=200)
def test_whatever_is_given_as_a_schema_is_a_grammar_or_refused(
    name: FormatName, schema: dict[str, Any], forced: bool
) -> None:
    odd = {"type": "function", "function": {"name": "a", "parameters": schema, "strict": True}}
    try:
        found = answer_grammar(request(tools=[odd], tool_choice="required" if forced else "auto"), ParsePlan(name), {})
    except InvalidRequest as wrong:
        param = wrong.param or ""
    else:
        assert found is not None
        return
    assert param.startswith("tools[0].function.parameters.")


SCHEMA_OF_A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}


def test_objects_of_schemas_are_closed_where_that_is_asked_for() -> None:
    named = {"name": "a", "schema": SCHEMA_OF_A}
    asked: list[dict[str, Any]] = [
        {"response_format": {"type": "json_schema", "json_schema": named}},
        {"structured_outputs": {"json": SCHEMA_OF_A}},
        {"guided_json": json.dumps(SCHEMA_OF_A)},
    ]
    for fields in asked:
        closed = json.loads(some(answer_grammar(request(**fields), ParsePlan(), {}, close=True)))
        opened = json.loads(some(answer_grammar(request(**fields), ParsePlan(), {})))
        assert closed["grammars"][0]["json_schema"].pop("additionalProperties") is False
        assert closed == opened
    function = {"name": "a", "parameters": SCHEMA_OF_A}
    forced = request(tools=[{"type": "function", "function": function}], tool_choice="required")
    assert "additionalProperties" in some(answer_grammar(forced, ParsePlan("hermes"), {}, close=True))
    assert "additionalProperties" not in some(answer_grammar(forced, ParsePlan("hermes"), {}))


@pytest.mark.parametrize(
    ("form", "where"),
    [
        ({"type": "json_schema", "json_schema": {"schema": NUMBER}}, "response_format.json_schema.schema"),
        ({"type": "json_schema", "schema": NUMBER}, "response_format.schema"),
        ({"type": "json_object", "schema": NUMBER}, "response_format.schema"),
    ],
)
def test_a_schema_may_be_where_clients_of_other_servers_have_it(form: dict[str, Any], where: str) -> None:
    found = answer_grammar(request(response_format=form), ParsePlan(), {})
    assert found is not None
    assert found.param == where
    assert [fits(found.grammar, text, {}) for text in ('{"n": 1}', '{"n": "1"}', "{}")] == [True, False, False]


def test_what_is_left_out_of_a_schema_is_named_by_its_place() -> None:
    ignored = IgnoredFields()
    text = {"type": "object", "properties": {"a": {"type": "string", "format": "ulid"}}}
    form = {"type": "json_schema", "json_schema": {"schema": text}}
    answer_grammar(request(response_format=form), ParsePlan(), {}, ignored=ignored)
    tools = [{"type": "function", "function": {"name": "f", "parameters": text}}]
    answer_grammar(request(tools=tools, tool_choice="required"), ParsePlan("hermes"), {}, ignored=ignored)
    assert ignored.names == ("response_format.json_schema.schema.format", "tools[].function.parameters.format")


def test_a_form_without_a_schema_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^response_format\.json_schema: "):
        answer_grammar(request(response_format={"type": "json_schema"}), ParsePlan(), {})
