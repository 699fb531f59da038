"""JSON Schema, as far as the OpenAPI document uses it: values that fit a schema, and whether a value does."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

Schema = Mapping[str, Any]
_TYPES: dict[str, tuple[type, ...]] = {
    "array": (list,),
    "boolean": (bool,),
    "integer": (int,),
    "null": (type(None),),
    "number": (int, float),
    "object": (dict,),
    "string": (str,),
}
_NAMES = st.text(max_size=8)
_SCALARS = st.none() | st.booleans() | st.integers(-(2**40), 2**40) | st.text(max_size=8)
_ANYTHING = st.recursive(_SCALARS, lambda one: st.lists(one, max_size=3) | st.dictionaries(_NAMES, one, max_size=3))
LONGEST = 6
"""Length of lists and texts that a schema lets be longer."""


def pointed(document: Schema, ref: str) -> Schema:
    """What a `$ref` points at."""
    found: Any = document
    for word in ref.removeprefix("#/").split("/"):
        found = found[word]
    return dict(found)


def values(schema: Schema, document: Schema) -> st.SearchStrategy[Any]:
    """That fit; small ones."""
    if "$ref" in schema:
        return st.deferred(lambda: values(pointed(document, schema["$ref"]), document))
    if "const" in schema:
        return st.just(schema["const"])
    if "enum" in schema:
        return st.sampled_from(schema["enum"])
    if "anyOf" in schema:
        return st.one_of([values(one, document) for one in schema["anyOf"]])
    match schema.get("type"):
        case None:
            return _ANYTHING
        case "null":
            return st.none()
        case "boolean":
            return st.booleans()
        case "integer":
            return st.integers(schema.get("minimum", -(2**63)), schema.get("maximum", 2**63 - 1))
        case "number":
            return _numbers(schema)
        case "string":
            return _texts(schema)
        case "array":
            least = schema.get("minItems", 0)
            most = min(schema.get("maxItems", LONGEST), least + LONGEST)
            return st.lists(values(schema["items"], document), min_size=least, max_size=most)
        case "object":
            return _objects(schema, document)
    raise AssertionError(f"a schema that these tests do not know: {schema}")


def _numbers(schema: Schema) -> st.SearchStrategy[float]:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    return st.floats(
        above if least is None else least,
        schema.get("maximum"),
        exclude_min=above is not None,
        allow_nan=False,
        allow_infinity=False,
    )


def _texts(schema: Schema) -> st.SearchStrategy[str]:
    if "pattern" in schema:
        return st.from_regex(re.sub(r"\$$", r"\\Z", schema["pattern"]))  # Python's $ lets a line's end follow
    least = schema.get("minLength", 0)
    return st.text(min_size=least, max_size=min(schema.get("maxLength", LONGEST), least + LONGEST))


def _objects(schema: Schema, document: Schema) -> st.SearchStrategy[dict[str, Any]]:
    if "properties" in schema:
        fields = {name: values(one, document) for name, one in schema["properties"].items()}
        required = {name: fields.pop(name) for name in schema.get("required", ())}
        return st.fixed_dictionaries(required, optional=fields)
    names = _texts(schema.get("propertyNames", {}))
    more = schema.get("additionalProperties")
    return st.dictionaries(names, values(more, document) if isinstance(more, dict) else _ANYTHING, max_size=3)


def misfit(value: Any, schema: Schema, document: Schema, *, closed: bool = False, where: str = "") -> str | None:
    """Where and why the value does not fit. None if it does. `closed`: no object has a field that its
    schema has not."""
    if "$ref" in schema:
        return misfit(value, pointed(document, schema["$ref"]), document, closed=closed, where=where)
    if "anyOf" in schema:
        found = [misfit(value, one, document, closed=closed, where=where) for one in schema["anyOf"]]
        return None if None in found else f"{where}: fits none: {found}"
    if "const" in schema:
        return None if value == schema["const"] else f"{where}: {value!r} is not {schema['const']!r}"
    if "enum" in schema:
        return None if value in schema["enum"] else f"{where}: {value!r} is none of {schema['enum']}"
    types = schema.get("type", [])
    allowed = [one for name in ([types] if isinstance(types, str) else types) for one in _TYPES[name]]
    if allowed and (type(value) not in allowed):
        return f"{where}: {value!r} is no {types}"
    if isinstance(value, str) and not re.search(schema.get("pattern", ""), value):
        return f"{where}: {value!r} is not of {schema['pattern']}"
    if isinstance(value, list) and "items" in schema:
        each = (
            misfit(one, schema["items"], document, closed=closed, where=f"{where}[{at}]")
            for at, one in enumerate(value)
        )
        return next((one for one in each if one is not None), None)
    if isinstance(value, dict) and "properties" in schema:
        properties: Schema = schema["properties"]
        if missing := set(schema.get("required", ())) - value.keys():
            return f"{where}: without {sorted(missing)}"
        if closed and (more := value.keys() - properties.keys()):
            return f"{where}: with {sorted(more)}"
        each = (
            misfit(one, properties[name], document, closed=closed, where=f"{where}.{name}")
            for name, one in value.items()
            if name in properties
        )
        return next((one for one in each if one is not None), None)
    return None
