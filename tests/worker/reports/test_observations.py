"""What the engine says of itself, as Prometheus reads it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from services.worker.contracts.messages import EngineLoad, OwnMetrics, Probed
from services.worker.reports.observations import EngineObservations
from shared.metrics import process_registry

TEXT = """# HELP vllm:num_requests_running Number of requests
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# HELP vllm:prompt_tokens_total Number of prefill tokens
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 42.0
"""


class Watched:
    def __init__(self) -> None:
        self.now_s = 100.0
        self.registry: CollectorRegistry = process_registry("ns", "worker", "w1")
        self.engine = EngineObservations(self.registry, lambda: self.now_s)

    def series(self, prefix: str) -> dict[tuple[str, ...], float]:
        """Name and own labels → value of the series that Prometheus reads, each of which is there once."""
        found: dict[tuple[str, ...], float] = {}
        for family in text_string_to_metric_families(generate_latest(self.registry).decode()):
            for sample in family.samples:
                if sample.name.startswith(prefix):
                    labels = dict(sample.labels)
                    assert (labels.pop("namespace"), labels.pop("service"), labels.pop("instance")) == (
                        *("ns", "worker", "w1"),
                    )
                    series = (sample.name, *(f"{name}={value}" for name, value in sorted(labels.items())))
                    assert series not in found
                    found[series] = sample.value
        return found


def test_the_engines_own_series_have_our_labels_and_end_with_it() -> None:
    watched = Watched()
    assert not watched.series("vllm:")
    watched.engine.record(OwnMetrics(TEXT))
    assert watched.series("vllm:") == {
        ("vllm:num_requests_running", "engine=0", "model_name=tiny"): 3.0,
        ("vllm:prompt_tokens_total", "engine=0", "model_name=tiny"): 42.0,
    }
    watched.engine.engine_lost()
    assert not watched.series("vllm:")


def test_a_torn_text_costs_the_engines_series_and_no_others(caplog: pytest.LogCaptureFixture) -> None:
    watched = Watched()
    watched.engine.record(Probed(0.01))
    for _ in range(2):
        watched.engine.record(OwnMetrics(TEXT + 'vllm:x{engine="0'))
        assert not watched.series("vllm:")
        assert watched.series("headrace_engine_probes_total")
    assert watched.series("headrace_engine_metrics_torn_total") == {("headrace_engine_metrics_torn_total",): 2.0}
    assert sum("cannot be read" in record.message for record in caplog.records) == 1
    watched.engine.record(OwnMetrics(TEXT))
    assert len(watched.series("vllm:")) == 2


def test_probes_are_counted_and_the_last_one_of_each_rank_is_shown() -> None:
    watched = Watched()
    watched.engine.record(Probed(0.5, rank=1))
    watched.engine.record(Probed(0.25))
    watched.now_s += 30
    watched.engine.record(Probed(9.0, "it is frozen", rank=1))
    watched.now_s += 2
    assert watched.engine.last_probes == [
        "rank 0: ok, 32 s ago, took 0.250 s",
        "rank 1: it is frozen, 2 s ago, took 9.000 s",
    ]
    assert watched.series("headrace_engine_probe") == {
        ("headrace_engine_probes_total", "outcome=ok"): 2.0,
        ("headrace_engine_probes_total", "outcome=failed"): 1.0,
        ("headrace_engine_probe_seconds", "rank=0"): 0.25,
        ("headrace_engine_probe_seconds", "rank=1"): 9.0,
    }
    watched.engine.engine_lost()
    assert not watched.engine.last_probes
    assert ("headrace_engine_probe_seconds", "rank=0") not in watched.series("headrace_engine_probe")


def test_each_rank_shows_its_load() -> None:
    watched = Watched()
    loads = {
        0: EngineLoad(waiting=1, running=2, held_blocks=3, cached_blocks=4, step_s=0.5),
        1: EngineLoad(queried_tokens=200, found_tokens=50),
    }
    watched.engine.show_ranks(loads, 10)
    shown = watched.series("headrace_rank_")
    assert [shown["headrace_rank_blocks", "rank=0", f"state={state}"] for state in ("held", "cached", "free")] == [
        *(3, 4, 3),
    ]
    assert shown["headrace_rank_inflight_requests", "rank=0"] == 2
    assert shown["headrace_rank_queued_requests", "rank=0"] == 1
    assert shown["headrace_rank_step_seconds", "rank=0"] == 0.5
    assert shown["headrace_rank_hit_rate", "rank=1"] == 0.25
    assert ("headrace_rank_hit_rate", "rank=0") not in shown
    watched.engine.engine_lost()
    assert not watched.series("headrace_rank_")
