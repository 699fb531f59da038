"""A copy of objects at a Kubernetes API server, kept true by list and watch. Pure.

    LIST ──listed──▶ WATCH ──its time is over──▶ WATCH, from the last version on
     ▲                 │
     └─────────────────┴── the version is too old, or an event is not understood

While the server does not answer, the objects stay as they were known last.
"""

from __future__ import annotations

from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec import Raw, Struct, field

from shared.errors import Unavailable

MOST_OBJECTS = 500
"""Most objects of a list."""
FIRST_DELAY_S = 1.0
"""Longest time in seconds until the next question, doubling with each failure to LAST_DELAY_S."""
LAST_DELAY_S = 30.0
EXPIRED = b'{"type": "ERROR", "object": {"code": 410}}'
"""The event of a watch from a version that the server does not have any more."""
_GONE = 410


class Metadata(Struct, frozen=True, rename="camel"):
    """What objects, and lists of them, say of themselves."""

    name: str = ""
    """Empty for a list and for a bookmark."""
    resource_version: str = ""
    deletion_timestamp: str | None = None
    """Not None while the object is being deleted."""
    more: str = field(name="continue", default="")
    """Where the next part of a list begins. Empty for the last part."""


class _Listed(Struct, frozen=True):
    metadata: Metadata
    items: tuple[Raw, ...] | None = None


class _Watched(Struct, frozen=True):
    type: str
    object: Raw


class _Bookmark(Struct, frozen=True):
    metadata: Metadata


class _Refusal(Struct, frozen=True):
    code: int = 0
    message: str = ""


_decode_list = msgspec.json.Decoder(_Listed).decode
_decode_event = msgspec.json.Decoder(_Watched).decode
_decode_bookmark = msgspec.json.Decoder(_Bookmark).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode


class _KubeObject(Protocol):
    @property
    def metadata(self) -> Metadata: ...


T = TypeVar("T", bound=_KubeObject)


class Reflector(Generic[T]):
    """The objects of one kind that a query selects."""

    def __init__(self, kind: type[T]) -> None:
        self._kind = kind.__name__
        self._decode = msgspec.json.Decoder(kind).decode
        self.objects: dict[str, T] = {}
        """Each by its name."""
        self.version = ""
        """Where the next watch begins. Empty if a list is needed first."""
        self.synced = False
        """Whether the objects were listed at all."""
        self.fault = ""
        """Why they may be out of date. Empty while they are watched."""

    def listed(self, answer: bytes) -> None:
        """Apply a list. Raise Unavailable if it cannot be used, and everything stays as it was."""
        try:
            found = _decode_list(answer)
            objects = [self._decode(item) for item in found.items or ()]
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
            raise Unavailable(f"its list of {self._kind}s is none: {wrong}"[:200]) from None
        if found.metadata.more or len(objects) > MOST_OBJECTS:
            raise Unavailable(f"more than {MOST_OBJECTS} {self._kind}s are selected")
        if not found.metadata.resource_version:
            raise Unavailable(f"its list of {self._kind}s has no resourceVersion")
        self.objects = {each.metadata.name: each for each in objects}
        self.version, self.synced = found.metadata.resource_version, True

    def watching(self) -> None:
        """Note that a watch has begun."""
        self.fault = ""

    def watched(self, line: bytes) -> bool:
        """Apply an event of a watch. Return whether the watch goes on. Raise Unavailable if it is not understood; a
        list follows."""
        try:
            event = _decode_event(line)
            if event.type == "ERROR":
                refusal = _decode_refusal(event.object)
                self.version = ""
                if refusal.code == _GONE:
                    return False
                raise Unavailable(f"its watch of {self._kind}s ended: {refusal.code} {refusal.message}"[:200])
            if event.type == "BOOKMARK":
                self.version = _decode_bookmark(event.object).metadata.resource_version
            else:
                self._apply(event.type, self._decode(event.object))
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as wrong:
            self.version = ""
            raise Unavailable(f"its watch of {self._kind}s is not understood: {wrong}"[:200]) from None
        return True

    def failed(self, why: str) -> None:
        """Note why the objects may be out of date; a list follows."""
        self.version, self.fault = "", why

    def _apply(self, kind: str, changed: T) -> None:
        name = changed.metadata.name
        if kind == "DELETED":
            self.objects.pop(name, None)
        elif name in self.objects or len(self.objects) < MOST_OBJECTS:
            self.objects[name] = changed
        else:
            self.version = ""
            raise Unavailable(f"more than {MOST_OBJECTS} {self._kind}s are selected")
        self.version = changed.metadata.resource_version

    def validate(self) -> None:
        """Assert the invariants."""
        assert len(self.objects) <= MOST_OBJECTS
        assert self.synced or not (self.objects or self.version)
        assert all(name == each.metadata.name for name, each in self.objects.items())


def delay_s(failures: int, draw: float) -> float:
    """Return the seconds until the next question after this many failures in a row; `draw` is random, of 0 to 1."""
    return float(min(FIRST_DELAY_S * 2 ** min(failures, 16), LAST_DELAY_S) * (1 + draw) / 2)
