"""Every message that may cross from one version to another, filled in: each field, each choice of a literal or a union.

It runs on any tree: `PYTHONPATH=TREE python -P wire_messages.py write` prints them as JSON, one list of a module, the
name of a codec in it, and the bytes in hex; `read` decodes such lists, and prints what that tree makes of each.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import msgspec
from msgspec import inspect

from shared.errors import ProtocolError

Recorded = list[tuple[str, str, str]]
"""The module, the codec, and the bytes in hex of each message."""
TURNS = 24
"""Messages of a codec at most: no literal has more values, and no union more members."""
PACKAGE = "shared.messages"
OTHERS = ("shared.pool.socket_frames", "services.kvbm.peers.messages", "services.worker.sharing.messages")
"""Messages between processes that need not be of one version; those of an engine and its worker always are."""


def codecs() -> Iterator[tuple[str, str, Any]]:
    """Yield the module, the name and the codec of each channel."""
    names = [found.name for found in pkgutil.iter_modules(import_module(PACKAGE).__path__)]
    for module in (*(f"{PACKAGE}.{name}" for name in names), *OTHERS):
        for name, value in vars(import_module(module)).items():
            if type(value).__name__ == "Codec":
                yield module, name, value


def examples(codec: Any, *, later: bool = False) -> list[bytes]:
    """Return different messages of a codec, as msgpack. `later`: each Struct has one field more."""
    kind = inspect.type_info(codec._msgpack.type)
    found = (msgspec.msgpack.encode(_filled(kind, turn, later)) for turn in range(TURNS))
    return list(dict.fromkeys(found))


def write() -> Recorded:
    """Return all messages of this tree, as it writes them."""
    return [
        (module, name, codec.encode(codec.decode(message)).hex())
        for module, name, codec in codecs()
        for message in examples(codec)
    ]


def read(recorded: Recorded) -> list[tuple[str, str]]:
    """Return for each message what this tree writes after it has read it, in hex, and why it cannot read it."""
    return [_reread(module, name, bytes.fromhex(text)) for module, name, text in recorded]


def _reread(module: str, name: str, message: bytes) -> tuple[str, str]:
    try:
        codec = getattr(import_module(module), name)
    except (ImportError, AttributeError):
        return "", f"there is no codec {module}.{name}"
    try:
        return codec.encode(codec.decode(message)).hex(), ""
    except ProtocolError as wrong:
        return "", str(wrong)


def _filled(kind: inspect.Type, turn: int, later: bool) -> Any:
    """Return a value of a type. `turn` chooses among literals and the members of unions."""
    match kind:
        case inspect.StructType():
            return _struct(kind, turn, later)
        case inspect.UnionType():
            members = [each for each in kind.types if not isinstance(each, inspect.NoneType)]
            return _filled(_one_of(members, turn), turn, later)
        case inspect.LiteralType():
            return _one_of(kind.values, turn)
        case inspect.ListType() | inspect.VarTupleType():
            return [_filled(kind.item_type, turn, later)]
        case inspect.TupleType():
            return [_filled(each, turn, later) for each in kind.item_types]
        case inspect.DictType():
            return {_filled(kind.key_type, turn, later): _filled(kind.value_type, turn, later)}
        case inspect.IntType():
            return min(max(7, kind.ge or 0), 7 if kind.le is None else kind.le)
        case inspect.FloatType():
            return 0.5
        case inspect.StrType():
            return "text"
        case inspect.BytesType():
            return b"\1" * 16
        case inspect.BoolType():
            return True
        case inspect.AnyType() | inspect.CustomType():
            return ["anything"]
        case _:
            raise TypeError(f"no example of {kind}")


def _struct(kind: inspect.StructType, turn: int, later: bool) -> Any:
    values = {each.encode_name: _filled(each.type, turn, later) for each in kind.fields}
    if later:
        values["a_later_field"] = {"with": ["anything"]}
    tagged = {} if kind.tag_field is None else {kind.tag_field: kind.tag}
    return [*tagged.values(), *values.values()] if kind.array_like else tagged | values


def _one_of(choices: Any, turn: int) -> Any:
    assert len(choices) <= TURNS, choices
    return choices[turn % len(choices)]


if __name__ == "__main__":
    print(json.dumps(write() if sys.argv[1] == "write" else read(json.load(sys.stdin)), indent=0))
