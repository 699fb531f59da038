"""The naming rule and the labels of every series."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from shared.metrics import (
    ROUND_TRIP_SECONDS,
    STEP_SECONDS,
    counter,
    distribution,
    gauge,
    histogram,
    process_registry,
    register_metrics,
    register_scraped,
)


def test_every_series_carries_namespace_service_and_instance() -> None:
    registry = process_registry("default", "router", "0a")
    counter("headrace_selects", "outcome", "Questions").make(registry).labels("selected").inc()
    gauge("headrace_sources", "", "Sources").make(registry).set(3)
    histogram("headrace_select_seconds", "", ROUND_TRIP_SECONDS, "Time").make(registry).observe(0.002)
    series = [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]
    for label in ('instance="0a"', 'namespace="default"', 'service="router"'):
        assert all(label in line for line in series)
    labels = 'instance="0a",namespace="default",outcome="selected",service="router"'
    assert f"headrace_selects_total{{{labels}}} 1.0" in series
    assert any(line.startswith("process_resident_memory_bytes{") for line in series)


class Doors:
    """A table of two rows."""

    opened = counter("headrace_opened_doors", "side", "Doors opened")
    open = gauge("headrace_open_doors", "", "Doors that are open")


def test_an_object_has_the_metrics_of_its_classs_rows_once_it_registered_them() -> None:
    registry, doors = CollectorRegistry(), Doors()
    assert Doors.opened.labels == "side", "at the class it is the row"
    with pytest.raises(AssertionError, match="headrace_open_doors: no Doors may use it before register_metrics"):
        doors.open.set(1)
    register_metrics(doors, registry)
    doors.opened.labels("left").inc()
    doors.open.set(1)
    assert registry.get_sample_value("headrace_opened_doors_total", {"side": "left"}) == pytest.approx(1)
    assert registry.get_sample_value("headrace_open_doors") == pytest.approx(1)
    with pytest.raises(ValueError, match="Duplicated"):
        register_metrics(Doors(), registry)


def test_a_counter_kept_elsewhere_is_asked_at_each_scrape() -> None:
    registry = process_registry("default", "router", "0a")
    lost: list[str] = []
    register_scraped(counter("headrace_lost_things", "", "Lost things"), registry, lambda: len(lost))
    labels = {"namespace": "default", "service": "router", "instance": "0a"}
    for count in range(3):
        assert registry.get_sample_value("headrace_lost_things_total", labels) == pytest.approx(count)
        lost.append("a thing")
    assert "# TYPE headrace_lost_things_total counter" in generate_latest(registry).decode()
    with pytest.raises(ValueError, match="Duplicated"):
        counter("headrace_lost_things", "", "Another").make(registry)


@settings(max_examples=50)
@given(st.lists(st.lists(st.sampled_from([0.0, 0.001, 0.0011, 0.02, 0.25, 3.0, 10.0, 99.0]), max_size=6), max_size=4))
def test_a_distribution_shows_what_a_histogram_shows(batches: list[list[float]]) -> None:
    registry = process_registry("default", "frontend", "0a")
    slow = histogram("headrace_slow_seconds", "model", STEP_SECONDS, "Time").make(registry).labels("m")
    quick = distribution("headrace_quick_seconds", "model", STEP_SECONDS, "Time").make(registry).labels("m")
    for batch in batches:
        quick.observe_all(batch)
        for value in batch:
            slow.observe(value)
    lines = generate_latest(registry).decode().splitlines()
    shown = {name: [line for line in lines if f"headrace_{name}" in line] for name in ("slow", "quick")}
    expected = [line.replace("slow", "quick") for line in shown["slow"]]
    for line, other in zip(shown["quick"], expected, strict=True):
        if "_sum" in line:
            assert float(line.split()[-1]) == pytest.approx(float(other.split()[-1]))
        else:
            assert line == other
    with pytest.raises(ValueError, match="Duplicated"):
        distribution("headrace_slow_seconds", "model", STEP_SECONDS, "Time").make(registry)


@pytest.mark.parametrize("form", [generate_latest, openmetrics.generate_latest])
def test_no_form_of_the_page_says_when_a_counter_was_made(form: Callable[[CollectorRegistry], bytes]) -> None:
    registry = process_registry("default", "router", "0a")
    counter("headrace_selects", "outcome", "Questions").make(registry).labels("selected").inc()
    register_scraped(counter("headrace_lost_things", "", "Lost things"), registry, lambda: 3)
    histogram("headrace_select_seconds", "", ROUND_TRIP_SECONDS, "Time").make(registry).observe(0.002)
    distribution("headrace_quick_seconds", "model", STEP_SECONDS, "Time").make(registry).labels("m").observe(0.002)
    text = form(registry).decode()
    assert all(f"headrace_{name}{{" in text for name in ("selects_total", "lost_things_total", "quick_seconds_count"))
    assert "_created" not in text


@pytest.mark.parametrize("label", ["namespace", "service", "instance", "model"])
def test_a_metric_with_a_label_that_every_series_has_is_refused(label: str) -> None:
    registry = process_registry("default", "worker", "0a", {"model": "smollm"})
    with pytest.raises(ValueError, match=f"the labels {label} are added to every series"):
        gauge("headrace_peers", label, "Peers").make(registry)
    with pytest.raises(ValueError, match=f"the labels {label} are added to every series"):
        distribution("headrace_quick_seconds", label, STEP_SECONDS, "Time").make(registry)
    gauge("headrace_peers", "model", "Peers").make(process_registry("default", "router", "0a"))


class ForeignSeries(Collector):
    """What another program says, with labels of its own."""

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily("vllm:requests", "Requests", labels=["model", "engine"])
        family.add_metric(["theirs", "0"], 3)
        yield family


def test_a_label_of_foreign_series_does_not_hide_ours() -> None:
    registry = process_registry("default", "worker", "0a", {"model": "smollm"})
    registry.register(ForeignSeries())
    ours = {"namespace": "default", "service": "worker", "instance": "0a", "model": "smollm"}
    labels = {**ours, "engine": "0", "exported_model": "theirs"}
    assert registry.get_sample_value("vllm:requests", labels) == pytest.approx(3)


@pytest.mark.parametrize(
    "name",
    ["requests", "headrace_", "headrace_Requests", "headrace_requests_total", "headrace_step_ms", "headrace_a__b"],
)
def test_a_name_against_the_rule_is_a_programmers_error(name: str) -> None:
    with pytest.raises(AssertionError):
        counter(name, "", "wrong")
