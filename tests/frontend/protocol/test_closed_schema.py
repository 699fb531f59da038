"""Objects that declare properties have no others, unless the schema says so or joins objects."""

from __future__ import annotations

from typing import Any

import pytest

from services.frontend.protocol.closed_schema import closed_schema

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
