"""The trace of one sampled request, from the door to its end.

    door ─▶ begin_trace ─▶ RequestTrace ─▶ its answer's header, the spans below it, its attributes ─▶ end ─▶ exporter

A request that is not traced has none, and everything that serves it asks for nothing more than that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from services.frontend.requests.attempt_spans import AttemptSpans
from shared.tracing.spans import AttributeValue, finished
from shared.tracing.tracer import FirstSpan, Tracer

GEN_AI_OPERATIONS = {
    "chat": "chat",
    "responses": "chat",
    "messages": "chat",
    "ollama_chat": "chat",
    "completions": "text_completion",
    "ollama_generate": "text_completion",
    "embeddings": "embeddings",
    "ollama_embed": "embeddings",
}
"""OpenTelemetry's name of an operation; others keep their own."""
PROVIDER = "headrace"
_FAILED = 500


class RequestTrace:
    """The request's own span, and what makes the spans below it."""

    def __init__(self, tracer: Tracer, place: FirstSpan, operation: str) -> None:
        self._tracer = tracer
        self._place = place
        self._operation = GEN_AI_OPERATIONS.get(operation, operation)
        self._start_ns = tracer.now_ns()
        self._ended = False
        self.attributes: dict[str, AttributeValue] = {
            "gen_ai.operation.name": self._operation,
            "gen_ai.provider.name": PROVIDER,
            "headrace.operation": operation,
        }
        """The attributes of the request's span; they may grow until its end."""

    @property
    def id(self) -> str:
        """The trace's id, for logs and exemplars."""
        return self._place.trace

    @property
    def headers(self) -> Mapping[str, str]:
        """The header of the request's answer: the place of its span."""
        return self._place.headers

    def attempts(self, request: str) -> AttemptSpans:
        """Return what makes the spans of a stream's attempts."""
        return AttemptSpans(self._place, request, self._tracer.ids, lambda span: self._tracer.record((span,)))

    def now_ns(self) -> int:
        """Return the time in nanoseconds since 1970."""
        return self._tracer.now_ns()

    def add(self, name: str, start_ns: int, attributes: dict[str, AttributeValue], error: str = "") -> None:
        """Add a span that ends now, below the request's own."""
        place, times = self._tracer.ids.child(self._place), (start_ns, self._tracer.now_ns())
        ended = finished(name, place, self._place.span, *times, attributes=attributes, error=error)
        self._tracer.record((ended,))

    @contextmanager
    def span(self, name: str) -> Iterator[dict[str, AttributeValue]]:
        """Add a span of what happens in the context, which may add to its attributes."""
        attributes: dict[str, AttributeValue] = {}
        start_ns, error = self._tracer.now_ns(), ""
        try:
            yield attributes
        except BaseException as wrong:
            error = str(wrong) or type(wrong).__name__
            raise
        finally:
            self.add(name, start_ns, attributes, error)

    def end(self, status: int, error: str = "") -> None:
        """End the request's span with the HTTP status of its answer. Idempotent."""
        if self._ended:
            return
        self._ended = True
        model = self.attributes.get("gen_ai.request.model", "")
        self.attributes["http.response.status_code"] = status
        if status >= _FAILED:
            self.attributes["error.type"] = str(status)
            error = error or f"status {status}"
        ended = finished(
            f"{self._operation} {model}".strip(),
            self._place,
            self._place.parent,
            self._start_ns,
            self._tracer.now_ns(),
            kind="server",
            attributes=self.attributes,
            error=error,
        )
        self._tracer.record((ended,))


class CallSpans:
    """The spans of one answer's tool calls: from the moment that a call is recognised to its end."""

    def __init__(self, trace: RequestTrace, form: str) -> None:
        self._trace = trace
        self._form = form
        self._begun_ns = 0

    def begun(self) -> None:
        """A call begins."""
        self._begun_ns = self._trace.now_ns()

    def ended(self, outcome: str) -> None:
        """The call that began last has ended, or what looked like one was text."""
        if self._begun_ns:
            attributes: dict[str, AttributeValue] = {"headrace.tool_format": self._form, "headrace.outcome": outcome}
            self._trace.add("tool parsing", self._begun_ns, attributes, "" if outcome == "complete" else outcome)
            self._begun_ns = 0


def begin_trace(tracer: Tracer | None, traceparents: Sequence[str], operation: str) -> RequestTrace | None:
    """Return the trace of a request that has just come; None if it is not traced."""
    if tracer is None or (place := tracer.begin(traceparents)) is None:
        return None
    return RequestTrace(tracer, place, operation)
