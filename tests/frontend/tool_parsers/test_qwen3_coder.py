from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.frontend.tool_parsers import lark
from services.frontend.tool_parsers.parser import ParsePlan
from services.frontend.tool_parsers.qwen3_coder import rules, value_types
from tests.frontend.tool_parsers.following import TOKENS, fits
from tests.frontend.tool_parsers.transcripts import Answer, every_cut, one, read, text

PLAN = ParsePlan("qwen3_coder")
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "unit": {"enum": ["C", "F"]},
        "days": {"type": "integer"},
        "least": {"type": "number"},
        "hourly": {"type": "boolean"},
        "tags": {"type": "array"},
        "more": {"$ref": "#/$defs/More"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "place": {"type": ["string", "integer", "object"]},
        "none": {"type": "null"},
    },
    "$defs": {"More": {"type": "object"}},
}
SCHEMAS = {"weather": WEATHER}


def given_as(key: str, value: str) -> str:
    return f"<parameter={key}>\n{value}\n</parameter>\n"


def call(*parameters: str, name: str = "weather") -> str:
    return f"<tool_call>\n<function={name}>\n{''.join(parameters)}</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("key", "value", "meant"),
    [
        ("city", "Zürich", "Zürich"),
        ("city", "12", "12"),
        ("city", "null", "null"),
        ("city", '"quoted" \\n', '"quoted" \\n'),
        ("city", "\n two\nlines \n", "\n two\nlines \n"),
        ("city", "", ""),
        ("city", "a < </param </parameter> b </function> c", "a < </param </parameter> b </function> c"),
        ("unit", "C", "C"),
        ("days", "3", 3),
        ("days", " -3 \n", -3),
        ("days", "three", "three"),
        ("days", "3 days", "3 days"),
        ("least", "1.5e3", 1500.0),
        ("hourly", "true", True),
        ("hourly", "False", False),
        ("hourly", "yes", "yes"),
        ("tags", '["a", {"b": [1, null]}]', ["a", {"b": [1, None]}]),
        ("tags", "['a', True]", ["a", True]),
        ("tags", "[1, 2", "[1, 2"),
        ("more", '{\n  "x": "</parameter>"\n}', {"x": "</parameter>"}),
        ("note", "None", None),
        ("note", "null", None),
        ("note", "nullable", "nullable"),
        ("place", "12", 12),
        ("place", '{"x": 1}', {"x": 1}),
        ("place", "true", "true"),
        ("none", "null", None),
        ("other", "12", "12"),
    ],
)
def test_a_value_has_the_type_that_its_tools_schema_says(key: str, value: str, meant: object) -> None:
    answer = every_cut(PLAN, call(given_as(key, value)), schemas=SCHEMAS)
    assert answer.outcomes == ["complete"]
    assert [(name, json.loads(arguments)) for name, arguments in answer.calls] == [("weather", {key: meant})]


TWO = Answer("", "", [("weather", '{"city": "Rome", "days": 2}'), ("get_time", "{}")], ["complete", "complete"])
ROME = given_as("city", "Rome") + given_as("days", "2")


@pytest.mark.parametrize(
    "written",
    [
        call(ROME) + "\n" + call(name="get_time"),
        call(ROME) + "</think>\n" + call(name="functions.get_time"),
        f"<function=weather>\n{ROME}</function>\n</tool_call>\n<function=get_time></function>",
        f"<tool_call><function=weather>{ROME}</function><function=get_time> </function></tool_call>",
        f"<tool_call><function=weather>{ROME}</tool_call>{call(name='get_time')}",
        "<tool_call><function=weather><parameter=city>Rome</parameter><parameter=days>2</function></tool_call>"
        + call(name="get_time"),
        '<tool_call>{"name": "weather", "arguments": {"city": "Rome", "days": 2}}</tool_call>' + call(name="get_time"),
    ],
)
def test_calls_are_read_with_the_tags_that_models_leave_out(written: str) -> None:
    assert every_cut(PLAN, written, schemas=SCHEMAS) == TWO


def test_a_call_counts_if_the_model_ends_its_turn_after_its_last_value() -> None:
    written = "I look.<function=weather>\n<parameter=city>\nRome\n</parameter>"
    assert every_cut(PLAN, written, schemas=SCHEMAS) == one("weather", '{"city": "Rome"}', "I look.")
    assert every_cut(PLAN, written, short=True, schemas=SCHEMAS).outcomes == ["unfinished"]


@pytest.mark.parametrize(
    ("written", "outcomes"),
    [
        (call(name="wether"), ["unknown_tool"]),
        ("<function=weather", ["unfinished"]),
        ("<function=weather>\n<param", ["malformed"]),
        ("see <function=weather> in the code", ["malformed"]),
        ("a <function> or a <parameter=x>", []),
        ("<tool_call>weather</tool_call>", ["malformed"]),
    ],
)
def test_what_is_no_call_is_text_to_the_letter(written: str, outcomes: list[str]) -> None:
    assert every_cut(PLAN, written, schemas=SCHEMAS) == text(written, *outcomes)


@pytest.mark.parametrize(("key", "begun"), [("city", '{"city": "Rome'), ("tags", '{"tags": "Rome')])
def test_a_call_that_ends_within_a_value_is_unfinished(key: str, begun: str) -> None:
    written = f"<tool_call>\n<function=weather>\n<parameter={key}>\nRome"
    assert read(PLAN, [*written], schemas=SCHEMAS) == Answer("", "", [("weather", begun)], ["unfinished"])


def test_a_text_is_passed_on_as_it_comes() -> None:
    begun = "<function=weather><parameter=city>\n" + "x" * 1000
    assert read(PLAN, [*begun], short=True, schemas=SCHEMAS).calls == [("weather", '{"city": "' + "x" * 1000)]


def test_a_call_ends_reasoning() -> None:
    plan = ParsePlan("qwen3_coder", reasoning=True, reasoning_open=True)
    written = "hm <tool_call>\n<function=wether> or " + call(name="get_time")
    answer = Answer("", "hm <tool_call>\n<function=wether> or ", [("get_time", "{}")], ["complete"])
    assert every_cut(plan, written) == answer


@given(st.text(st.characters(codec="utf-8")), st.lists(st.integers(0, 50), max_size=3))
def test_any_text_comes_back_as_it_was_written(value: str, cuts: list[int]) -> None:
    written = call(given_as("city", value))
    pieces = [written[start:end] for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), None], strict=True)]
    [(_, arguments)] = read(PLAN, pieces, schemas=SCHEMAS).calls
    assert json.loads(arguments) == {"city": value}


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        (None, set()),
        ([1], set()),
        ({}, set()),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"const": 1.5}, {"number"}),
        ({"enum": ["a", None, True]}, {"string", "null", "boolean"}),
        ({"oneOf": [{"type": "string"}, {"$ref": "#/definitions/a"}]}, {"string", "object"}),
        ({"allOf": [{"$ref": "#/definitions/a"}]}, {"object"}),
        ({"$ref": "#/definitions/loop"}, set()),
        ({"$ref": "#/definitions/away"}, set()),
        ({"$ref": "https://example.org"}, set()),
        ({"type": 1, "anyOf": 2, "enum": 3}, set()),
    ],
)
def test_the_types_of_an_argument_are_found_wherever_its_schema_says_them(schema: object, types: set[str]) -> None:
    loop = {"anyOf": [{"$ref": "#/definitions/loop"}]}
    root = {"properties": {"x": schema}, "definitions": {"a": {"type": "object"}, "loop": loop}}
    assert value_types(root, "x") == types
    assert value_types({"properties": [schema]}, "x") == set()


def held(schema: dict[str, Any] | None, tokens: lark.Tokens, how: lark.AnswerKind = "some") -> str:
    grammar = "\n".join(rules([lark.CallableTool("weather", schema)], tokens, how))
    return json.dumps({"grammars": [{"lark_grammar": grammar}]})


@pytest.mark.parametrize("tokens", [{}, TOKENS], ids=["spelled", "tokens"])
def test_a_forced_call_is_written_in_the_tags_that_the_model_has_learned(tokens: lark.Tokens) -> None:
    asked = {**WEATHER, "required": ["city"]}
    forced = held(asked, tokens)
    for fine in (
        call(given_as("city", "any\n<b>text</b>")),
        call(given_as("city", "Rome"), given_as("unit", "F"), given_as("days", "2"), given_as("tags", '["a"]')),
        call(given_as("city", "Rome"), given_as("note", "null")) + "\n" + call(given_as("city", "Bonn")),
    ):
        asked_of = held({**asked, "properties": {**WEATHER["properties"], "place": {"type": "integer"}}}, tokens)
        assert fits(asked_of, fine, tokens), fine
        assert not fits(forced, fine, tokens), "a value that is a text or a number cannot be told apart in tags"
        for wrong in (fine.replace("city", "town"), fine.replace("weather", "wether"), "hi " + fine):
            assert not fits(asked_of, wrong, tokens), wrong
    assert not fits(asked_of, call(given_as("unit", "F")), tokens)
    assert not fits(asked_of, call(given_as("city", "Rome"), given_as("days", "two")), tokens)
    assert fits(held(None, tokens, "any"), "Well. " + call(given_as("x", "y")) + " ok", tokens)


@pytest.mark.parametrize(
    ("key", "schema", "more"),
    [
        ("a", {"type": "string", "pattern": "^x+$"}, {}),
        ("a", {"type": "string"}, {"required": ["a"], "minProperties": 1}),
        ("a>b", {"type": "string"}, {}),
        ("a", {}, {}),
    ],
)
def test_what_raw_text_cannot_be_held_to_is_called_as_hermes_writes_it(
    key: str, schema: dict[str, Any], more: dict[str, Any]
) -> None:
    forced = held({"type": "object", "properties": {key: schema}, **more}, {})
    assert not fits(forced, call(given_as(key, "x")), {})
    arguments = json.dumps({key: "x"})
    assert fits(forced, f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>', {})


def test_the_tag_that_begins_a_call_is_no_text_of_a_held_answer() -> None:
    assert not fits(held(None, {}, "any"), "see <function=weather>", {})


def test_a_value_of_many_tags_that_end_nothing_is_read_at_once() -> None:
    """Each tag was searched for in all of the rest: 20 s for a megabyte."""
    value = "</parameter>" * 80_000
    [(_, arguments)] = read(PLAN, [call(given_as("city", value + "."))], schemas=SCHEMAS).calls
    assert json.loads(arguments) == {"city": value + "."}
