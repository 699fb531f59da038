"""The tools of /v1/messages, and the functions that a chat offers for them. Pure.

    custom, or without a type        the client's own, with its schema
    bash_…, text_editor_…, memory_…  the client's too: Claude knows their schemas, so requests do not have them
    others                           tools that Anthropic runs, and those that answer with pictures: ignored by type

Which version of a tool a request names only matters to the text editor: older ones undo, and name the text that they
insert as the text that replaces another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct

from services.frontend.protocol.decoding import OTHER_TOOL, Harmless, check_not_built, decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.foreign import Hint
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.tools import DESCRIPTION_LIMIT_CHARACTERS, Function, Tool

CallName = Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_-]{1,128}\Z")]
"""A tool's name as Anthropic allows it, twice as long as OpenAI's."""


class ToolOptions(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What every tool may say. msgspec inherits it into flat objects; no code is shared."""

    name: CallName
    strict: bool | None = None
    cache_control: Hint = UNSET
    eager_input_streaming: Hint = UNSET
    input_examples: Hint = UNSET
    allowed_callers: Annotated[Hint, Harmless(msgspec.Raw(b'["direct"]'))] = UNSET
    """Programs cannot call tools here; the model calls each itself."""
    defer_loading: Hint = UNSET
    """A tool that a search would find is offered at once, because nothing searches."""


class ClientTool(ToolOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tool of the client."""

    input_schema: dict[str, Any]
    description: Annotated[str, Meta(max_length=DESCRIPTION_LIMIT_CHARACTERS)] | None = None
    type: Literal["custom"] | None = None


class KnownTool(ToolOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tool of the client whose schema Anthropic published."""

    type: Annotated[str, Meta(pattern=r"^(bash|text_editor|memory)_[0-9]{8}$")]
    max_characters: Hint = UNSET
    """A limit for the client's own work."""


AnyTool = Annotated[
    msgspec.Raw,
    Meta(
        extra_json_schema={
            "anyOf": [*({"$ref": f"#/components/schemas/{one}"} for one in ("ClientTool", "KnownTool")), OTHER_TOOL]
        }
    ),
]
"""A tool that is not decoded yet. Its `type` says which it is."""


class OfferedTools(Struct, frozen=True):
    """The tools of a request."""

    offered: list[Tool]
    """The tools as a chat offers them."""
    places: list[str]
    """The place of each in the body."""
    ignored: frozenset[str]
    """The names of those that are not served."""


class _Kind(Struct, frozen=True):
    type: Annotated[str, Meta(max_length=64)] | None = None
    name: str = ""


_VERSION = re.compile(r"(bash|text_editor|memory)_(\d{8})")


def decode_tools(given: Sequence[msgspec.Raw], ignored: IgnoredFields) -> OfferedTools:
    """Decode the tools of a request. Raise InvalidRequest, naming the field."""
    found = [(f"tools[{at}]", *_decoded(bytes(raw), f"tools[{at}]", ignored)) for at, raw in enumerate(given)]
    served = [(place, Tool("function", tool)) for place, _, tool in found if tool is not None]
    return OfferedTools(
        [tool for _, tool in served],
        [place for place, _ in served],
        frozenset(name for _, name, tool in found if tool is None),
    )


def _decoded(raw: bytes, where: str, ignored: IgnoredFields) -> tuple[str, Function | None]:
    """Return a tool's name and its function; None for a kind that is ignored. Raise InvalidRequest."""
    kind = decode_body(_Kind, raw, where=where)
    version = _VERSION.fullmatch(kind.type or "")
    if kind.type not in (None, "custom") and version is None:
        why = f"tools of type {kind.type!r} are not served; give the model a tool of your own that does it"
        ignored.add_or_raise(f"tools[].{kind.type}", field_error(f"{where}.type", why, "unsupported_value"))
        return kind.name, None
    if version is not None:
        known = decode_body(KnownTool, raw, ignored, where)
        check_not_built(known, f"{where}.", ignored)
        description, schema = _PUBLISHED[version[1]](version[2])
        return known.name, Function(known.name, description, schema, known.strict)
    own = decode_body(ClientTool, raw, ignored, where)
    check_not_built(own, f"{where}.", ignored)
    return own.name, Function(own.name, own.description, own.input_schema, own.strict)


# --- schemas that Anthropic published


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


_RANGE = {
    "type": "array",
    "items": {"type": "integer"},
    "minItems": 2,
    "maxItems": 2,
    "description": "For view: the first and the last line to show, counted from 1. -1 as the last: up to the end.",
}
_LINE = {
    "type": "integer",
    "description": "For insert: the line after which the text is inserted. 0: at the beginning.",
}


def _object(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


def _bash(_version: str) -> tuple[str, dict[str, Any]]:
    restart = {"type": "boolean", "description": "True restarts the session; then there is no command."}
    about = "Run a command in a bash session that lasts: its directory and its variables stay from call to call."
    return about, _object({"command": _text("The command to run."), "restart": restart})


def _text_editor(version: str) -> tuple[str, dict[str, Any]]:
    is_old = version < "20250429"
    commands = ["view", "create", "str_replace", "insert", *(["undo_edit"] if is_old else [])]
    replacement = "For str_replace: the text in place of it; nothing if it is left out."
    inserted = {} if is_old else {"insert_text": _text("For insert: the text to insert.")}
    properties = {
        "command": {"type": "string", "enum": commands},
        "path": _text("The path of the file, or for view of a directory."),
        "file_text": _text("For create: the whole text of the new file."),
        "old_str": _text("For str_replace: the text to replace. It is in the file exactly once."),
        "new_str": _text(f"{replacement} For insert: the text to insert." if is_old else replacement),
        "insert_line": _LINE,
        **inserted,
        "view_range": _RANGE,
    }
    return "View, create and edit text files.", _object(properties, "command", "path")


def _memory(_version: str) -> tuple[str, dict[str, Any]]:
    commands = ["view", "create", "str_replace", "insert", "delete", "rename"]
    properties = {
        "command": {"type": "string", "enum": commands},
        "path": _text("The path below /memories, for all commands but rename."),
        "view_range": _RANGE,
        "file_text": _text("For create: the whole text of the file."),
        "old_str": _text("For str_replace: the text to replace. It is in the file exactly once."),
        "new_str": _text("For str_replace: the text in place of it."),
        "insert_line": _LINE,
        "insert_text": _text("For insert: the text to insert."),
        "old_path": _text("For rename: the path now."),
        "new_path": _text("For rename: the path from then on."),
    }
    about = "Read and write files below /memories, which stay from conversation to conversation."
    return about, _object(properties, "command")


_PUBLISHED = {"bash": _bash, "text_editor": _text_editor, "memory": _memory}
