from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from shared.config import TraceConfig
from shared.tracing import exporter as exporter_module
from shared.tracing.exporter import BATCH_SPANS, OtlpExporter, SpanQueue, open_exporter
from shared.tracing.spans import SpanRecord, finished
from shared.tracing.traceparent import TraceParent
from tests.collector import collector

LIMIT_S = 60.0
RESOURCE = {"service.name": "headrace-test", "service.instance.id": "i1"}
SPAN = finished("a", TraceParent("1" * 32, "2" * 16), "3" * 16, 1, 2, kind="server", attributes={"many": ("x", "y")})


class Gate:
    """An exporter that takes what a test lets through."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.failed = ""
        self.open = threading.Event()

    def send(self, spans: Sequence[SpanRecord], resource: dict[str, str]) -> str:
        self.open.wait(LIMIT_S)
        self.sent.append(len(spans))
        return self.failed

    def abort(self) -> None:
        self.open.set()


def counted(registry: CollectorRegistry, outcome: str) -> float:
    return registry.get_sample_value("headrace_spans_total", {"outcome": outcome}) or 0.0


def has_failed(registry: CollectorRegistry, spans: int) -> bool:
    return counted(registry, "failed") == spans


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not holds():  # noqa: ASYNC110 - a thread changes it
            await asyncio.sleep(0.01)


async def test_spans_reach_a_collector_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter_module, "CLOSE_LIMIT_S", LIMIT_S)
    registry = CollectorRegistry()
    with collector() as received:
        config = TraceConfig(endpoint=received.url, token="secret")
        queue = SpanQueue(config, registry, open_exporter(config), RESOURCE)
        queue.start()
        queue.put(SPAN)
        await queue.close()
        [span] = received.spans
        assert received.authorizations == {"Bearer secret"}
    assert (span.name, span.service, span.trace, span.span, span.parent) == (
        "a",
        "headrace-test",
        "1" * 32,
        "2" * 16,
        "3" * 16,
    )
    assert (span.start_ns, span.end_ns, span.attributes) == (1, 2, {"many": ["x", "y"]})
    assert counted(registry, "exported") == 1


async def test_a_full_queue_drops_and_counts_and_a_busy_one_sends_in_batches(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry, gate = CollectorRegistry(), Gate()
    queue = SpanQueue(TraceConfig(queue=BATCH_SPANS + 5), registry, gate, RESOURCE)
    for _ in range(BATCH_SPANS + 10):
        queue.put(SPAN)
    assert counted(registry, "dropped") == 5
    gate.open.set()
    with caplog.at_level(logging.INFO):
        queue.start()
        await until(lambda: counted(registry, "exported") == BATCH_SPANS + 5)
        await queue.close()
    assert gate.sent == [BATCH_SPANS, 5]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_failed_batches_are_counted_and_logged_once_until_one_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    registry, gate = CollectorRegistry(), Gate()
    gate.open.set()
    gate.failed = "status 500"
    queue = SpanQueue(TraceConfig(endpoint="http://collector"), registry, gate, RESOURCE)
    with caplog.at_level(logging.INFO):
        queue.start()
        for failed in (1, 2, 3):
            queue.put(SPAN)
            await until(partial(has_failed, registry, failed))
        gate.failed = ""
        queue.put(SPAN)
        await until(lambda: counted(registry, "exported") == 1)
        await queue.close()
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 2
    assert "http://collector: status 500" in texts[0]
    assert "again" in texts[1]


async def test_the_end_of_the_process_does_not_wait_for_a_collector_that_hangs() -> None:
    registry = CollectorRegistry()
    with collector() as received:
        received.mode = "hang"
        config = TraceConfig(endpoint=received.url, timeout_s=60.0)
        queue = SpanQueue(config, registry, open_exporter(config), RESOURCE)
        queue.start()
        queue.put(SPAN)
        await until(lambda: received.requests)
        queue.put(SPAN)
        async with asyncio.timeout(LIMIT_S):
            await queue.close()
    assert counted(registry, "dropped") == 1
    assert counted(registry, "exported") == 0


def test_what_opentelemetry_says_of_a_failure_is_the_reason() -> None:
    with collector() as received:
        received.mode = "fail"
        exporter = OtlpExporter(TraceConfig(endpoint=received.url))
        why = exporter.send([SPAN], RESOURCE)
        exporter.abort()
    assert "500" in why


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from shared.config import TraceConfig
from shared.errors import ConfigError
from shared.tracing.exporter import open_exporter
try:
    open_exporter(TraceConfig(endpoint="http://127.0.0.1:4318/v1/traces"))
except ConfigError as wrong:
    print(wrong)
"""


def test_without_its_packages_one_line_names_the_setting_and_the_extra() -> None:
    said = subprocess.run([sys.executable, "-c", WITHOUT], check=True, capture_output=True, text=True).stdout
    assert said.startswith("trace.endpoint: ")
    assert "`otel`" in said
    assert said.count("\n") == 1


def test_a_process_without_an_endpoint_imports_nothing_of_opentelemetry() -> None:
    code = "import sys, services.frontend.app, services.worker.service; print('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "False\n"
