"""Rewrites JSON Schemas into the keywords that engines' grammars know, without changing what they allow. Pure.

By JSON Schema's rules an unknown `format` is an annotation, and generators write keywords that exclude nothing:

    "format": "ulid"                            left out, and named
    a keyword that is null, uniqueItems: false  left out
    minLength: 1.0                              1
    propertyNames                               left out if it allows all names; else the properties that it allows
    unevaluatedProperties                       additionalProperties, if nothing joins other schemas
    oneOf                                       anyOf, if surely no value fits two of its schemas

What is left and not known is refused when the grammar is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import unquote

FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""The formats of strings that the grammar library follows; it refuses others."""
LARGEST = 2**63 - 1024
"""The largest number that the library takes as a bound: the double before 2⁶³."""
COMPARISONS_LIMIT = 2000
"""Pairs of schemas that are compared for one oneOf; if there are more, it stays as it is."""

_DATA = frozenset(("const", "enum", "default", "examples", "example"))
"""Keywords whose value is data, not a schema."""
_OF_NAMES = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))
_JOINERS = frozenset(("$ref", "$dynamicRef", "anyOf", "oneOf", "allOf", "if", "dependentSchemas", "dependencies"))
_SIZES = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_RENAMED = {"$dynamicRef": "$ref", "$recursiveRef": "$ref", "$dynamicAnchor": "$anchor"}
"""Keywords that mean the same as others within one document."""
_DRAFT = re.compile(
    r"http://json-schema\.org/draft-0[467]/schema#?|https://json-schema\.org/draft/20(19-09|20-12)/schema#?"
)
_ID = re.compile(r"[\w\-.~:/?@!$&'()*+,;=%\[\]]+", re.ASCII)
_ANNOTATIONS = frozenset(("title", "description", "$comment", *_DATA - {"const", "enum"}))
TYPES = ("null", "boolean", "number", "string", "array", "object")
DEPTH_LIMIT = 16
"""Levels of schemas that are followed in a comparison."""


def served_schema(schema: dict[str, Any], dropped: list[str] | None = None) -> dict[str, Any]:
    """Return the schema for a grammar. Add the name of each keyword that was left out although it asks for something
    to `dropped`."""
    found: Any = _rewritten(schema, [] if dropped is None else dropped)
    if found is not False:
        found = _with_any_of(found, found)
    return found if isinstance(found, dict) else schema  # the library says that False allows nothing


def _rewritten(schema: Any, dropped: list[str]) -> Any:
    if isinstance(schema, list):
        return [_rewritten(one, dropped) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for written, value in schema.items():
        word = str(_RENAMED.get(written, written))
        if word in _DATA:
            found[word] = value
        elif word in _OF_NAMES and isinstance(value, dict):
            found[word] = {name: _rewritten(one, dropped) for name, one in value.items()}
        elif value is not None:
            found[word] = _rewritten(value, dropped)
    if "format" in found and (not isinstance(found["format"], str) or found["format"] not in FORMATS):
        del found["format"]
        dropped.append("format")
    if found.get("not") in (True, {}) and len(found) == 1:
        return False
    _drop_idle(found)
    _bound(found)
    _name_properties(found)
    return found


def _drop_idle(schema: dict[str, Any]) -> None:
    """Remove keywords that exclude nothing."""
    idle = [
        *(word for word in ("uniqueItems", "not") if schema.get(word) is False),
        *(word for word in ("dependentRequired", "dependentSchemas", "dependencies") if schema.get(word) == {}),
        *(word for word in ("unevaluatedProperties", "unevaluatedItems") if schema.get(word) in (True, {})),
        *(("if", "then", "else") if "if" not in schema or not schema.keys() & {"then", "else"} else ()),
        "$recursiveAnchor",
    ]
    if "contains" not in schema or (schema.get("minContains") == 0 and "maxContains" not in schema):
        idle += ("contains", "minContains", "maxContains")
    for word, pattern in (("$schema", _DRAFT), ("$id", _ID)):
        if isinstance(value := schema.get(word), str) and not pattern.fullmatch(value):
            idle.append(word)
    for word in idle:
        schema.pop(word, None)


def _bound(schema: dict[str, Any]) -> None:
    """Write sizes as integers, and narrow bounds that are too large for the library."""
    for word in _SIZES:
        if isinstance(value := schema.get(word), float) and value.is_integer():
            schema[word] = int(value)
    for word, least in (("minimum", True), ("exclusiveMinimum", True), ("maximum", False), ("exclusiveMaximum", False)):
        value = schema.get(word)
        if isinstance(value, int | float) and (value < -LARGEST if least else value > LARGEST):
            schema[word] = -LARGEST if least else LARGEST


def _name_properties(schema: dict[str, Any]) -> None:
    """Say by other keywords what `propertyNames`, `unevaluatedProperties` and `unevaluatedItems` say."""
    names = schema.get("propertyNames")
    if isinstance(names, dict):
        names = {word: value for word, value in names.items() if word not in _ANNOTATIONS}
    if names in (True, {}, {"type": "string"}):
        del schema["propertyNames"]
    elif isinstance(names, dict) and not schema.keys() & {"properties", "patternProperties"}:
        values = schema.get("additionalProperties", True)
        told = names.keys() - {"type"}
        named: dict[str, Any] = {}
        if told == {"enum"} and isinstance(names["enum"], list) and all(isinstance(one, str) for one in names["enum"]):
            named = {"properties": dict.fromkeys(names["enum"], values)}
        elif told == {"pattern"}:
            named = {"patternProperties": {names["pattern"]: values}}
        if named:
            del schema["propertyNames"]
            schema |= {**named, "additionalProperties": False}
    for word, same in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
        if word in schema and not schema.keys() & _JOINERS and not isinstance(schema.get("items"), list):
            schema.setdefault(same, schema.pop(word))


# --- oneOf


def _with_any_of(schema: Any, root: dict[str, Any]) -> Any:
    """Return a schema with anyOf in place of each oneOf of which a value fits one schema at most."""
    if isinstance(schema, list):
        return [_with_any_of(one, root) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _OF_NAMES and isinstance(value, dict):
            found[word] = {name: _with_any_of(one, root) for name, one in value.items()}
        else:
            found[word] = value if word in _DATA else _with_any_of(value, root)
    options = schema.get("oneOf")
    if isinstance(options, list) and "anyOf" not in schema and _Comparison(root).all_apart(options):
        found["anyOf"] = found.pop("oneOf")
    return found


class _Comparison:
    """Compares schemas of one document, within a bound."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._root = root
        self._left = COMPARISONS_LIMIT

    def all_apart(self, schemas: Sequence[Any]) -> bool:
        """Tell whether surely no value fits two of the schemas. False: it may, or this takes too long to say."""
        return all(self._apart(one, other) for at, one in enumerate(schemas) for other in schemas[:at])

    def _apart(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Tell whether surely no value fits both schemas."""
        self._left -= 1
        if self._left < 0 or depth > DEPTH_LIMIT:
            return False
        if one is False or other is False:
            return True
        ones, others = list(self._parts(one, 0)), list(self._parts(other, 0))
        return any(self._parts_apart(a, b, depth) for a in ones for b in others) or any(
            self._options_apart(part, whole, depth) for parts, whole in ((ones, other), (others, one)) for part in parts
        )

    def _options_apart(self, part: dict[str, Any], whole: Any, depth: int) -> bool:
        lists = [part[word] for word in ("anyOf", "oneOf") if isinstance(part.get(word), list)]
        return any(all(self._apart(option, whole, depth + 1) for option in options) for options in lists)

    def _parts_apart(self, one: dict[str, Any], other: dict[str, Any], depth: int) -> bool:
        """Compare two schemas without those that they refer to or join."""
        kinds, values = (_types(one), _types(other)), (_values(one), _values(other))
        if not kinds[0] & kinds[1]:
            return True
        if values[0] is not None and values[1] is not None and not any(a == b for a in values[0] for b in values[1]):
            return True
        if kinds[0] & kinds[1] != {"object"}:
            return False
        needed = {name for part in (one, other) for name in _list(part, "required") if isinstance(name, str)}
        return any(self._apart(_property(one, name), _property(other, name), depth + 1) for name in sorted(needed))

    def _parts(self, schema: Any, depth: int) -> Iterator[dict[str, Any]]:
        """Yield the schemas that a value must fit all: a schema, what it refers to, and those of its allOf."""
        if not isinstance(schema, dict) or depth > DEPTH_LIMIT:
            return
        yield schema
        if isinstance(schema.get("$ref"), str):
            yield from self._parts(_referred(self._root, schema["$ref"]), depth + 1)
        for one in _list(schema, "allOf"):
            yield from self._parts(one, depth + 1)


def _types(schema: dict[str, Any]) -> set[str]:
    """Return the types of the values that may fit a schema; an integer is a number."""
    named = schema.get("type", TYPES)
    found = {named} if isinstance(named, str) else set(filter(lambda one: isinstance(one, str), named))
    found = {"number" if one == "integer" else one for one in found}
    values = _values(schema)
    return found if values is None else found & {_type(value) for value in values}


def _type(value: Any) -> str:
    kinds = ((bool, "boolean"), (str, "string"), (int | float, "number"), (list, "array"), (dict, "object"))
    return next((name for kind, name in kinds if isinstance(value, kind)), "null")


def _values(schema: dict[str, Any]) -> list[Any] | None:
    """Return the only values that fit a schema; None if it lists none."""
    return [schema["const"]] if "const" in schema else _list(schema, "enum") if "enum" in schema else None


def _property(schema: dict[str, Any], name: str) -> Any:
    """Return the schema that an object's property must fit."""
    declared = schema.get("properties")
    if isinstance(declared, dict) and name in declared:
        return declared[name]
    return True if "patternProperties" in schema else schema.get("additionalProperties", True)


def _list(schema: dict[str, Any], word: str) -> list[Any]:
    return value if isinstance(value := schema.get(word), list) else []


def _referred(root: Any, reference: str) -> Any:
    """Return what a reference within the document names, `#` or `#/a/b`; None for others."""
    if not reference.startswith("#") or reference[1:2] not in ("", "/"):
        return None
    found = root
    for step in unquote(reference[2:]).split("/") if len(reference) > 1 else ():
        found = found.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(found, dict) else None
    return found
