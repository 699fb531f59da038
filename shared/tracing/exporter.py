"""Sends spans to a collector: OTLP over HTTP, by OpenTelemetry's exporter, in a thread of its own.

    put ─▶ [ waiting, at most `trace.queue` ] ─▶ batches ─▶ OTLPSpanExporter ─▶ collector
             └ full: dropped                                  └ no answer in `trace.timeout_s`, or a refusal: failed

    working ── a batch failed, or was taken too late for others: one line in the log ──▶ in trouble
       ▲                                                                                    │
       └──────── a batch was taken, and none was dropped since the one before: one line ────┘

OpenTelemetry is imported here alone, and only if tracing is on. The exporter tries again by itself within its timeout.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from prometheus_client import CollectorRegistry

from shared.config import TraceConfig
from shared.errors import ConfigError
from shared.installation import install_command
from shared.metrics import counter, register_metrics
from shared.tracing.spans import SpanRecord

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

EXTRA = "otel"
"""The extra of pyproject.toml with OpenTelemetry's packages."""
BATCH_SPANS = 512
"""The maximum number of spans of one request to the collector."""
INTERVAL_S = 1.0
"""The time in seconds after which a batch that is not full is sent."""
CLOSE_LIMIT_S = 2.0
"""The time in seconds to send what is left when the process ends."""
LINE_LIMIT_CHARACTERS = 300
"""The maximum length of a message of OpenTelemetry's in our log."""
_SOURCE = "opentelemetry"
"""The logger of OpenTelemetry: it writes a line for each failure and retry."""

_log = logging.getLogger(__name__)


class Exporter(Protocol):
    """What is used of OTLPSpanExporter, and of a test's own."""

    def send(self, spans: Sequence[SpanRecord], resource: dict[str, str]) -> str:
        """Send spans; return why that failed, or nothing. Blocks for at most a little more than the timeout."""
        ...

    def abort(self) -> None:
        """Make a `send` in another thread return soon. Nothing is sent afterwards."""
        ...


class SpanQueue:
    """The spans that wait, and the thread that sends them. `put` and `close` belong to the event loop's thread."""

    # fmt: off
    _spans = counter("headrace_spans", "outcome",
        "Spans by outcome: exported; dropped (too many waited); failed (the collector did not take them)",
        "`failed`: the collector is away or refuses, the log says why. `dropped`: also that it is slow, or "
        "`trace.sample` is high. With [tracing](tracing.md) only.")
    # fmt: on

    def __init__(
        self, config: TraceConfig, registry: CollectorRegistry, exporter: Exporter, resource: dict[str, str]
    ) -> None:
        self._most = config.queue
        self._endpoint = config.endpoint
        self._exporter = exporter
        self._resource = resource
        self._waiting: deque[SpanRecord] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._close_by_s = float("inf")
        """When sending ends, on the monotonic clock."""
        self._trouble = False
        """Whether the last line of the log said that spans are lost."""
        self._has_dropped = False
        """Whether a span was dropped since a batch was taken."""
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)  # a hung send outlives no process
        register_metrics(self, registry)
        self._exported, self._dropped, self._failed = map(self._spans.labels, ("exported", "dropped", "failed"))

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def put(self, span: SpanRecord) -> None:
        """Queue a span, or drop it if too many wait; the thread logs that."""
        if len(self._waiting) >= self._most:
            self._dropped.inc()
            self._has_dropped = True
            return
        self._waiting.append(span)
        if len(self._waiting) >= BATCH_SPANS:
            self._wake.set()

    async def close(self) -> None:
        """Send what is left within CLOSE_LIMIT_S; what is not sent by then is dropped."""
        self._close_by_s = time.monotonic() + CLOSE_LIMIT_S
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join, CLOSE_LIMIT_S)
        self._exporter.abort()
        self._dropped.inc(len(self._waiting))
        self._waiting.clear()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait(INTERVAL_S)
            self._wake.clear()
            self._send_waiting()
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send batches until none is left, or until the collector fails."""
        while self._waiting and time.monotonic() < self._close_by_s:
            batch = [self._waiting.popleft() for _ in range(min(BATCH_SPANS, len(self._waiting)))]
            failed = self._exporter.send(batch, self._resource)
            if failed:
                self._failed.inc(len(batch))
                self._complain(failed)
                return
            self._exported.inc(len(batch))
            dropped, self._has_dropped = self._has_dropped, False
            if dropped:
                self._complain(f"more than {self._most} spans waited (trace.queue), and some were dropped")
            elif self._trouble:
                self._trouble = False
                _log.info("spans are sent to %s again", self._endpoint)

    def _complain(self, why: str) -> None:
        """Log trouble once, until spans are sent again."""
        if not self._trouble:
            self._trouble = True
            _log.warning("spans are lost, requests are not: %s: %s (headrace_spans counts them)", self._endpoint, why)


class _Said(logging.Handler):
    """Keeps what OpenTelemetry's loggers say of one batch instead of writing it: the first message has the cause, the
    last one the end."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines = [*self.lines[:1], record.getMessage()[:LINE_LIMIT_CHARACTERS]]


class OtlpExporter:
    """OpenTelemetry's own exporter, for records."""

    def __init__(self, config: TraceConfig) -> None:
        """Raise ConfigError if the packages of the extra are missing."""
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            from shared.tracing.collector_session import CollectorSession
        except ImportError as missing:
            raise ConfigError(
                f"trace.endpoint: tracing needs the packages of the extra `{EXTRA}` ({missing.name} is missing): "
                f"{install_command('otel')}, or leave trace.endpoint empty"
            ) from None
        headers = {"Authorization": f"Bearer {config.token}"} if config.token else {}
        self._exporter = OTLPSpanExporter(
            endpoint=config.endpoint, headers=headers, timeout=config.timeout_s, session=CollectorSession()
        )
        self._said = _Said()
        logger = logging.getLogger(_SOURCE)
        logger.propagate = False
        logger.handlers = [self._said]  # to the end of the process: a thread may still be sending after `abort`

    def send(self, spans: Sequence[SpanRecord], resource: dict[str, str]) -> str:
        """Send spans; return why that failed, or nothing."""
        from opentelemetry.sdk.trace.export import SpanExportResult

        self._said.lines = []
        if self._exporter.export(readable(spans, resource)) is SpanExportResult.SUCCESS:
            return ""
        return " … ".join(self._said.lines) or "the collector did not take them"

    def abort(self) -> None:
        """Make a `send` in another thread return at its next retry."""
        self._exporter.shutdown()  # type: ignore[no-untyped-call]


def open_exporter(config: TraceConfig) -> Exporter:
    """Return the exporter of a process. Raise ConfigError if the packages of the extra are missing."""
    return OtlpExporter(config)


def readable(spans: Sequence[SpanRecord], resource: dict[str, str]) -> list[ReadableSpan]:
    """Return the spans as OpenTelemetry's exporters take them."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

    process, scope = Resource(resource), InstrumentationScope("headrace", resource.get("service.version"))
    sampled = TraceFlags(TraceFlags.SAMPLED)

    def context(trace: str, span: str, *, remote: bool) -> SpanContext:
        return SpanContext(int(trace, 16), int(span, 16), is_remote=remote, trace_flags=sampled)

    return [
        ReadableSpan(
            name=one.name,
            context=context(one.trace, one.span, remote=False),
            parent=context(one.trace, one.parent, remote=one.kind == "server") if one.parent else None,
            resource=process,
            attributes=one.attributes,
            kind=SpanKind[one.kind.upper()],
            status=Status(StatusCode.ERROR, one.error) if one.error else Status(StatusCode.UNSET),
            start_time=one.start_ns,
            end_time=one.end_ns,
            instrumentation_scope=scope,
        )
        for one in spans
    ]
