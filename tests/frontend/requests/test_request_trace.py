from __future__ import annotations

from random import Random

import pytest
from prometheus_client import CollectorRegistry

from services.frontend.requests.request_trace import CallSpans, RequestTrace, begin_trace
from shared.config import TraceConfig
from shared.tracing.spans import SpanRecord
from shared.tracing.tracer import Tracer


def traced(sample: float = 1.0) -> tuple[RequestTrace | None, list[SpanRecord]]:
    spans: list[SpanRecord] = []
    tracer = Tracer(TraceConfig(sample=sample), CollectorRegistry(), spans.append, draw=Random(1))
    return begin_trace(tracer, [], "completions"), spans


async def test_without_a_tracer_or_a_draw_there_is_no_trace() -> None:
    assert begin_trace(None, [], "chat") is None
    assert traced(sample=0.0)[0] is None


async def test_a_request_ends_once_with_its_status() -> None:
    trace, spans = traced()
    assert trace is not None
    trace.attributes["gen_ai.request.model"] = "m"
    trace.end(503)
    trace.end(200)
    [request] = spans
    assert (request.name, request.kind, request.error) == ("text_completion m", "server", "status 503")
    assert request.attributes["error.type"] == "503"
    assert trace.headers["traceparent"] == f"00-{trace.id}-{request.span}-01"


async def test_a_span_of_a_failure_says_so_and_the_failure_goes_on() -> None:
    trace, spans = traced()
    assert trace is not None
    with pytest.raises(ValueError, match="wrong"), trace.span("tokenise"):
        raise ValueError("wrong")
    assert [(span.name, span.error) for span in spans] == [("tokenise", "wrong")]


async def test_what_only_looked_like_a_call_has_no_span() -> None:
    trace, spans = traced()
    assert trace is not None
    calls = CallSpans(trace, "hermes")
    calls.ended("malformed")
    calls.begun()
    calls.ended("broken")
    calls.ended("unfinished")
    assert [(span.attributes["headrace.outcome"], span.error) for span in spans] == [("broken", "broken")]
