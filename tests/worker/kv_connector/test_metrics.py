from __future__ import annotations

import msgspec
from prometheus_client import CollectorRegistry

from services.worker.contracts.messages import EngineLoad, Exchanged, Stepped
from services.worker.kv_connector.metrics import KvbmMetrics
from services.worker.kv_connector.stats import MOST_NAMES


def stepped(load: EngineLoad, exchanged: Exchanged | None = None) -> Stepped:
    return Stepped(1, {}, [], [], b"", -1, 0, load, exchanged=exchanged)


def test_what_engines_count_each_from_their_start_adds_up() -> None:
    registry = CollectorRegistry()
    metrics = KvbmMetrics(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"headrace_{name}", labels)

    metrics.count_step(stepped(EngineLoad(offered_blocks=5, onboarding=2), Exchanged(saved_blocks=3, save_s=0.5)))
    metrics.publish()
    metrics.count_step(stepped(EngineLoad(offered_blocks=9, dropped_offers=1, late_onboardings=1)))
    metrics.engine_lost()
    assert value("onboarding_requests") == 0
    metrics.count_step(
        stepped(EngineLoad(offered_blocks=2, onboarding=1, shared_blocks=6), Exchanged(saved_blocks=1, loaded_blocks=4))
    )
    metrics.publish()
    metrics.publish()
    assert value("onboarding_requests") == 1
    assert value("lent_blocks") == 6
    assert value("late_onboardings_total") == 1
    assert value("kvbm_offered_blocks_total", outcome="offered") == 11
    assert value("kvbm_offered_blocks_total", outcome="dropped") == 1
    assert value("kvbm_copied_blocks_total", outcome="saved") == 4
    assert value("kvbm_copied_blocks_total", outcome="loaded") == 4
    assert value("kvbm_copy_seconds_total", direction="save") == 0.5


def test_ways_and_reasons_add_up_over_engines() -> None:
    registry = CollectorRegistry()
    metrics = KvbmMetrics(registry)

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"headrace_kvbm_{name}_total", labels)

    first = Exchanged(saved_by={"rows": 2}, loaded_by={"batch": 3}, fallbacks={"staged: no": 1})
    more = msgspec.structs.replace(first, saved_by={"rows": 5, "batch": 1}, differing_blocks=1)
    metrics.count_step(stepped(EngineLoad(), first))
    metrics.publish()
    metrics.count_step(stepped(EngineLoad(), more))
    metrics.engine_lost()
    metrics.count_step(stepped(EngineLoad(), first))
    metrics.publish()
    assert value("path_blocks", direction="save", path="rows") == 7
    assert value("path_blocks", direction="save", path="batch") == 1
    assert value("path_blocks", direction="load", path="batch") == 6
    assert value("copy_fallbacks", reason="staged: no") == 2
    assert value("differing_blocks") == 1


def test_however_many_reasons_engines_have_few_are_shown_and_all_are_counted() -> None:
    registry = CollectorRegistry()
    metrics = KvbmMetrics(registry)
    for engine in range(5):
        metrics.count_step(
            stepped(EngineLoad(), Exchanged(fallbacks={f"{engine}: {reason}": 1 for reason in range(20)}))
        )
        metrics.engine_lost()
    [family] = [family for family in registry.collect() if family.name == "headrace_kvbm_copy_fallbacks"]
    counts = [sample.value for sample in family.samples if sample.name.endswith("_total")]
    assert len(counts) == MOST_NAMES + 1
    assert sum(counts) == 100
