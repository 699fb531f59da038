"""Random JSON Schemas, and a check of whether a value conforms to one."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

_WRITABLE = st.characters(max_codepoint=0xFFFF, exclude_categories=["Cs"])
"""SmolLM2 has no tokens for some bytes of rarer characters: a text that must have one it cannot write."""
_KEYS = st.text("abcdefg_", min_size=1, max_size=6)
_LEAVES = st.one_of(
    st.builds(lambda most: {"type": "string", "maxLength": most}, st.integers(0, 8)),
    st.builds(lambda low, n: {"type": "integer", "minimum": low, "maximum": low + n}, *[st.integers(0, 10**6)] * 2),
    st.builds(
        lambda words: {"enum": words}, st.lists(st.text(_WRITABLE, max_size=8), min_size=1, max_size=4, unique=True)
    ),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"const": 7}, {"type": "string", "format": "date"}]),
)


def object_of(inner: dict[str, Any], optional: int) -> dict[str, Any]:
    required = list(inner)[optional:]
    return {"type": "object", "properties": inner, "required": required, "additionalProperties": False}


def _containers(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(object_of, st.dictionaries(_KEYS, inner, max_size=3), st.integers(0, 2)),
        st.builds(lambda items, most: {"type": "array", "items": items, "maxItems": most}, inner, st.integers(0, 2)),
        st.builds(lambda either: {"anyOf": either}, st.lists(inner, min_size=1, max_size=2)),
    )


SCHEMAS = st.recursive(_LEAVES, _containers, max_leaves=4)


def holds(value: Any, schema: dict[str, Any]) -> bool:
    """Tell whether the value fits, by the words that are used here."""
    match schema:
        case {"anyOf": either}:
            return any(holds(value, one) for one in either)
        case {"enum": values}:
            return value in values
        case {"const": only}:
            return bool(value == only)
        case {"type": "object", "properties": properties, "required": required}:
            known = isinstance(value, dict) and set(required) <= value.keys() <= properties.keys()
            return known and all(holds(inner, properties[key]) for key, inner in value.items())
        case {"type": "array", "items": items, "maxItems": most}:
            return isinstance(value, list) and len(value) <= most and all(holds(inner, items) for inner in value)
        case {"type": "integer", "minimum": least, "maximum": most}:
            return type(value) is int and least <= value <= most
        case {"type": "string", **more}:
            return isinstance(value, str) and len(value) <= more.get("maxLength", 10)
        case {"type": "boolean"}:
            return isinstance(value, bool)
        case {"type": "null"}:
            return value is None
        case _:
            raise AssertionError(schema)
