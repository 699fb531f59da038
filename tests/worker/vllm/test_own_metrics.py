"""Which of vLLM's metrics are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from services.worker.vllm.own_metrics import KeptMetrics, unknown_name


class Doubled(Collector):
    def collect(self) -> Iterator[Metric]:
        for value in (1.0, 2.0):
            family = GaugeMetricFamily("vllm:doubled", "Told twice", labels=["engine"])
            family.add_metric(["0"], value)
            yield family


@pytest.fixture
def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Counter("vllm:prompt_tokens", "Tokens", ["engine"], registry=made).labels("0").inc(7)
    Gauge("vllm:num_requests_running", "Requests", registry=made).set(3)
    Histogram("vllm:time_to_first_token_seconds", "Seconds", buckets=(1,), registry=made).observe(0.5)
    Gauge("python_info", "Of the process", registry=made)
    return made


def names(registry: CollectorRegistry, kept: tuple[str, ...]) -> list[str]:
    """The names of the families that Prometheus reads of those kept."""
    text = generate_latest(KeptMetrics(registry, kept)).decode()
    assert "_created" not in text
    return [family.name for family in text_string_to_metric_families(text)]


def test_a_name_a_prefix_or_nothing_is_kept(registry: CollectorRegistry) -> None:
    assert names(registry, ()) == []
    assert names(registry, ("vllm:*",)) == [
        "vllm:prompt_tokens",
        "vllm:num_requests_running",
        "vllm:time_to_first_token_seconds",
    ]
    assert names(registry, ("vllm:prompt_tokens_total", "vllm:num_requests_running")) == [
        "vllm:prompt_tokens",
        "vllm:num_requests_running",
    ]
    assert names(registry, ("vllm:time_*",)) == ["vllm:time_to_first_token_seconds"]


def test_a_series_is_kept_once(registry: CollectorRegistry) -> None:
    registry.register(Doubled())
    text = generate_latest(KeptMetrics(registry, ("vllm:doubled",))).decode()
    assert text.count("vllm:doubled{") == 1


def test_a_name_that_nothing_has_is_found(registry: CollectorRegistry) -> None:
    assert unknown_name(registry, ("vllm:*", "vllm:prompt_tokens_total")) == ""
    assert unknown_name(registry, ("vllm:*", "vllm:promt_tokens")) == "vllm:promt_tokens"
    assert unknown_name(registry, ("vllm:spec_*",)) == "vllm:spec_*"
