"""What the bodies of other providers' APIs have in common: hints that are ignored, and errors in their names. Pure.

A field of type `Hint` is accepted and changes nothing of the answer. `review` notes those that a request has, and
refuses what is not built anywhere in it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.chat_chunks import Usage
from services.frontend.protocol.decoding import Harmless, check_not_built, not_supported
from services.frontend.protocol.ignored_fields import Advisory, IgnoredFields, ItemCount
from services.frontend.protocol.messages import ChatMessage, image_parts
from shared.errors import MALFORMED, InvalidRequest

_PLACE = re.compile(r"\[\d+\]")
_NOTHING = tuple(map(msgspec.Raw, (b"null", b"false", b"[]", b"{}")))
Hint = Annotated[
    msgspec.Raw | UnsetType,
    Advisory(),
    Harmless(UNSET, *_NOTHING),
    Meta(extra_json_schema={"description": "A hint; it has no effect."}),
]
"""The type of a field that is accepted and ignored. It stays undecoded."""


class IgnoredPart(Struct, frozen=True):
    """A part of a request that is ignored, whatever it holds. `review` notes it by its tag."""


def arguments_of(text: str) -> dict[str, Any] | None:
    """Return the arguments of a call; None if it was cut off, so that they are not JSON."""
    try:
        return msgspec.json.decode(text or "{}", type=dict[str, Any])
    except MALFORMED:
        return None


def review(request: Struct, ignored: IgnoredFields) -> None:
    """Refuse fields that are not built, in all Structs of a request, and note hints. Raise InvalidRequest, naming the
    field, and if there are more than ITEMS_LIMIT Structs in lists."""
    for struct, where in _nested(request, "", ItemCount()):
        if isinstance(struct, IgnoredPart):
            ignore(f"{where if ignored.refuse else _PLACE.sub('[]', where)}{struct.__struct_config__.tag}", ignored)
        check_not_built(struct, where, ignored)


def ignore(field: str, ignored: IgnoredFields) -> None:
    """Note a field that has no effect for this model, or refuse it. Raise InvalidRequest."""
    ignored.add_or_raise(field, not_supported(field))


def _nested(struct: Struct, where: str, count: ItemCount) -> Iterator[tuple[Struct, str]]:
    yield struct, where
    for field in struct.__struct_fields__:
        value = getattr(struct, field)
        if isinstance(value, Struct):
            yield from _nested(value, f"{where}{field}.", count)
        elif isinstance(value, list) and value and isinstance(value[0], Struct):
            count.add(len(value), f"{where}{field}")
            for at, one in enumerate(value):
                yield from _nested(one, f"{where}{field}[{at}].", count)


class ThinkingSupport(Struct, frozen=True):
    """What a model's chat template shows about thinking."""

    thinks: bool
    """Whether answers may begin with thinking."""
    reads: Collection[str]
    """The variables that the template reads."""

    @property
    def switch(self) -> dict[str, bool]:
        """The template variable that turns thinking on, if there is one."""
        return {"enable_thinking": True} if "enable_thinking" in self.reads else {}


Names = Sequence[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]]
"""Patterns of a chat's fields, and what stands for the match in another API."""
_IMAGE = re.compile(r"^(messages\[\d+\]\.content\[\d+\])\.(type|image_url|file_id)")
_TOOL = re.compile(r"^tools\[(\d+)\]\.function(\.parameters)?")


def names(patterns: Mapping[str, str]) -> Names:
    """Return a table for `with_names`."""
    return [(re.compile(pattern), name) for pattern, name in patterns.items()]


def placed(table: Names, places: Sequence[str], parameters: str) -> Names:
    """Return a table that also names the place of each of a chat's tools in another API, and its parameters."""

    def place(found: re.Match[str]) -> str:
        return places[int(found[1])] + (f".{parameters}" if found[2] else "")

    return [(_TOOL, place), *table]


def with_images(
    table: Names, messages: Sequence[ChatMessage], places: Sequence[str], fields: Mapping[str, str] = {}
) -> Names:
    """Return a table that also names the place of each image of a chat in another API, whose `places` are in the same
    order. Images before these are of a stored response. `fields` has the names of a part's fields that differ."""
    here = [where for where, _ in image_parts(messages)]
    if not here:
        return table
    own = dict(zip(reversed(here), reversed(places), strict=False))

    def place(found: re.Match[str]) -> str:
        where = own.get(found[1])
        return "previous_response_id" if where is None else f"{where}.{fields.get(found[2], found[2])}"

    return [(_IMAGE, place), *table]


@contextmanager
def renaming(table: Names) -> Iterator[None]:
    """Turn errors about a chat into those of another API."""
    try:
        yield
    except InvalidRequest as wrong:
        raise with_names(wrong, table) from None


def name_here(field: str, table: Names) -> str:
    """Return the name that a chat's field has in another API."""
    return next((pattern.sub(name, field) for pattern, name in table if pattern.search(field)), field)


def with_names(wrong: InvalidRequest, table: Names) -> InvalidRequest:
    """Turn an error about a chat into one that names its field as another API does."""
    param = wrong.param or ""
    here = name_here(param, table)
    if here == param:
        return wrong
    return InvalidRequest(str(wrong).replace(param, here), param=here, code=wrong.code, status=wrong.status)


class Ended(Struct, frozen=True):
    """How an answer ended."""

    finish: str
    """The reason: stop, length or tool_calls."""
    stop_string: str
    """The stop string that was found; empty if none was."""
    usage: Usage
    reasoning_tokens: int
    """The tokens up to the last one that brought reasoning."""
    at: int
    """The time in seconds since 1970."""
    total_s: float
    """Seconds since the request's body was complete."""
    first_token_s: float
    """Seconds from the tokenised prompt to the first token."""
    generation_s: float
    """Seconds from the first token to the end."""
