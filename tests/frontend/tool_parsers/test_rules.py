"""Parsers read what the grammars of calls admit: random walks through grammars of random tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.frontend.tool_parsers import lark
from services.frontend.tool_parsers.parser import FORMATS, FormatName, ParsePlan
from services.frontend.tool_parsers.pythonic import rules as pythonic_rules
from tests.frontend.tool_parsers.following import TOKENS, fits, follows, walk
from tests.frontend.tool_parsers.transcripts import NAMES, read
from tests.json_schemas import SCHEMAS, holds, object_of

FORMAT_NAMES: list[FormatName] = sorted(FORMATS)
LIMITED = st.dictionaries(st.text("abcdefg_", min_size=1, max_size=6), SCHEMAS, max_size=3)
TOOLS = st.dictionaries(
    st.sampled_from(sorted(NAMES)), st.builds(object_of, LIMITED, st.integers(0, 3)), min_size=1, max_size=3
)
BEGUN: Mapping[FormatName, str] = {
    "hermes": "Well.<tool_call>",
    "llama3_json": "Well.<|python_tag|>",
    "mistral": "Well.[TOOL_CALLS]",
    "pythonic": "[",
    "qwen3_coder": "Well.<tool_call>",
}
"""Texts after which, or with which, a call begins."""


def grammar(
    name: FormatName, tools: Mapping[str, dict[str, Any] | None], tokens: lark.Tokens, how: lark.AnswerKind
) -> str:
    calls = [lark.CallableTool(tool, schema) for tool, schema in tools.items()]
    return json.dumps({"grammars": [{"lark_grammar": "\n".join(FORMATS[name].rules(calls, tokens, how))}]})


@given(
    st.sampled_from(FORMAT_NAMES),
    TOOLS,
    st.booleans(),
    st.sampled_from(["one", "some", "any"]),
    st.integers(0, 2**32),
)
@settings(
    max_examples=150,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
def test_whatever_a_grammar_admits_is_parsed_as_calls_that_follow_their_schemas(
    name: FormatName, tools: dict[str, dict[str, Any]], with_tokens: bool, how: lark.AnswerKind, seed: int
) -> None:
    tokens = {mark: TOKENS[mark] for mark in FORMATS[name].marks} if with_tokens else {}
    written = walk(grammar(name, tools, tokens, how), seed, BEGUN[name] if how == "any" else "", tokens)
    answer = read(ParsePlan(name), [written], schemas=tools)
    assert answer.calls, written
    assert how != "one" or len(answer.calls) == 1
    assert answer.outcomes == ["complete"] * len(answer.calls), written
    for called, arguments in answer.calls:
        assert holds(json.loads(arguments), tools[called]), (called, arguments, written)
    assert how == "any" or not answer.content


@given(st.sampled_from(FORMAT_NAMES), st.booleans(), st.integers(0, 2**32))
@settings(max_examples=100)
def test_a_free_text_that_is_no_call_is_read_as_text(name: FormatName, with_tokens: bool, seed: int) -> None:
    tokens = {mark: TOKENS[mark] for mark in FORMATS[name].marks} if with_tokens else {}
    rules = FORMATS[name].rules([lark.CallableTool("weather", None)], tokens, "any")
    held = json.dumps({"grammars": [{"lark_grammar": "\n".join(["start: TEXT", *rules[1:]])}]})
    written = walk(held, seed, "", tokens)
    answer = read(ParsePlan(name), [written])
    assert (answer.content, answer.calls) == (written, [])


@pytest.mark.parametrize("name", FORMAT_NAMES)
@pytest.mark.parametrize("tokens", [{}, TOKENS], ids=["spelled", "tokens"])
def test_free_text_may_say_anything_but_a_call_of_another_form(name: FormatName, tokens: lark.Tokens) -> None:
    held = grammar(name, {"weather": None}, tokens, "any")
    fine = ("", "Hello.", "A { or a [ is fine, and <tool too; ü 🚰\n")
    assert all(fits(held, written, tokens) for written in fine)
    assert not follows(held, BEGUN[name] + "?", tokens)
    for mark in FORMATS[name].marks[:1] if tokens else ():
        assert not follows(held, mark, {}), "spelled out, it would be read as one all the same"


def test_what_begins_like_a_call_is_one_where_calls_have_no_mark() -> None:
    cases: list[tuple[FormatName, str]] = [("llama3_json", "{"), ("pythonic", "[")]
    for name, first in cases:
        held = grammar(name, {"weather": None}, {}, "any")
        assert follows(held, first, {})
        assert not follows(held, " " + first, {})
        assert follows(held, " x" + first, {})


def test_mistrals_models_choose_between_their_two_ways() -> None:
    held = grammar("mistral", {"weather": {"type": "object"}}, TOKENS, "some")
    for written in (
        '[TOOL_CALLS] [{"name": "weather", "arguments": {}}]',
        '[TOOL_CALLS][{"name": "weather", "arguments": {}}, {"name": "weather", "arguments": {"a": 1}}]',
        "[TOOL_CALLS]weather[ARGS]{}",
        "[TOOL_CALLS]weather[CALL_ID]0123abcDE[ARGS]{}[TOOL_CALLS]weather[ARGS]{}",
    ):
        assert fits(held, written, TOKENS), written
    assert fits(held, "[TOOL_CALLS]weather[ARGS]{}" * lark.CALLS_LIMIT, TOKENS)
    assert not fits(held, "[TOOL_CALLS]weather[ARGS]{}" * (lark.CALLS_LIMIT + 1), TOKENS)
    assert not fits(held, "[TOOL_CALLS]other[ARGS]{}", TOKENS)
    assert not fits(held, "weather[ARGS]{}", TOKENS)


def test_pythons_arguments_come_in_order_and_those_that_are_not_required_may_be_left_out() -> None:
    schema = object_of({"a": {"type": "boolean"}, "b": {"$ref": "#/$defs/n"}, "c": {"type": "null"}}, 0)
    schema |= {"required": ["b"], "$defs": {"n": {"type": "integer"}}}
    held = grammar("pythonic", {"f": schema}, {}, "some")
    for written in ("[f(b=1)]", "[f(a=True, b=1, c=null)]", "[f(b=1, c=null), f(a=False, b=2)]"):
        assert fits(held, written, {}), written
    for written in ("[f()]", "[f(a=True)]", "[f(b=1, a=True)]", "[f(b=1,)]", "[f(a=true, b=1)]", '[f(b="1")]', "[]"):
        assert not fits(held, written, {}), written
    one = grammar("pythonic", {"f": schema}, {}, "one")
    assert not fits(one, "[f(b=1), f(b=1)]", {})
    free = grammar("pythonic", {"f": schema}, {}, "any")
    assert fits(free, "Well.<function_calls>\nf(b=1)\nf(a=True, b=2)\n</function_calls> ok", {})
    assert not fits(free, "Well.<function_calls>\nf(a=True)\n</function_calls>", {})
    tagged = grammar("pythonic", {"f": None}, TOKENS, "some")
    assert fits(tagged, '<|python_start|>[f(a="x", b=[1]), f()]<|python_end|>', TOKENS)


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_an_answer_that_consists_of_calls_has_a_bounded_number_of_them(name: FormatName) -> None:
    opening, call, between, closing = {
        "hermes": ("", '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>', "\n", ""),
        "llama3_json": ("", '{"name": "f", "parameters": {}}', "; ", ""),
        "mistral": ("[TOOL_CALLS] [", '{"name": "f", "arguments": {}}', ", ", "]"),
        "pythonic": ("[", "f()", ", ", "]"),
        "qwen3_coder": ("", "<tool_call>\n<function=f>\n</function>\n</tool_call>", "\n", ""),
    }[name]
    at_limit, beyond = (
        opening + between.join([call] * count) + closing for count in (lark.CALLS_LIMIT, lark.CALLS_LIMIT + 1)
    )
    held = grammar(name, {"f": {"type": "object"}}, {}, "some")
    assert fits(held, at_limit, {})
    assert not fits(held, beyond, {})
    assert fits(grammar(name, {"f": {"type": "object"}}, {}, "any"), beyond, {}), "calls that the model chooses to make"


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"anyOf": [{"required": ["a"]}]}, "anyOf"),
        ({"properties": []}, "properties"),
        ({"properties": {"a-b": {}}}, "properties.a-b"),
        ({"properties": {"a": True}}, "properties.a"),
        ({"properties": {"a" * 257: {}}}, ("properties." + "a" * 257)[: lark.PLACE_LIMIT_CHARACTERS]),
        ({"properties": {}, "required": ["a"]}, "required"),
        ({"properties": {"a": {}}, "required": [["a"]]}, "required"),
        ({"minProperties": 1, "allOf": []}, "allOf"),
        ({"properties": {}, "required": "a"}, "properties"),
    ],
)
def test_what_cannot_be_written_as_python_is_named(schema: dict[str, Any], word: str) -> None:
    with pytest.raises(lark.UnsupportedSchema) as refused:
        pythonic_rules([lark.CallableTool("f", schema)], {}, "some")
    assert (refused.value.tool, refused.value.place) == ("f", word)
