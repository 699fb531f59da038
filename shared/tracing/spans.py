"""What a span is before OpenTelemetry sees it: a name, a place in a trace, two times and some attributes. Pure."""

from __future__ import annotations

from random import Random
from typing import Literal

from msgspec import Struct

from shared.tracing.traceparent import TraceParent

AttributeValue = str | int | float | bool | tuple[str, ...]
SpanKind = Literal["internal", "server", "client"]
VALUE_LIMIT_CHARACTERS = 256
"""The maximum length of a text in an attribute: clients choose some of them."""
_INT_MOST = (1 << 63) - 1
"""The largest integer that OTLP can carry."""


class SpanRecord(Struct, frozen=True):
    """One finished span. Times are nanoseconds since 1970."""

    name: str
    trace: str
    span: str
    parent: str
    """The id of the span that caused it. Empty if it is the first one of its trace."""
    start_ns: int
    end_ns: int
    kind: SpanKind = "internal"
    attributes: dict[str, AttributeValue] = {}
    error: str = ""
    """Why the work failed. Empty if it did not."""


class SpanIds:
    """Draws ids, and places spans with them. They only have to differ, so that no secret random numbers are needed."""

    def __init__(self, draw: Random) -> None:
        self._draw = draw

    def trace(self) -> str:
        """Return a new trace's id: 32 hex digits, not all zero."""
        return f"{self._draw.getrandbits(128) or 1:032x}"

    def span(self) -> str:
        """Return a new span's id: 16 hex digits, not all zero."""
        return f"{self._draw.getrandbits(64) or 1:016x}"

    def child(self, parent: TraceParent) -> TraceParent:
        """Return the place of a new span below `parent`."""
        return TraceParent(parent.trace, self.span())


def finished(
    name: str,
    place: TraceParent,
    parent: str,
    start_ns: int,
    end_ns: int,
    *,
    kind: SpanKind = "internal",
    attributes: dict[str, AttributeValue] | None = None,
    error: str = "",
) -> SpanRecord:
    """Return the span at `place`. Its end is not before its start, even if the clock was set back; its texts are
    bounded."""
    bounded = {key: _bounded(value) for key, value in (attributes or {}).items()}
    why = error[:VALUE_LIMIT_CHARACTERS]
    return SpanRecord(name, place.trace, place.span, parent, start_ns, max(start_ns, end_ns), kind, bounded, why)


def _bounded(value: AttributeValue) -> AttributeValue:
    if isinstance(value, str):
        return value[:VALUE_LIMIT_CHARACTERS]
    if isinstance(value, int):
        return max(-_INT_MOST, min(value, _INT_MOST))
    return value
