"""Every metric of ours that some process shows, as its registry has it."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry

from deploy.local.autoscale.autoscale import ScaleMetrics
from services.frontend.auth.access import KeyMetrics
from services.frontend.auth.accounts import Accounts
from services.frontend.metrics import Metrics
from services.kvbm.metrics import StoreMetrics
from services.router.metrics import RouterMetrics
from services.worker.kv_connector.metrics import KvbmMetrics
from services.worker.metrics import WorkerMetrics
from services.worker.reports.gpus import GpuTelemetry
from services.worker.reports.observations import EngineObservations
from services.worker.turns.metrics import TurnsMetrics
from shared.bus.event_planes import EventPlanes
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.outbox import Outbox
from shared.bus.zmq_events import ZmqEventBus
from shared.config import DiscoveryConfig, ServiceConfig, TraceConfig
from shared.discovery.directory import Directory
from shared.discovery.etcd import EtcdDiscovery
from shared.metrics import register_scraped
from shared.runtime.lifecycle import UNREADABLE
from shared.tracing.exporter import SpanQueue
from shared.tracing.spans import SpanRecord
from shared.tracing.tracer import Tracer

SERVICES = ("frontend", "router", "worker", "kvbm", "turns", "autoscale")


class KnownMetric(NamedTuple):
    """What a metric's line at /metrics says of it."""

    kind: str
    labels: tuple[str, ...]
    help: str
    services: tuple[str, ...]


class NoCollector:
    """An exporter that is never asked."""

    def send(self, spans: Sequence[SpanRecord], resource: dict[str, str]) -> str:
        raise AssertionError(spans)

    def abort(self) -> None:
        pass


async def every_metric() -> dict[str, list[KnownMetric]]:
    """The metrics by name, counters with their `_total`. Services may have different ones of the same name."""
    found: dict[str, dict[tuple[str, tuple[str, ...], str], list[str]]] = {}
    for service in SERVICES:
        registry = CollectorRegistry()
        await _register(service, registry)
        for collector in registry._collector_to_names:  # the registry has no public list of its metrics
            for name, kind, labels, text in _described(collector):
                found.setdefault(name, {}).setdefault((kind, labels, text), []).append(service)
    return {
        name: [KnownMetric(*key, tuple(services)) for key, services in kinds.items()]
        for name, kinds in sorted(found.items())
    }


async def _register(service: str, registry: CollectorRegistry) -> None:
    if service == "autoscale":  # a command, which has no others
        ScaleMetrics(registry)
        return
    bus = MemoryBus(MemoryBroker())
    discovery = EtcdDiscovery(DiscoveryConfig(endpoints=("127.0.0.1:1",)), registry=registry)
    Directory(discovery, bus, "test", registry=registry)
    await discovery.close()
    with ZmqEventBus() as zmq:
        EventPlanes(zmq, ServiceConfig(), "test", registry)
    register_scraped(UNREADABLE, registry, lambda: 0)
    Tracer(TraceConfig(), registry, lambda _span: None, draw=Random(1))
    SpanQueue(TraceConfig(), registry, NoCollector(), {})
    if service == "frontend":
        Metrics(registry)
        registry.register(KeyMetrics(Accounts()))
        Outbox(bus, "test", registry, batch_s=0.01)
    elif service == "router":
        RouterMetrics(registry)
        Outbox(bus, "test", registry, batch_s=0.01)
    elif service == "kvbm":
        StoreMetrics(registry)
    elif service == "turns":
        TurnsMetrics(registry)
    else:
        WorkerMetrics(registry)
        KvbmMetrics(registry)
        EngineObservations(registry)
        GpuTelemetry(registry)


def _described(collector: Any) -> list[tuple[str, str, tuple[str, ...], str]]:
    if hasattr(collector, "_type"):
        described = [(collector._name, collector._type, collector._labelnames, collector._documentation)]
    else:
        described = [
            (one.name, one.type, getattr(one, "_labelnames", ()), one.documentation) for one in collector.describe()
        ]
    return [
        (f"{name}_total" if kind == "counter" else name, kind, tuple(labels), text)
        for name, kind, labels, text in described
    ]
