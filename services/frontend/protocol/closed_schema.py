"""Closes JSON Schemas: an object has only the properties that its schema declares. Pure.

By the letter of JSON Schema an object may have any further properties unless `additionalProperties` says otherwise, and
small models then write property after property until their tokens end. OpenAI's strict mode demands `false`, and most
engines assume it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_DECIDES = ("additionalProperties", "unevaluatedProperties", "patternProperties")
"""Keywords next to `properties` with which an object is left as it is."""
_JOINERS = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords that join the properties next to them with those of other schemas."""
_OF_NAMES = ("properties", "$defs", "definitions")
"""Keywords whose value has a schema for each name."""
_LISTS = ("anyOf", "oneOf", "prefixItems")


def closed_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` where an object declares properties and does not say.

    A schema that joins objects, by `allOf` or by properties next to other schemas, is returned as it is: each part
    would refuse the properties of the others.
    """
    return schema if any(_joins(one) for one in _within(schema)) else _closed(schema)


def _joins(schema: dict[str, Any]) -> bool:
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        return True
    return isinstance(schema.get("properties"), dict) and any(word in schema for word in _JOINERS)


def _within(value: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects in a value."""
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _within(inner)


def _closed(schema: Any) -> Any:
    if not isinstance(schema, dict):
        return schema
    closed = dict(schema)
    declared = schema.get("properties")
    declares = isinstance(declared, dict) and bool(declared)
    for word, value in schema.items():
        if word in _OF_NAMES and isinstance(value, dict):
            closed[word] = {name: _closed(one) for name, one in value.items()}
        elif word in _LISTS and isinstance(value, list):
            closed[word] = [_closed(one) for one in value]
        elif word in ("items", "additionalProperties"):
            closed[word] = _closed(value)
    if declares and not any(word in schema for word in _DECIDES) and not _demands_more(schema):
        closed["additionalProperties"] = False
    return closed


def _demands_more(schema: dict[str, Any]) -> bool:
    """Tell whether an object requires a property that it does not declare. It may be no valid schema."""
    required, declared = schema.get("required"), list(schema["properties"])
    return isinstance(required, list) and any(name not in declared for name in required)
