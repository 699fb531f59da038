"""Schemas as generators write them become ones that the grammar library compiles, and allow what they allowed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from llguidance import LLTokenizer, TokenizerWrapper

from services.frontend.protocol.served_schema import FORMATS, STEPS, closed_schema, served_schema
from services.frontend.protocol.structured import json_grammar
from services.frontend.structured.compiler_process import ByteVocabulary, compile_error

Schema = dict[str, Any]
TEXT: Schema = {"type": "string"}
TOKENIZER = LLTokenizer(TokenizerWrapper(ByteVocabulary()))


def error(schema: Schema) -> str:
    return compile_error(TOKENIZER, msgspec.json.encode({"grammars": [json_grammar(schema)]}).decode())


def tagged(value: str, **more: Schema) -> Schema:
    """An object that a constant tells apart from others."""
    properties = {"kind": {"const": value}, **more}
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


def pair(one: Schema, other: Schema, **more: Any) -> Schema:
    """Two schemas by reference, of which a value fits one."""
    return {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}], "$defs": {"A": one, "B": other}, **more}


def test_the_library_follows_the_known_formats_and_refuses_others() -> None:
    assert {name for name in FORMATS if error({**TEXT, "format": name})} == set()
    others = ("uri-reference", "json-pointer", "regex", "idn-email", "iri", "password", "byte", "binary", "ulid", "")
    for name in others:
        asked, dropped = {"properties": {"a": {**TEXT, "format": name, "maxLength": 9}}}, list[str]()
        assert "format" in error(asked)
        assert served_schema(asked, dropped) == {"properties": {"a": {**TEXT, "maxLength": 9}}}
        assert dropped == ["format"]


@pytest.mark.parametrize(
    ("asked", "served"),
    [
        ({"type": "array", "uniqueItems": False, "minItems": 1.0}, {"type": "array", "minItems": 1}),
        ({**TEXT, "pattern": None, "maxLength": None, "format": None}, TEXT),
        ({**TEXT, "$schema": "https://json-schema.org/draft-07/schema", "$id": "#/properties/a"}, TEXT),
        ({**TEXT, "not": False, "then": {}, "minContains": 1, "dependentRequired": {}}, TEXT),
        ({"type": "array", "contains": TEXT, "minContains": 0}, {"type": "array"}),
        ({"type": "integer", "minimum": -(2**63)}, {"type": "integer", "minimum": -(2**63) + 1024}),
        ({"type": "number", "maximum": 1.7976931348623157e308}, {"type": "number", "maximum": 2**63 - 1024}),
        # zod's records
        ({"propertyNames": TEXT, "additionalProperties": TEXT}, {"additionalProperties": TEXT}),
        (
            {"propertyNames": {**TEXT, "enum": ["a", "b"]}, "additionalProperties": TEXT},
            {"properties": {"a": TEXT, "b": TEXT}, "additionalProperties": False},
        ),
        (
            {"propertyNames": {"pattern": "^x-"}, "additionalProperties": TEXT},
            {"patternProperties": {"^x-": TEXT}, "additionalProperties": False},
        ),
        # TypeSpec's closed objects
        (
            {"properties": {"a": TEXT}, "unevaluatedProperties": {"not": {}}},
            {"properties": {"a": TEXT}, "additionalProperties": False},
        ),
        ({"prefixItems": [TEXT], "unevaluatedItems": False}, {"prefixItems": [TEXT], "items": False}),
        ({"properties": {"a": {"$recursiveRef": "#"}}, "$recursiveAnchor": True}, {"properties": {"a": {"$ref": "#"}}}),
    ],
)
def test_keywords_that_exclude_nothing_are_left_out(asked: Schema, served: Schema) -> None:
    assert error(asked)
    assert served_schema(asked) == served
    assert not error(served)


@pytest.mark.parametrize(
    "asked",
    [
        {"type": "array", "uniqueItems": True},
        {**TEXT, "not": {"const": "x"}},
        {"propertyNames": {"minLength": 2}},
        {"properties": {"a": TEXT}, "allOf": [{"properties": {"b": TEXT}}], "unevaluatedProperties": False},
        {"properties": {"a": TEXT}, "if": {"required": ["a"]}, "then": {"maxProperties": 1}},
    ],
)
def test_a_keyword_that_excludes_something_stays_and_is_refused(asked: Schema) -> None:
    assert served_schema(asked) == asked
    assert error(asked)


def test_what_is_no_schema_stays_as_it_is() -> None:
    """Data, and properties that are named as keywords."""
    data: Schema = {"enum": [{"format": "x", "a": None}], "default": {"oneOf": None}}
    assert served_schema({"properties": {"format": data, "propertyNames": TEXT}}) == {
        "properties": {"format": data, "propertyNames": TEXT}
    }


CHOICE: Schema = {"oneOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/B"}]}
ALIAS: Schema = {"A": {"$ref": "#/$defs/C%20~1"}, "B": tagged("b"), "C /": tagged("c")}
ONLY_A: Schema = {"type": "object", "properties": {"a": TEXT}, "required": ["a"], "additionalProperties": False}
ONLY_B: Schema = {"type": "object", "properties": {"b": TEXT}, "additionalProperties": False}


@pytest.mark.parametrize(
    "asked",
    [
        pair(tagged("a"), tagged("b")),
        pair(tagged("a"), tagged("b"), discriminator={"propertyName": "kind"}),
        pair(tagged("a"), {"type": "null"}),
        pair(tagged("a"), tagged("b", next=CHOICE)),
        pair({"allOf": [{"$ref": "#/$defs/C"}]}, tagged("b")) | {"$defs": ALIAS},
        {"properties": {"default": CHOICE, "enum": {"items": CHOICE}}, "$defs": {"A": tagged("a"), "B": tagged("b")}},
        {"oneOf": [{**TEXT, "enum": ["a"]}, {"const": "b"}, {"type": ["integer", "null"]}]},
        {"oneOf": [{"anyOf": [{"const": 1}, {"const": 2}]}, {"const": 3}]},
        pair(ONLY_A, ONLY_B),
    ],
)
def test_schemas_that_nothing_fits_two_of_are_alternatives(asked: Schema) -> None:
    served = served_schema(asked)
    assert b"oneOf" not in msgspec.json.encode(served)
    assert not error(served)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (tagged("a"), tagged("a")),
        ({"type": "number"}, {"type": "integer"}),
        ({"required": ["a"]}, {"required": ["b"]}),
        ({"properties": {"a": {"const": 1}}}, {"properties": {"a": {"const": 2}}}),  # neither needs it
        ({"const": 1}, {"const": 1.0}),
        ({"$ref": "https://elsewhere.example/a"}, tagged("b")),
        ({"$ref": "#/$defs/A"}, tagged("b")),  # itself
    ],
)
def test_schemas_that_a_value_may_fit_both_are_refused(one: Schema, other: Schema) -> None:
    served = served_schema(asked := pair(one, other))
    assert served == asked
    assert "coerce" not in error(served)


def test_the_error_about_one_of_says_any_of() -> None:
    assert error(pair(tagged("a"), tagged("a"))).endswith("use anyOf")


def test_a_comparison_that_takes_long_is_given_up() -> None:
    many = [tagged(f"{number}") for number in range(STEPS // 4)]
    assert served_schema({"oneOf": many}) == {"oneOf": many}


LISTS = [{"enum": [*range(first, first + 5000)]} for first in (0, 5000)]


@pytest.mark.parametrize(
    "hostile",
    [
        {"oneOf": [{"$ref": "#/$defs/a"}] * 2, "$defs": {"a": {"allOf": [{"$ref": "#/$defs/a"}] * 9}}},
        {"oneOf": LISTS},
        {"properties": {f"p{at}": {"oneOf": [{"$ref": "#/$defs/0"}, {"$ref": "#/$defs/1"}]} for at in range(500)}}
        | {"$defs": dict(zip("01", LISTS, strict=True))},
        {"oneOf": [{"enum": [[number] for number in range(first, first + 5000)]} for first in (0, 5000)]},
    ],
    ids=["references in references", "long lists", "long lists many times", "lists of lists"],
)
def test_a_schema_that_would_take_very_many_steps_is_answered(hostile: Schema) -> None:
    """Each of these took seconds, the first one for ever."""
    assert served_schema(hostile).keys() <= hostile.keys() | {"anyOf"}


OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
CLOSED: dict[str, Any] = {**OPEN, "additionalProperties": False}


@pytest.mark.parametrize(
    ("schema", "closed"),
    [
        (OPEN, CLOSED),
        ({"type": "array", "items": OPEN}, {"type": "array", "items": CLOSED}),
        ({"properties": {"x": OPEN}}, {"properties": {"x": CLOSED}, "additionalProperties": False}),
        ({"$defs": {"x": OPEN}, "$ref": "#/$defs/x"}, {"$defs": {"x": CLOSED}, "$ref": "#/$defs/x"}),
        ({"anyOf": [OPEN, {"type": "null"}]}, {"anyOf": [CLOSED, {"type": "null"}]}),
        ({"type": "object", "additionalProperties": OPEN}, {"type": "object", "additionalProperties": CLOSED}),
        # a property may be named as a keyword
        (
            {"properties": {"items": OPEN, "allOf": OPEN}},
            {"properties": {"items": CLOSED, "allOf": CLOSED}, "additionalProperties": False},
        ),
    ],
)
def test_an_object_is_closed(schema: dict[str, Any], closed: dict[str, Any]) -> None:
    assert closed_schema(schema) == closed


@pytest.mark.parametrize(
    "schema",
    [
        {},
        {"type": "object"},
        {"type": "object", "properties": {}},
        {**OPEN, "additionalProperties": True},
        {**OPEN, "additionalProperties": {"type": "string"}},
        {**OPEN, "patternProperties": {"^x": {}}},
        {**OPEN, "anyOf": [OPEN, {"required": ["b"]}]},
        {"allOf": [OPEN, {"properties": {"b": {}}}]},
        {"$defs": {"x": OPEN}, "items": {"allOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/x"}]}},
        {**OPEN, "required": ["a", "b"]},
        {"$defs": {"x": OPEN}, "properties": {"kind": {}}, "anyOf": [{"$ref": "#/$defs/x"}]},
        {"$defs": {"x": OPEN}, "properties": {"kind": {}}, "$ref": "#/$defs/x"},
        {"const": OPEN},
        {"enum": [OPEN]},
        {"properties": 5, "items": [], "anyOf": {}},
        {"properties": 5, "required": ["a"]},
        {**OPEN, "required": [[]]},
    ],
)
def test_an_object_is_left_open(schema: dict[str, Any]) -> None:
    assert closed_schema(schema) == schema


def test_objects_of_a_tuple_are_closed_next_to_properties_too() -> None:
    one = {"type": "object", "properties": {"a": {}}}
    closed = one | {"additionalProperties": False}
    given = {"properties": {"x": {"prefixItems": [one]}}, "prefixItems": [one, True]}
    assert closed_schema(given) == {
        "properties": {"x": {"prefixItems": [closed]}},
        "prefixItems": [closed, True],
        "additionalProperties": False,
    }
