"""Decodes request bodies; fields without effect are refused or ignored, each by its name. Pure.

A field that is not built has the type `NotBuilt`, a field that only advises has an `Advisory`. Null asks for nothing,
and so do the values that `Harmless` lists:

    background: Annotated[NotBuilt, Harmless(False)] = None
    store: Annotated[bool | None, Advisory(), Harmless(False)] = None

Any other value of a field that is not built is refused with `unsupported_parameter`. Other values of advisory fields,
and fields that are not known at all, are noted in `IgnoredFields`, or refused if that says so.
"""

from __future__ import annotations

import codecs
import gc
import re
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import msgspec
from msgspec import Meta, Struct, inspect

from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.ignored_fields import REFUSE, Advisory, IgnoredFields, alternatives, without_unknown
from shared.errors import InvalidRequest

BODY_LIMIT_BYTES = 4 << 20
LARGE_BODY_BYTES = 64 << 10
"""Bytes from which on a body is decoded with the garbage collector paused."""

_NOT_BUILT = Meta(extra_json_schema={"not": {}})
NotBuilt = Annotated[object, _NOT_BUILT]
"""The type of a field that is only read to refuse it. It is not in the OpenAPI document."""

_PATH = re.compile(r"^(?P<message>.*?)(?: - at (?:`key` in )?`\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_UNKNOWN = "Object contains unknown field"
_FLOAT = re.compile(r"Expected `[^`]*\bint\b[^`]*`, got `float`")
_TOOL = re.compile(
    r"^(?:Invalid enum value|Object contains unknown field) .* - at `\$\.tools\[\d+\](?:\.type)?`$", re.DOTALL
)
"""What is wrong about a tool of a list that may only hold those of SERVED_TOOLS."""
SERVED_TOOLS = frozenset({None, "function", "custom"})
"""The types of tools in a chat; without one it is a function."""
OTHER_TOOL = {
    "description": "A tool that a provider runs, or of a type that is not known: ignored and named",
    "type": "object",
    "properties": {"type": {"type": "string", "maxLength": 64}, "name": {"type": "string"}},
    "required": ["type"],
}
"""The schema of a tool that is not served, for the OpenAPI document."""
MENDS_LIMIT = 4
"""How often a body is decoded again without what may be ignored, or with its whole numbers as integers."""
_VALUE = re.compile(r"Invalid (?:enum )?value '(\w+)'")
_NAME = re.compile(r"Expected `str` matching regex '\^\[a-zA-Z0-9_-\]\{1,(?P<most>\d+)\}\\+Z'")
_STEP = re.compile(r"\[[^\]]*\]|[^.\[]+")
WORDS_SHOWN = 16
"""Allowed words that an error lists at most."""
NOT_SERVED = {
    **dict.fromkeys(("image", "image_url", "input_image", "image_generation"), "images"),
    **dict.fromkeys(("audio", "audio_url", "input_audio"), "sounds"),
    **dict.fromkeys(("video", "video_url"), "videos"),
    **dict.fromkeys(("document", "file", "input_file"), "files"),
    **dict.fromkeys(("web_search", "web_search_preview", "file_search", "code_interpreter"), "tools of the server"),
    **dict.fromkeys(("computer_use_preview", "mcp", "local_shell", "shell", "custom"), "tools of this kind"),
}
"""Values of `type` that OpenAI's API has → what is not served."""
_FIELD = re.compile(r"(?:unknown|required) field `(?P<field>[^`]*)`")


class Harmless:
    """The values of a field, in addition to null, that ask for nothing and so are accepted."""

    def __init__(self, *values: object) -> None:
        self.values = values


def check_not_built(struct: Struct, where: str = "", ignored: IgnoredFields = REFUSE) -> None:
    """Refuse fields of a Struct that are not built, and note those that advise; `where` is its own place in the body,
    with a dot at its end.

    Raise InvalidRequest for the first field that asks for something that is not built.
    """
    for fields, noted in ((fields_not_built(type(struct)), REFUSE), (advisory_fields(type(struct)), ignored)):
        for field, harmless in fields.items():
            value = getattr(struct, field)
            # `1 == True` in Python, but a flag is not a count.
            if value is None or any(
                value == one and isinstance(value, bool) == isinstance(one, bool) for one in harmless
            ):
                continue
            noted.add_or_raise(where + field, not_supported(where + field))


@cache
def fields_not_built(struct: type[Struct]) -> Mapping[str, tuple[object, ...]]:
    """Return each field of type `NotBuilt` with its harmless values, in the order of the fields."""
    return _marked(struct, lambda mark: mark is _NOT_BUILT)


@cache
def advisory_fields(struct: type[Struct]) -> Mapping[str, tuple[object, ...]]:
    """Return each advisory field with its harmless values, in the order of the fields."""
    return _marked(struct, lambda mark: isinstance(mark, Advisory))


def _marked(struct: type[Struct], chosen: Callable[[object], bool]) -> Mapping[str, tuple[object, ...]]:
    hints = get_type_hints(struct, include_extras=True)
    metadata = {field: getattr(hints[field], "__metadata__", ()) for field in struct.__struct_fields__}
    return {
        field: tuple(value for mark in marks if isinstance(mark, Harmless) for value in mark.values)
        for field, marks in metadata.items()
        if any(map(chosen, marks))
    }


def not_supported(field: str) -> InvalidRequest:
    """Return the error for a field, or a value of it, that is not built."""
    return field_error(field, "this value is not supported yet", UNSUPPORTED)


def part_not_served(field: str, kind: str) -> InvalidRequest:
    """Return the error for a part of a message whose type is not built."""
    return field_error(field, f"{kind}: {NOT_SERVED[kind]} are not served", "unsupported_value")


def body_too_large(size_bytes: int | None) -> InvalidRequest:
    """Return the error for a body over the limit. `size_bytes` None: its size is not known."""
    size = "" if size_bytes is None else f" of {size_bytes} bytes"
    return InvalidRequest(
        f"the body{size} is over the limit of {BODY_LIMIT_BYTES} bytes", code="request_too_large", status=413
    )


R = TypeVar("R")
_decoder: Callable[[Any], Any] = cache(msgspec.json.Decoder)


def decode_body(
    kind: type[R],
    body: bytes,
    ignored: IgnoredFields = REFUSE,
    where: str = "",
    *,
    limit_bytes: int = BODY_LIMIT_BYTES,
) -> R:
    """Decode a JSON body, without the fields that it may ignore; `where` is its own place, if it is part of another. A
    byte order mark before it is skipped, and 8.0 is an integer.

    Raise InvalidRequest, naming the field."""
    body = body.removeprefix(codecs.BOM_UTF8)
    if len(body) > limit_bytes:
        raise body_too_large(len(body))
    # 4 MiB of brackets are 1.4 million lists, which the collector would scan repeatedly: 0.8 s instead of 0.3.
    paused = len(body) > LARGE_BODY_BYTES and gc.isenabled()
    if paused:
        gc.disable()
    decode: Callable[[bytes], R] = _decoder(kind).decode
    try:
        for _ in range(MENDS_LIMIT):
            try:
                return decode(body)
            except msgspec.ValidationError as wrong:
                body = _mended(str(wrong), body, kind, where, ignored)
        return decode(body)
    except msgspec.ValidationError as wrong:
        raise _invalid(str(wrong), where, kind) from None
    except msgspec.DecodeError as wrong:
        if not body.strip():
            raise InvalidRequest("the body is empty; send JSON") from None
        raise InvalidRequest(f"the body is not JSON: {wrong}") from None
    except UnicodeDecodeError as wrong:
        raise InvalidRequest(f"the body is not UTF-8: {wrong.reason} 0x{wrong.object[wrong.start]:02x}") from None
    except RecursionError:
        raise InvalidRequest("the body is nested too deeply") from None
    finally:
        if paused:
            gc.enable()


def _mended(wrong: str, body: bytes, type_: type, where: str, ignored: IgnoredFields) -> bytes:
    """Return a body without the tools that are not served, without its unknown fields, or with integers in place of
    whole numbers that are written as 8.0, in one object or list. Raise ValidationError again if nothing mends it."""
    if _TOOL.match(wrong) and not ignored.refuse and (left := _without_other_tools(body, ignored)) is not None:
        return left
    if wrong.startswith(_UNKNOWN) and not ignored.refuse:
        return without_unknown(body, type_, where, ignored)
    found, path = _FLOAT.match(wrong), _PATH.match(wrong)
    if found is None or path is None or "..." in (path["path"] or ""):
        raise msgspec.ValidationError(wrong)
    whole = msgspec.json.decode(body)
    holder, steps = whole, _STEP.findall(path["path"])
    for step in steps[:-1]:
        holder = holder[int(step[1:-1])] if step.startswith("[") else holder[step]
    items = list(holder.items() if isinstance(holder, dict) else enumerate(holder))
    integers = [at for at, value in items if isinstance(value, float) and value.is_integer() and abs(value) < 2**53]
    if (int(steps[-1][1:-1]) if isinstance(holder, list) else steps[-1]) not in integers:
        raise msgspec.ValidationError(wrong)
    for at in integers:
        holder[at] = int(holder[at])
    return msgspec.json.encode(whole)


class _Kind(Struct):
    type: Annotated[str, Meta(max_length=64)] | None = None


class _Kinds(Struct):
    tools: list[_Kind]


def _without_other_tools(body: bytes, ignored: IgnoredFields) -> bytes | None:
    """Return a body without the tools that a provider's server would run, and note their types; None if it has none.
    Errors count the tools that are left. Raise ValidationError if a type is no text."""
    kinds = [one.type for one in msgspec.json.decode(body, type=_Kinds).tools]
    others = [kind for kind in kinds if kind not in SERVED_TOOLS]
    if not others:
        return None
    for kind in others:
        ignored.add(f"tools[].{kind}")
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    tools = zip(kinds, msgspec.json.decode(fields["tools"], type=list[msgspec.Raw]), strict=True)
    fields["tools"] = msgspec.Raw(msgspec.json.encode([raw for kind, raw in tools if kind in SERVED_TOOLS]))
    return msgspec.json.encode(fields)


def _invalid(message: str, where: str, type_: type) -> InvalidRequest:
    """Turn msgspec's message with its path, `Expected … - at `$.messages[0].role``, into OpenAI's message and param.

    `type_` is the type of the body, in which the allowed words are looked up."""
    found = _PATH.match(message)
    assert found is not None, "the pattern matches any text"
    path, said = found["path"] or "", found["message"]
    said = _NAME.sub(r"a name has 1 to \g<most> letters a-z and A-Z, digits, _ or -", said)
    allowed = _allowed(type_, path) if said.startswith("Invalid ") else ""
    if (named := _FIELD.search(said)) is not None:
        path = f"{path}.{named['field']}" if path else named["field"]
    if where:
        path = f"{where}.{path}" if path else where
    code = None
    if (value := _VALUE.search(said)) is not None and path.endswith(".type") and value[1] in NOT_SERVED:
        said, code = f"{value[1]}: {NOT_SERVED[value[1]]} are not served", "unsupported_value"
    elif allowed:
        said = f"{said}; it is one of {allowed}"
    return InvalidRequest(f"{path}: {said}" if path else said, param=path or None, code=code)


def _allowed(type_: type, path: str) -> str:
    """Return the words that a field may have, and whether it may be an object; empty if it has no words."""
    kinds = list(alternatives(_body_type(type_)))
    for step in _STEP.findall(path):
        kinds = [one for kind in kinds for inside in _inside(kind, step) for one in alternatives(inside)]
    words = {str(word) for kind in kinds if isinstance(kind, inspect.LiteralType) for word in kind.values}
    words = {word for word in words if NOT_SERVED.get(word) not in ("images", "files")}  # but in results of tools
    if not words:
        return ""
    shown = sorted(words)
    more = ["…"] if len(shown) > WORDS_SHOWN else []
    objects = [" or an object"] if any(isinstance(kind, inspect.StructType) for kind in kinds) else []
    return ", ".join(shown[:WORDS_SHOWN] + more) + "".join(objects)


@cache  # reading a type takes milliseconds
def _body_type(type_: type) -> inspect.Type:
    return inspect.type_info(type_)


def _inside(kind: inspect.Type, step: str) -> Iterator[inspect.Type]:
    """Yield the types of what a value has at one step of a path: a name, or a place in brackets."""
    match kind:
        case inspect.ListType(item_type=items):
            if step.startswith("["):
                yield items
        case inspect.DictType(value_type=values):
            yield values
        case inspect.StructType():
            yield from (field.type for field in kind.fields if field.encode_name == step)
            if kind.tag_field == step:
                yield inspect.LiteralType((kind.tag,))
        case _:
            pass


def texts_or_ids(
    given: str | Sequence[int | str | list[int]], field: str, limit: int
) -> dict[str, str | Sequence[int]]:
    """Return the texts or lists of token ids that a field has, each by the name of its place in the body.

    A list of token ids alone is one of them, in an array: a hundred thousand are looked at by no Python loop. They are
    at least 0 and of 31 bits, as bodies' types say. Raise InvalidRequest, naming the place.
    """
    if isinstance(given, str):
        return {field: given}
    with suppress(TypeError):  # not ids alone
        return {field: array("I", cast(Sequence[int], given))}
    if len(given) > limit:
        raise field_error(field, f"{len(given)} {field}s are more than the limit of {limit}")
    for at, one in enumerate(given):
        if isinstance(one, int):
            why = f"a token id in a list of {field}s; put the ids of one {field} in a list of their own"
            raise field_error(f"{field}[{at}]", why)
    return {f"{field}[{at}]": one for at, one in enumerate(given) if not isinstance(one, int)}
