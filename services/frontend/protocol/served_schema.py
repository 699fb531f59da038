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

import msgspec
from msgspec import Struct

FORMATS = frozenset(["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"])
"""The formats of strings that the grammar library follows; it refuses others."""
LARGEST = 2**63 - 1024
"""The largest number that the library takes as a bound: the double before 2⁶³."""
STEPS, STEPS_OF_A_BYTE = 4000, 2
"""Steps of about a microsecond for all comparisons in one schema; a oneOf that would take more stays as it is. A union
of 60 objects with a tag takes 8000."""

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
        found = _with_any_of(found, _Comparison(found))
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


def _with_any_of(schema: Any, comparison: _Comparison) -> Any:
    """Return a schema with anyOf in place of each oneOf of which a value fits one schema at most."""
    if isinstance(schema, list):
        return [_with_any_of(one, comparison) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found: dict[str, Any] = {}
    for word, value in schema.items():
        if word in _OF_NAMES and isinstance(value, dict):
            found[word] = {name: _with_any_of(one, comparison) for name, one in value.items()}
        else:
            found[word] = value if word in _DATA else _with_any_of(value, comparison)
    options = schema.get("oneOf")
    if isinstance(options, list) and "anyOf" not in schema and comparison.all_apart(options):
        found["anyOf"] = found.pop("oneOf")
    return found


class _TooLong(Exception):
    """The steps are used up."""


class _Part(Struct, frozen=True):
    """A schema without those that it refers to or joins."""

    schema: dict[str, Any]
    types: set[str]
    values: frozenset[Any] | None
    """The values that it allows but lists and objects. None means any."""
    joined: list[Any]
    """The lists and objects that it allows, if it has `values`."""


class _Comparison:
    """Compares schemas of one document, within a bound."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._left = STEPS + STEPS_OF_A_BYTE * len(msgspec.json.encode(root))
        self._known: dict[int, list[_Part]] = {}
        """The parts of schemas of the document, by `id`."""

    def all_apart(self, schemas: Sequence[Any]) -> bool:
        """Tell whether surely no value fits two of the schemas. False if it may, or if this takes too long to say."""
        try:
            return all(self._apart(one, other) for at, one in enumerate(schemas) for other in schemas[:at])
        except _TooLong:
            return False

    def _spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            raise _TooLong

    def _apart(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Tell whether surely no value fits both schemas. Raise _TooLong."""
        self._spend(1)
        if depth > DEPTH_LIMIT:
            return False
        if one is False or other is False:
            return True
        ones, others = self._parts(one), self._parts(other)
        if any(self._parts_apart(a, b, depth) for a in ones for b in others):
            return True
        pairs = [(part.schema, other) for part in ones] + [(part.schema, one) for part in others]
        return any(self._options_apart(part, whole, depth) for part, whole in pairs)

    def _options_apart(self, part: dict[str, Any], whole: Any, depth: int) -> bool:
        lists = [part[word] for word in ("anyOf", "oneOf") if isinstance(part.get(word), list)]
        return any(all(self._apart(option, whole, depth + 1) for option in options) for options in lists)

    def _parts_apart(self, one: _Part, other: _Part, depth: int) -> bool:
        self._spend(1)
        types = one.types & other.types
        if not types:
            return True
        if one.values is not None and other.values is not None:
            self._spend(min(len(one.values), len(other.values)) // 8 + len(one.joined) * len(other.joined))
            if one.values.isdisjoint(other.values) and not any(a == b for a in one.joined for b in other.joined):
                return True
        if types != {"object"}:
            return False
        needed = {name for part in (one, other) for name in _list(part.schema, "required") if isinstance(name, str)}
        self._spend(len(needed))
        properties = ((_property(one.schema, name), _property(other.schema, name)) for name in sorted(needed))
        return any(self._apart(*pair, depth + 1) for pair in properties)

    def _parts(self, schema: Any) -> list[_Part]:
        """Return what a value must fit all of: a schema, what it refers to, and those of its allOf."""
        if not isinstance(schema, dict):
            return []
        if id(schema) not in self._known:
            found: dict[int, _Part] = {}
            left: list[Any] = [schema]
            while left:
                self._spend(1)
                one = left.pop()
                if not isinstance(one, dict) or id(one) in found:
                    continue
                found[id(one)] = self._part(one)
                left += reversed(_list(one, "allOf"))
                if isinstance(reference := one.get("$ref"), str):
                    self._spend(len(reference) // 8)
                    left.append(_referred(self._root, reference))
            self._known[id(schema)] = list(found.values())
        return self._known[id(schema)]

    def _part(self, schema: dict[str, Any]) -> _Part:
        values = _values(schema)
        if values is None:
            return _Part(schema, _types(schema), None, [])
        self._spend(len(values))
        joined = [value for value in values if isinstance(value, list | dict)]
        plain = frozenset(value for value in values if not isinstance(value, list | dict))
        return _Part(schema, _types(schema), plain, joined)


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


_DECIDES = ("additionalProperties", "unevaluatedProperties", "patternProperties")
"""Keywords next to `properties` with which an object is left as it is."""
_JOINS_PROPERTIES = ("$ref", "anyOf", "oneOf", "allOf")
"""Keywords that join the properties next to them with those of other schemas."""
_NAMED_SCHEMAS = ("properties", "$defs", "definitions")
"""Keywords whose value has a schema for each name."""
_LISTS = ("anyOf", "oneOf", "prefixItems")


def closed_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema with `additionalProperties: false` where an object declares properties and does not say.

    A schema that joins objects, by `allOf` or by properties next to other schemas, is returned as it is: each part
    would refuse the properties of the others.

    By the letter of JSON Schema an object may have any further properties unless `additionalProperties` says otherwise,
    and small models then write property after property until their tokens end. OpenAI's strict mode demands `false`,
    and most engines assume it.
    """
    return schema if any(_joins(one) for one in _within(schema)) else _closed(schema)


def _joins(schema: dict[str, Any]) -> bool:
    parts = schema.get("allOf")
    if isinstance(parts, list) and len(parts) > 1:
        return True
    return isinstance(schema.get("properties"), dict) and any(word in schema for word in _JOINS_PROPERTIES)


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
        if word in _NAMED_SCHEMAS and isinstance(value, dict):
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
