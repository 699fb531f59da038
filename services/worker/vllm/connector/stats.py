"""The connector's statistics in vLLM's own interfaces: its log line, and metrics at its /metrics.

The scheduler half gives sums since the start; vLLM hands them to the loggers and to Prometheus in its API server. What
is in `data` travels between processes, so it is made of plain values.
"""

from __future__ import annotations

from typing import Any

import msgspec
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

from services.worker.contracts.messages import Exchanged, KvbmLink
from services.worker.vllm.kv_transfer import LINK, PREFETCHED, STORED

COUNTERS = {
    "saved_blocks": "Blocks that this engine has given to its kvbm.",
    "loaded_blocks": "Blocks that this engine has loaded from its kvbm.",
    "bad_blocks": "Copies to or from the kvbm's pool that were of no use.",
    "saved_bytes": "Bytes copied to the kvbm's pool.",
    "loaded_bytes": "Bytes copied from the kvbm's pool.",
    "save_s": "Seconds spent copying to the kvbm's pool.",
    "load_s": "Seconds spent copying from the kvbm's pool.",
    "differing_blocks": "Loaded blocks that differed from the pool's, and were computed.",
    "damaged_blocks": "Loaded blocks without their checksum, which were computed and removed from the kvbm.",
    "dropped_blocks": "Computed blocks that were not offered to the kvbm, since too many waited.",
    "prefetched_blocks": "Blocks of expected prompts that were loaded from the kvbm before their requests came.",
    "late_lookups": "Requests that were computed since the kvbm did not answer in time.",
}
"""Sum in `data` → what it counts."""


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]
    """Sums since the start, the link to the kvbm, and what was stored since the last one. A newer one replaces an older
    one."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return ConnectorStats(data={**self.data, **other.data})

    def reduce(self) -> dict[str, int | float]:
        shown = ("saved_blocks", "loaded_blocks", "bad_blocks", "dropped_blocks", "late_lookups")
        return {f"kvbm {name.replace('_', ' ')}": self.data.get(name, 0) for name in shown}

    def is_empty(self) -> bool:
        return not self.data


def stats_of(
    exchanged: Exchanged, link: KvbmLink, stored: list[str], *, dropped: int, late: int, prefetched: int = 0
) -> ConnectorStats:
    """Return what the scheduler half reports."""
    sums = msgspec.to_builtins(exchanged)
    own = {"dropped_blocks": dropped, "late_lookups": late, PREFETCHED: prefetched}
    return ConnectorStats(data={**sums, **own, LINK: msgspec.to_builtins(link), STORED: stored})


class ConnectorMetrics(KVConnectorPromMetrics):  # type: ignore[misc]
    """Prometheus metrics of all engines of one API server."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._seen: dict[tuple[int, str], float] = {}
        """(Engine, sum) → its last value."""
        self._counters = {
            name: self._counter_cls(
                name=f"vllm:headrace_{name[:-1] + 'seconds' if name.endswith('_s') else name}",
                documentation=text,
                labelnames=labelnames,
            )
            for name, text in COUNTERS.items()
        }
        self._attached = self._gauge_cls(
            name="vllm:headrace_kvbm_attached",
            documentation="Whether blocks are exchanged with a kvbm.",
            multiprocess_mode="mostrecent",
            labelnames=labelnames,
        )
        for labels in per_engine_labelvalues.values():  # all are there, at 0, before an engine reports anything
            for metric in (*self._counters.values(), self._attached):
                metric.labels(*labels)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = self.per_engine_labelvalues[engine_idx]
        for name, counter in self._counters.items():
            value, seen = transfer_stats_data.get(name, 0), self._seen.get((engine_idx, name), 0)
            counter.labels(*labels).inc(max(0, value - seen))
            self._seen[engine_idx, name] = value
        link = transfer_stats_data.get(LINK)
        if link is not None:
            self._attached.labels(*labels).set(1 if link["kvbm"] else 0)
