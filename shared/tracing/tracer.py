"""The tracer of one process: decides at the door, and gives finished spans to the exporter.

    door ─▶ begin(traceparents) ─▶ the request's first span, or None: it is not traced, and costs nothing more
    a service's message ─▶ `traceparent.carried` ─▶ spans below the caller's
    finished spans ─▶ record ─▶ shared/tracing/exporter.py

A process without `trace.endpoint` has no tracer.

docs/decisions/0063 gives the reasons.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from random import Random

from prometheus_client import CollectorRegistry

from shared.config import TraceConfig
from shared.metrics import counter, register_metrics
from shared.rate_limited_log import RateLimitedLog
from shared.tracing.exporter import SpanQueue, open_exporter
from shared.tracing.spans import SpanIds, SpanRecord
from shared.tracing.traceparent import DoorSampler, TraceParent, parse


class FirstSpan(TraceParent, frozen=True):
    """The place of the first span that this fleet makes of a request."""

    parent: str = ""
    """The id of the client's span. Empty if the trace begins here."""


class Tracer:
    """Makes and records spans. Times are nanoseconds since 1970 by `now_ns`."""

    # fmt: off
    _refused = counter("headrace_malformed_traceparents", "",
        "Requests whose header traceparent is malformed, or there more than once; their client's trace is ignored",
        "A client or a proxy writes it wrong; its requests get traces of their own. With [tracing](tracing.md) only.")
    # fmt: on

    def __init__(
        self,
        config: TraceConfig,
        registry: CollectorRegistry,
        record: Callable[[SpanRecord], None],
        draw: Random,
    ) -> None:
        self._sampler = DoorSampler(config.sample, config.clients, config.clients_per_s)
        self._record = record
        self._draw = draw
        self.now_ns = time.time_ns
        self.ids = SpanIds(draw)
        self._log = RateLimitedLog()
        register_metrics(self, registry)

    def begin(self, traceparents: Sequence[str]) -> FirstSpan | None:
        """Return the first span of a request with these headers. None if the request is not traced."""
        given = None
        if traceparents and (given := parse(traceparents)) is None:
            self._refused.inc()
            self._log.warn("traceparent", "a client's header is malformed, or there more than once, and is ignored")
        now_s = asyncio.get_running_loop().time()
        if not self._sampler.decide(given, self._draw.random(), now_s):
            return None
        if given is None:
            return FirstSpan(self.ids.trace(), self.ids.span())
        return FirstSpan(given.trace, self.ids.span(), parent=given.span)

    def record(self, spans: Iterable[SpanRecord]) -> None:
        """Give finished spans to the exporter. Never blocks; spans are dropped and counted while it is full."""
        for span in spans:
            self._record(span)


@asynccontextmanager
async def open_tracer(
    config: TraceConfig, registry: CollectorRegistry, resource: dict[str, str], draw: Random
) -> AsyncIterator[Tracer | None]:
    """Yield the tracer of a process; None if tracing is off. Leaving sends what is left, for a bounded time.

    `resource` has OpenTelemetry's attributes of the process. Raise ConfigError if the packages are missing.
    """
    if not config.endpoint:
        yield None
        return
    queue = SpanQueue(config, registry, open_exporter(config), resource)
    queue.start()
    try:
        yield Tracer(config, registry, queue.put, draw=draw)
    finally:
        await queue.close()
