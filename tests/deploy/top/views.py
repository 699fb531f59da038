"""Looks at fleets that the tests of `headrace top` make up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from deploy.local.show.overview import Look, overview
from shared import subjects
from shared.hashing import self_test
from shared.messages.cards import INSTANCE, MODEL_CARD, Instance, KvLayout, ModelCard, Role, ServiceName
from shared.messages.codec import JSON_HEADER
from shared.messages.frontends import RecentRequests, RequestWay
from shared.messages.kvbm import KvbmState, LayoutState, TierState
from shared.messages.load import LoadReport
from shared.messages.people import RouterState

BLOCK = 16
LAYOUT = KvLayout("float32", 2, 2, 8, BLOCK)


def entry(service: ServiceName, name: str, *, state: str = "", machine: str = "m1") -> dict[str, bytes]:
    value = Instance("default", service, name, 1, machine, 42, 1.0, "0.1.0", http="http://127.0.0.1:1", state=state)
    return {subjects.instance_key("default", service, name): INSTANCE.encode(value, JSON_HEADER)}


def card(worker: str, model: str = "m", device: str = "cpu", role: Role = "aggregated") -> dict[str, bytes]:
    value = ModelCard(
        model, worker, "/p", "t", self_test(BLOCK), 2048, 100, BLOCK, 100, LAYOUT, (), role, device=device
    )
    return {subjects.model_key("default", model, worker): MODEL_CARD.encode(value, JSON_HEADER)}


def worker(name: str, *, model: str = "m", state: str = "", role: Role = "aggregated") -> dict[str, bytes]:
    return entry("worker", name, state=state) | card(name, model, role=role)


def load(name: str, held: int = 0, running: int = 0, waiting: int = 0, tokens: int = 0, cached: int = 0) -> LoadReport:
    return LoadReport(name, 1, 0, waiting, running, 0, 100, held, cached, output_tokens=tokens)


def store(name: str, hit_rate: float | None = 0.5, layouts: int = 1, reason: str = "") -> KvbmState:
    tier = TierState("on", reason, 100, 40, hit_rate)
    shown = [LayoutState(f"{number:016x}", "m", LAYOUT, tier, None, 1, {}) for number in range(layouts)]
    return KvbmState(name, "/dev/shm/x", 1 << 20, 1.0, 300.0, shown)


def way(name: str, *instances: str, attempt: int = 2, age_s: float = 1.0, outcome: str = "") -> RequestWay:
    return RequestWay(name, "m", age_s, 10, attempt=attempt, instances=instances, outcome=outcome)


def look(
    values: Mapping[str, bytes],
    loads: Iterable[LoadReport] = (),
    at_s: float = 10.0,
    *,
    routers: Sequence[RouterState] = (),
    stores: Sequence[KvbmState] = (),
    recent: Sequence[RecentRequests] = (),
    notes: Sequence[str] = (),
    connected: bool = True,
) -> Look:
    reports = {report.instance: report for report in loads}
    seen = overview("default", "nats://n", "etcd e", values, reports, routers, stores, notes, 100.0)
    asked = frozenset(row.instance for row in seen.instances if row.service != "worker")
    return Look(seen, dict.fromkeys(reports, at_s), tuple(recent), asked, connected)
