"""JSON Schemas of Structs, as the OpenAPI document has them: msgspec's own, less what says nothing. Pure.

request   fields of type `Unset` are left out: whatever they say asks for nothing, or is refused
answer    a field with a default is always written, so it is required; one that may be UNSET is not
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import Struct, UnsetType, inspect

Schema = dict[str, Any]
_REF = "#/components/schemas/{name}"
_NOTHING: Schema = {}
"""What fits no value, as `Unset` has it."""
_ANYTHING: Schema = {"description": "Anything; it is not read."}


def components(requests: Sequence[type[Struct]], answers: Sequence[type[Struct]]) -> dict[str, Schema]:
    """By name, of these Structs and all that they hold. No two Structs may have one name; one that is in requests too
    is told as it is there."""
    _, found = msgspec.json.schema_components([*requests, *answers], schema_hook=_any, ref_template=_REF)
    asked = set(_structs(requests))
    optional = {one.__name__: _optional(one) for one in _structs(answers) if one not in asked}
    return {name: _told(schema, optional.get(name)) for name, schema in sorted(found.items())}


def ref(struct: type[Struct]) -> Schema:
    """Where its schema stands."""
    return {"$ref": _REF.format(name=struct.__name__)}


def _any(type_: type) -> Schema:
    if type_ is object:
        return _ANYTHING
    raise NotImplementedError(type_)


def _told(schema: Schema, optional: frozenset[str] | None) -> Schema:
    """`optional`: of an answer, the fields that may be missing; None: of a request."""
    told: Schema = _plain(schema)
    if optional is not None and "properties" in told:
        told["required"] = [name for name in told["properties"] if name not in optional]
    return told


def _plain(schema: Any) -> Any:
    """Without names as titles, null as default, and fields that nothing fits; with patterns as ECMA 262 has them."""
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
            plain["const"] = value[0]  # generators of clients take an enum of true or false for none of theirs
        elif word not in ("title", "enum", "default") and not (word == "required" and not value):
            plain[word] = _plain(value)
        elif word == "enum" or (word == "default" and value is not None):
            plain[word] = value
    return plain


def _structs(roots: Iterable[type[Struct]]) -> list[type[Struct]]:
    """These, and all that they hold."""
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
    """The fields that may be UNSET, by their names in JSON."""
    hints = get_type_hints(struct)
    names = zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True)
    return frozenset(encoded for name, encoded in names if UnsetType in get_args(hints[name]))
