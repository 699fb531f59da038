"""The naming rule and the labels of every series."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from shared.metrics import ROUND_TRIP_SECONDS, counted, counter, gauge, histogram, process_registry


def test_every_series_carries_namespace_service_and_instance() -> None:
    registry = process_registry("default", "router", "0a")
    counter(registry, "headrace_selects", "Questions", ["outcome"]).labels("selected").inc()
    gauge(registry, "headrace_sources", "Sources").set(3)
    histogram(registry, "headrace_select_seconds", "Time", ROUND_TRIP_SECONDS).observe(0.002)
    series = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    for label in ('instance="0a"', 'namespace="default"', 'service="router"'):
        assert all(label in line for line in series)
    labels = 'instance="0a",namespace="default",outcome="selected",service="router"'
    assert f"headrace_selects_total{{{labels}}} 1.0" in series
    assert any(line.startswith("process_resident_memory_bytes{") for line in series)


def test_a_counter_kept_elsewhere_is_asked_at_each_scrape() -> None:
    registry = process_registry("default", "router", "0a")
    lost: list[str] = []
    counted(registry, "headrace_lost_things", "Lost things", lambda: len(lost))
    labels = {"namespace": "default", "service": "router", "instance": "0a"}
    for count in range(3):
        assert registry.get_sample_value("headrace_lost_things_total", labels) == pytest.approx(count)
        lost.append("a thing")
    assert "# TYPE headrace_lost_things_total counter" in generate_latest(registry).decode()
    with pytest.raises(ValueError, match="Duplicated"):
        counter(registry, "headrace_lost_things", "Another")


def test_a_metrics_own_label_wins() -> None:
    registry = process_registry("default", "router", "0a")
    gauge(registry, "headrace_peers", "Peers", ["instance"]).labels("0b").set(1)
    assert registry.get_sample_value(
        "headrace_peers", {"namespace": "default", "service": "router", "instance": "0b"}
    ) == pytest.approx(1)


@pytest.mark.parametrize(
    "name",
    ["requests", "headrace_", "headrace_Requests", "headrace_requests_total", "headrace_step_ms", "headrace_a__b"],
)
def test_a_name_against_the_rule_is_a_programmers_error(name: str) -> None:
    with pytest.raises(AssertionError):
        counter(CollectorRegistry(), name, "wrong")
