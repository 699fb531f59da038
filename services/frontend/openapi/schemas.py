"""JSON Schemas of Structs for the OpenAPI document: those of msgspec, without what carries no information. Pure.

request   fields of type `NotBuilt` are left out, since their values ask for nothing or are refused
answer    a field with a default is always written, so it is required; one that may be UNSET is not
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct, UnsetType, inspect

from services.frontend.protocol.decoding import OTHER_TOOL, SERVED_TOOLS
from services.frontend.protocol.tools import Tool

Schema = dict[str, Any]
_REF = "#/components/schemas/{name}"
_NOTHING: Schema = {}
"""The schema under `not` that makes a field fit no value, as `NotBuilt` has it."""
_ANYTHING: Schema = {"description": "Anything; it is not read."}
_KIND: Schema = {"type": "string", "maxLength": 64, "not": {"enum": sorted(filter(None, SERVED_TOOLS))}}
_OTHER_TOOL: Schema = OTHER_TOOL | {"properties": {"type": _KIND}}


def components(requests: Sequence[type[Struct]], answers: Sequence[type[Struct]], *, closed: bool) -> dict[str, Schema]:
    """Return the schemas of these Structs, and of all Structs in them, by name. No two Structs may have the same name.
    A Struct in both requests and answers is described as in requests. `closed`: requests have no other fields, and no
    tools of other types."""
    _, found = msgspec.json.schema_components([*requests, *answers], schema_hook=_any, ref_template=_REF)
    asked = set(_structs(requests))
    optional = {one.__name__: _optional(one) for one in _structs(answers) if one not in asked}
    described = {name: _component(schema, optional.get(name)) for name, schema in sorted(found.items())}
    for schema in () if closed else described.values():
        if schema.get("additionalProperties") is False:
            del schema["additionalProperties"]
        for tools in schema.get("properties", {}).get("tools", {}).get("anyOf", ()):
            if tools.get("items") == ref(Tool):
                tools["items"] = {"anyOf": [ref(Tool), _OTHER_TOOL]}
    return described


def ref(struct: type[Struct]) -> Schema:
    """Return a reference to the schema of a Struct."""
    return {"$ref": _REF.format(name=struct.__name__)}


def _any(type_: type) -> Schema:
    if type_ is object:
        return _ANYTHING
    raise NotImplementedError(type_)


def _component(schema: Schema, optional: frozenset[str] | None) -> Schema:
    """Return a component. `optional`: the fields of an answer that may be missing; None for a request."""
    component: Schema = _plain(schema)
    if optional is not None and "properties" in component:
        component["required"] = [name for name in component["properties"] if name not in optional]
    return component


def _plain(schema: Any) -> Any:
    """Remove titles, null defaults and fields that fit no value; turn patterns into ECMA 262."""
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    plain: Schema = {}
    for word, value in schema.items():
        if word == "properties":
            plain[word] = {name: _plain(one) for name, one in value.items() if one.get("not") != _NOTHING}
        elif word == "pattern":
            plain[word] = value.replace(r"\Z", "$")
        elif word == "enum" and len(value) == 1:
            plain["const"] = value[0]  # code generators do not understand an enum of one boolean
        elif word not in ("title", "enum", "default") and not (word == "required" and not value):
            plain[word] = _plain(value)
        elif word == "enum" or (word == "default" and value is not None):
            plain[word] = value
    return plain


def _structs(roots: Iterable[type[Struct]]) -> list[type[Struct]]:
    """Return these Structs and all Structs in them."""
    found: dict[type[Struct], None] = {}
    waiting: list[Any] = list(inspect.multi_type_info(roots))
    while waiting:
        match waiting.pop():
            case inspect.StructType(cls=cls, fields=fields) if cls not in found:
                found[cls] = None
                waiting += [field.type for field in fields]
            case inspect.UnionType(types=types):
                waiting += types
            case inspect.ListType(item_type=item) | inspect.VarTupleType(item_type=item):
                waiting.append(item)
            case inspect.DictType(value_type=value):
                waiting.append(value)
            case inspect.Metadata(type=inner):
                waiting.append(inner)
            case _:
                pass
    return list(found)


def _optional(struct: type[Struct]) -> frozenset[str]:
    """Return the fields that may be UNSET, by their names in JSON."""
    hints = get_type_hints(struct)
    names = zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    return frozenset(encoded for name, encoded in names if UnsetType in get_args(hints[name]))
