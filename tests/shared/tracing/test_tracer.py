from __future__ import annotations

from random import Random

import pytest
from prometheus_client import CollectorRegistry

from shared.config import ServiceConfig, TraceConfig, load
from shared.errors import ConfigError
from shared.tracing.spans import SpanRecord
from shared.tracing.tracer import Tracer, open_tracer
from tests.collector import collector

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


def tracer(registry: CollectorRegistry, **settings: float | str) -> Tracer:
    spans: list[SpanRecord] = []
    config = TraceConfig(**settings)  # type: ignore[arg-type]
    return Tracer(config, registry, spans.append, draw=Random(1))


async def test_a_clients_trace_goes_on_and_others_get_a_new_one() -> None:
    traces = tracer(CollectorRegistry(), sample=1.0)
    of_client = traces.begin([f"00-{TRACE}-{SPAN}-01"])
    new = traces.begin([])
    assert of_client is not None
    assert new is not None
    assert (of_client.trace, of_client.parent) == (TRACE, SPAN)
    assert of_client.span != SPAN
    assert new.trace != TRACE
    assert new.parent == ""


async def test_a_malformed_header_gets_a_new_trace_and_is_counted() -> None:
    registry = CollectorRegistry()
    place = tracer(registry, sample=1.0).begin([f"00-{TRACE}-{SPAN}-01", "x"])
    assert place is not None
    assert place.trace != TRACE
    assert place.parent == ""
    assert registry.get_sample_value("headrace_malformed_traceparents_total") == 1


async def test_a_flood_of_malformed_headers_is_logged_once_without_their_text(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    traces = tracer(registry, sample=0.0)
    for number in range(1000):
        assert traces.begin([f"hostile-{number}\n"]) is None
    assert registry.get_sample_value("headrace_malformed_traceparents_total") == 1000
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("traceparent: a client's header is malformed")
    assert "hostile" not in line


async def test_without_an_endpoint_there_is_no_tracer() -> None:
    async with open_tracer(TraceConfig(), CollectorRegistry(), {}, Random(1)) as nothing:
        assert nothing is None


async def test_what_is_left_is_sent_at_the_end() -> None:
    resource = {"service.name": "s", "service.instance.id": "i"}
    with collector() as received:
        config = TraceConfig(endpoint=received.url)
        async with open_tracer(config, CollectorRegistry(), resource, Random(1)) as traces:
            assert traces is not None
            traces.record([SpanRecord("a", "1" * 32, "2" * 16, "", 1, 2)])
        assert [span.name for span in received.spans] == ["a"]


@pytest.mark.parametrize("wrong", ["127.0.0.1:4318", "grpc://here:4317", "http://", "nonsense"])
def test_an_endpoint_that_is_no_url_is_named(wrong: str) -> None:
    with pytest.raises(ConfigError, match=r"trace: endpoint: .* is not a URL such as"):
        load(ServiceConfig, environ={}, flags=["--trace-endpoint", wrong])


def test_a_share_above_one_is_named() -> None:
    with pytest.raises(ConfigError, match=r"trace\.sample"):
        load(ServiceConfig, environ={}, flags=["--trace-sample", "1.5"])


def test_the_token_is_no_flag() -> None:
    with pytest.raises(ConfigError, match="secret"):
        load(ServiceConfig, environ={}, flags=["--trace-token", "x"])
