"""The span of a traced fetch, from its request to its last reply."""

from __future__ import annotations

from collections.abc import Mapping

from shared.hashing import KEY_BYTES
from shared.messages.kvbm import Fetch, Fetched, KvbmRefused
from shared.tracing.spans import AttributeValue, finished
from shared.tracing.traceparent import TraceParent, carried
from shared.tracing.tracer import Tracer


class FetchSpan:
    """The span of one fetch."""

    def __init__(self, tracer: Tracer, parent: TraceParent, ask: Fetch) -> None:
        self._tracer = tracer
        self._parent = parent
        self._start_ns = tracer.now_ns()
        self._asked = len(ask.keys) // KEY_BYTES
        self._memory = self._disk = 0

    def replied(self, reply: Fetched | KvbmRefused, last: bool) -> None:
        """Take up a reply; the last one ends the span."""
        error = f"{reply.code}: {reply.reason}" if isinstance(reply, KvbmRefused) else ""
        if isinstance(reply, Fetched):
            blocks = len(reply.slots) // 4
            self._disk += blocks if reply.disk else 0
            self._memory += 0 if reply.disk else blocks
        if not last:
            return
        attributes: dict[str, AttributeValue] = {
            "headrace.asked_blocks": self._asked,
            "headrace.memory_blocks": self._memory,
            "headrace.disk_blocks": self._disk,
        }
        place, times = self._tracer.ids.child(self._parent), (self._start_ns, self._tracer.now_ns())
        parent = self._parent.span
        ended = finished("kvbm fetch", place, parent, *times, kind="server", attributes=attributes, error=error)
        self._tracer.record((ended,))


def fetch_span(tracer: Tracer | None, headers: Mapping[str, str], ask: Fetch) -> FetchSpan | None:
    """Return the span of a fetch whose headers carry a trace; None if it is not traced."""
    if tracer is None or not headers or (parent := carried(headers)) is None:
        return None
    return FetchSpan(tracer, parent, ask)
