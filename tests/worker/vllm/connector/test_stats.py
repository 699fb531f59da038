"""services/worker/vllm/connector/stats.py: the connector's metrics at vLLM's own /metrics."""

from __future__ import annotations

from tests.worker.vllm.environment import needs_vllm, run_there

pytestmark = needs_vllm
METRICS = """
import json
from types import SimpleNamespace
from prometheus_client import REGISTRY, Counter, Gauge, Histogram
from services.worker.contracts.messages import Exchanged, KvbmLink
from services.worker.vllm.connector.stats import ConnectorMetrics, stats_of

types = {Gauge: Gauge, Counter: Counter, Histogram: Histogram}
metrics = ConnectorMetrics(SimpleNamespace(kv_transfer_config=None), types, ["engine"], {0: ["0"], 1: ["1"]})
read = lambda name, engine: REGISTRY.get_sample_value(f"vllm:headrace_{name}", {"engine": engine})
both = lambda: [[read("kvbm_attached", each), read("loaded_blocks_total", each)] for each in "01"]
seen = [both()]
for loaded in (3, 5):
    metrics.observe(stats_of(Exchanged(loaded_blocks=loaded), KvbmLink(kvbm="k"), [], dropped=0, late=0).data, 1)
    seen.append(both())
print(json.dumps(seen))
"""


def test_all_series_are_there_before_an_engine_reports_and_then_follow_its_sums() -> None:
    assert run_there(METRICS) == [[[0, 0], [0, 0]], [[0, 0], [1, 3]], [[0, 0], [1, 5]]]
