"""Fields of a request that are accepted without effect, and reported to the client by name. Pure.

unknown     a field that no Struct of the body has; it is removed, and the rest is decoded
advisory    a field whose type has an `Advisory`; its type is checked, and its value changes nothing

In strict mode (`frontend.unknown_fields`) both are refused.

To refuse them would keep existing applications out, which send fields whatever the server says; to drop
them silently would hide a misspelt name. What would change the answer and is not built is refused by name.
"""

from __future__ import annotations

import operator
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache

import msgspec
from msgspec import Raw, Struct, inspect

from services.frontend.protocol.errors import field_error
from shared.errors import InvalidRequest

IGNORED_HEADER = "X-Headrace-Ignored"
"""The header of an answer that names the ignored fields."""
NAMES_LIMIT = 32
"""Names that are reported of one request."""
ITEMS_LIMIT = 16_384
"""The number of messages, blocks, parts and calls in a body that are looked at one by one: four times as many as there
may be messages. This takes some 0.1 s of the event loop."""
MORE = "..."
"""What stands for the names over the limit."""
ODD = "?"
"""What stands for a name that is long, or has characters that do not belong into headers and labels."""

_INDEX = re.compile(r"\[\d+\]")
_PLAIN = re.compile(r"[0-9A-Za-z_.\[\]-]{1,128}")


class Advisory(Struct, frozen=True):
    """Marks a field that is checked and then ignored."""


class IgnoredFields:
    """The ignored fields of one request."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.refuse = refuse
        """Whether fields are refused that would be ignored otherwise."""
        self._names: dict[str, None] = {}

    @property
    def names(self) -> Sequence[str]:
        """The names in the order in which they were found, without places in lists: `messages[].cache_control`."""
        return tuple(self._names)

    def renamed(self, rename: Callable[[str], str]) -> IgnoredFields:
        """Return a view for another form of the request: a field that it notes stands here by its new name."""
        return _RenamedFields(self, rename)

    def add_or_raise(self, name: str, refusal: InvalidRequest) -> None:
        """Note a field by its path, or raise the refusal of it."""
        if self.refuse:
            raise refusal
        self.add(name)

    def add(self, name: str) -> None:
        """Note a field by its path."""
        name = _INDEX.sub("[]", name)
        if not _PLAIN.fullmatch(name):
            name = ODD
        if name not in self._names:
            self._names[name if len(self._names) < NAMES_LIMIT else MORE] = None


class _RenamedFields(IgnoredFields):
    def __init__(self, of: IgnoredFields, rename: Callable[[str], str]) -> None:
        super().__init__(refuse=of.refuse)
        self._of = of
        self._rename = rename

    def add(self, name: str) -> None:
        self._of.add(self._rename(name))


REFUSE = IgnoredFields(refuse=True)
"""For requests of which nothing is ignored."""


class _Shape(Struct, frozen=True):
    """The Structs that a value may be, or may hold in a list."""

    structs: Mapping[bytes | None, type[Struct]]
    """By their tag as JSON. None if there is no tag."""
    tag_field: str | None
    items: _Shape | None
    """The shape of a list's items; None if no list with Structs is allowed."""
    most_items: int
    """Most items of the list; of a longer one, one more is kept, for the decoder to refuse."""


_OBJECT = msgspec.json.Decoder(dict[str, Raw])
_LIST = msgspec.json.Decoder(list[Raw])
_ENCODER = msgspec.json.Encoder()


def without_unknown(body: bytes, type_: type, where: str, ignored: IgnoredFields) -> bytes:
    """Return a JSON body without the fields that no Struct in `type_` has; the rest stays as it is, byte for byte.

    `where` is the body's own place, if it is part of another. Values of a wrong type stay, for the decoder to refuse.
    Raise msgspec.DecodeError and RecursionError if the body is not JSON, or nested too deeply, and InvalidRequest if it
    has more than ITEMS_LIMIT items.
    """
    shape = _shape_of(type_)
    return body if shape is None else bytes(_stripped(Raw(body.lstrip()), shape, where, ignored, ItemCount()))


class ItemCount:
    """The number of items of a body that were looked at."""

    def __init__(self) -> None:
        self._count = 0

    def add(self, count: int, where: str) -> None:
        """Count items of the list at `where`. Raise InvalidRequest over the limit."""
        self._count += count
        if self._count > ITEMS_LIMIT:
            field = where.partition("[")[0].partition(".")[0]
            raise field_error(field, f"more than {ITEMS_LIMIT} messages, blocks and calls together")


def _stripped(raw: Raw, shape: _Shape, where: str, ignored: IgnoredFields, count: ItemCount) -> Raw:
    first = bytes(memoryview(raw)[:1])
    if first == b"[" and shape.items is not None:
        items, inner = _LIST.decode(raw), f"{where}[]"
        few = items[: shape.most_items + 1]
        count.add(len(few), where)
        kept_items = [_stripped(item, shape.items, inner, ignored, count) for item in few]
        unchanged = len(few) == len(items) and all(map(operator.is_, kept_items, items))
        return raw if unchanged else Raw(_ENCODER.encode(kept_items))
    if first != b"{" or not shape.structs:
        return raw
    fields = _OBJECT.decode(raw)
    tag = fields.get(shape.tag_field) if shape.tag_field is not None else None
    struct = shape.structs.get(None if tag is None else bytes(tag))
    if struct is None or not struct.__struct_config__.forbid_unknown_fields:
        return raw  # the decoder names the tags that there are, and takes what it does not read
    known, kept, changed = _fields(struct), {}, False
    for name, value in fields.items():
        place = f"{where}.{name}" if where else name
        if name in known:
            inside = known[name]
            kept[name] = value if inside is None else _stripped(value, inside, place, ignored, count)
            changed = changed or kept[name] is not value
        elif name == shape.tag_field:
            kept[name] = value
        else:
            ignored.add(place)
            changed = True
    return Raw(_ENCODER.encode(kept)) if changed else raw


@cache  # reading a type takes milliseconds
def _shape_of(type_: type) -> _Shape | None:
    return _shape(inspect.type_info(type_))


@cache
def _fields(struct: type[Struct]) -> Mapping[str, _Shape | None]:
    info = inspect.type_info(struct)
    assert isinstance(info, inspect.StructType)
    return {field.encode_name: _shape(field.type) for field in info.fields}


def _shape(type_: inspect.Type) -> _Shape | None:
    """Return the shape of a type; None if there is no Struct in it."""
    kinds = list(alternatives(type_))
    structs = [one for one in kinds if isinstance(one, inspect.StructType)]
    lists = [one for one in kinds if isinstance(one, inspect.ListType)]
    found = _Shape(
        {None if one.tag is None else _ENCODER.encode(one.tag): one.cls for one in structs},
        next((one.tag_field for one in structs), None),
        _shape(lists[0].item_type) if lists else None,
        (lists[0].max_length if lists else None) or sys.maxsize,
    )
    return found if found.structs or found.items else None


def alternatives(type_: inspect.Type) -> Iterator[inspect.Type]:
    """Yield the types of a union, or the type itself, without what describes them."""
    while isinstance(type_, inspect.Metadata):
        type_ = type_.type
    if isinstance(type_, inspect.UnionType):
        for one in type_.types:
            yield from alternatives(one)
    else:
        yield type_
