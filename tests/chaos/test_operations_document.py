"""docs/operations.md speaks of metrics and settings that exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from services.frontend.config import FrontendConfig
from services.frontend.metrics import Metrics as FrontendMetrics
from services.kvbm.config import KvbmConfig
from services.kvbm.metrics import StoreMetrics
from services.router.config import RouterConfig
from services.router.metrics import RouterMetrics as RouterMetrics
from services.worker.config import WorkerConfig
from services.worker.kv_connector.metrics import KvbmMetrics
from services.worker.metrics import WorkerMetrics as WorkerMetrics
from shared.bus.outbox import Outbox
from shared.discovery.directory import Directory
from shared.discovery.etcd import EtcdDiscovery
from tests.fakes.memory_bus import MemoryBroker, MemoryBus

DOCUMENT = (Path(__file__).parents[2] / "docs" / "operations.md").read_text(encoding="utf-8")


async def test_every_metric_it_names_exists() -> None:
    known: set[str] = set()
    for of_service in (FrontendMetrics, RouterMetrics, StoreMetrics, WorkerMetrics, KvbmMetrics):
        registry = CollectorRegistry()
        of_service(registry)
        known |= names(registry)
    registry = CollectorRegistry()
    bus = MemoryBus(MemoryBroker())
    Outbox(bus, "test", registry, batch_s=0.01)
    discovery = EtcdDiscovery(("127.0.0.1:1",), registry=registry)
    Directory(discovery, bus, "test", registry=registry)
    await discovery.close()
    known |= names(registry)
    named = set(re.findall(r"headrace_[a-z_]+", DOCUMENT))
    assert named
    assert named <= known


async def test_every_setting_it_names_exists() -> None:
    schemas = (FrontendConfig, RouterConfig, KvbmConfig, WorkerConfig)
    known = {".".join(path) for schema in schemas for path in settings(schema)}
    named = set(re.findall(r"`([a-z_]+\.[a-z_]+_s|[a-z]+_s|(?:limits|pool|disk|kvbm)\.[a-z_]+)`", DOCUMENT))
    assert "limits.rescue_s" in named
    assert named <= known


def names(registry: CollectorRegistry) -> set[str]:
    """As Prometheus shows them; a histogram by the name it is asked for."""
    return {f"{family.name}_total" if family.type == "counter" else family.name for family in registry.collect()}


def settings(schema: type[msgspec.Struct], *above: str) -> Iterator[tuple[str, ...]]:
    """The path of every setting, tables included."""
    for field in msgspec.structs.fields(schema):
        yield (*above, field.name)
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, *above, field.name)
