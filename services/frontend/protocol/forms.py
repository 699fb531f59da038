"""Multipart forms, as OpenAI's client sends them with files, as the JSON bodies that they mean. Pure.

A file becomes a data URI; one that has no name and no content is left out. Fields of one name, or whose name ends in
[], become a list.
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Collection, Mapping
from email.message import Message

import msgspec
from msgspec import Struct

from services.frontend.protocol.errors import field_error
from shared.errors import InvalidRequest

MOST_PARTS = 48
"""Most fields of a form; a request has fewer fields, but each of its images is one."""
MOST_HEAD_BYTES = 1024
"""The bytes of a part's header lines that are read."""
FORM_FILES: Mapping[str, frozenset[str]] = {
    "picture_edits": frozenset(("image", "mask")),
    "videos": frozenset(("input_reference",)),
}
"""The operations whose body may be a form, and their fields that may be files."""
_TEXTS = ("prompt", "model", "size", "seconds", "negative_prompt")
"""Fields that are texts whatever they look like."""
_FLAGS = {"true": True, "false": False}
_NUMBER = re.compile(r"-?[0-9]{1,19}(\.[0-9]{1,9})?")


class _Field(Struct, frozen=True):
    """What the header lines of a part say."""

    name: str = ""
    """Empty if they say none."""
    is_list: bool = False
    is_file: bool = False
    is_blank: bool = False
    """True if it is a file without a name."""
    media_type: str = ""


def form_as_json(content_type: str, body: bytes, files: Collection[str]) -> bytes:
    """Return the fields of a multipart form as a JSON object, in time that grows with its bytes. `files` are the fields
    that may be files. Raise InvalidRequest."""
    boundary = _header("Content-Type", content_type).get_boundary("")
    parts = (b"\r\n" + body).split(b"\r\n--" + boundary.encode("latin-1", "replace"), MOST_PARTS + 2)
    if not boundary or len(parts) < 2:
        raise InvalidRequest("the body is no form with several parts, although its Content-Type says so")
    if len(parts) > MOST_PARTS + 2:
        raise InvalidRequest(f"the form has more than {MOST_PARTS} fields")
    found: dict[str, list[object]] = {}
    lists: set[str] = set()
    for part in parts[1:]:  # before the first delimiter is nothing that counts
        if part.startswith(b"--"):
            break
        head, _, content = part.partition(b"\r\n\r\n")
        field = _field(head)
        if field.is_blank and not content:  # a browser's file input in which no file was chosen
            continue
        if not field.name or (field.is_file and field.name not in files):
            raise field_error(field.name[:64] or "body", "this field takes no file", "unsupported_parameter")
        found.setdefault(field.name, []).append(_value(field, content))
        if field.is_list:
            lists.add(field.name)
    values = {name: value if name in lists or len(value) > 1 else value[0] for name, value in found.items()}
    return msgspec.json.encode(values)


def _value(field: _Field, content: bytes) -> object:
    """Return what a part says. Raise InvalidRequest."""
    if field.is_file:
        return f"data:{field.media_type};base64,{b64encode(content).decode('ascii')}"
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise field_error(field.name[:64], "is not UTF-8") from None
    if field.name in _TEXTS:
        return text
    return msgspec.json.decode(text) if _NUMBER.fullmatch(text) else _FLAGS.get(text, text)


def _field(head: bytes) -> _Field:
    """Return what the header lines of a part say."""
    name, file_name, media_type = "", None, ""
    for line in head[:MOST_HEAD_BYTES].decode("utf-8", "replace").split("\r\n"):
        key, _, value = line.partition(":")
        if key.strip().lower() == "content-disposition":
            header = _header("Content-Disposition", value)
            given = header.get_param("name", header="Content-Disposition")
            name, file_name = given if isinstance(given, str) else "", header.get_filename()
        elif key.strip().lower() == "content-type":
            media_type = value.partition(";")[0].strip()[:64]
    return _Field(name.removesuffix("[]"), name.endswith("[]"), file_name is not None, file_name == "", media_type)


def _header(name: str, value: str) -> Message:
    """Return a message that has this header alone."""
    header = Message()
    header[name] = value.strip()
    return header
