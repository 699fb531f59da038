"""What one look at a running fleet has seen, in the numbers that decider.py needs. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from math import isfinite

from deploy.local.autoscale.capacity import ROLES, Workers
from deploy.local.autoscale.decider import FleetSeen, TrafficCounts
from deploy.local.show.overview import InstanceRow, Look
from deploy.local.show.rates import Sample

YOUNG_S = 5.0
"""The seconds by which a frontend's start may lie before the former look that did not see it."""
_TOTALS = ("prompts", "refused", "asked_tokens", "answers", "answer_tokens")


def seen(found: Look, before: Mapping[str, Sample], now: Mapping[str, Sample]) -> FleetSeen:
    """Return what was seen. `before` and `now` are what each frontend has counted since its start: at the last look,
    and at this one."""
    now = {name: each for name, each in now.items() if _is_finite(each)}
    rows = found.overview.instances
    frontends = {row.instance: row.age_s for row in rows if row.service == "frontend"}
    over_s = max((each.at_s - before[name].at_s for name, each in now.items() if name in before), default=0.0)
    complete = found.connected and frontends.keys() == now.keys() >= before.keys() and bool(frontends)
    grown = dict.fromkeys((*_TOTALS, "cached"), 0.0)
    for name, each in now.items():
        if name not in before and (not before or frontends.get(name, 0.0) > over_s + YOUNG_S):
            complete = complete and not before
            continue
        first = before.get(name, Sample(0.0))
        for field in _TOTALS:
            grown[field] += max(0.0, each.totals.get(field, 0.0) - first.totals.get(field, 0.0))
        grown["cached"] += max(0.0, sum(each.cached.values()) - sum(first.cached.values()))
    served = {name for row in found.overview.models for name in row.instances}
    workers = [row for row in rows if row.service == "worker"]
    ready = [row for row in workers if row.instance in served and not row.state]
    loads = [row.load for row in workers if row.load is not None]
    counts = [grown[name] for name in ("prompts", "refused", "asked_tokens", "cached", "answers", "answer_tokens")]
    return FleetSeen(
        complete=complete and all(row.load is not None for row in ready),
        counts=TrafficCounts(over_s, *counts),
        in_flight=int(sum(each.inflight for each in now.values())),
        waiting_tokens=sum(max(0, load.waiting_tokens) for load in loads),
        held=sum(load.running + load.waiting for load in loads),
        serving=_by_role(ready),
        alive=_by_role(workers),
    )


def _is_finite(counted: Sample) -> bool:
    return all(map(isfinite, (counted.inflight, *counted.totals.values(), *counted.cached.values())))


def kv_tokens(found: Look) -> float:
    """Return the tokens of KV of the worker with the least room. 0 if none has said it."""
    sizes = {name: row.block_size for row in found.overview.models for name in row.instances}
    rooms = [
        row.load.total_blocks * sizes[row.instance]
        for row in found.overview.instances
        if row.load is not None and row.instance in sizes
    ]
    return float(min(rooms, default=0))


def quietest(rows: Collection[InstanceRow]) -> list[int]:
    """Return the process ids of the workers, those with the fewest requests first."""
    held = [(row.load.running + row.load.waiting, row.pid) for row in rows if row.load is not None and row.pid_usable]
    return [pid for _, pid in sorted(held)]


def _by_role(rows: Collection[InstanceRow]) -> Workers:
    counted = Counter(row.role or "aggregated" for row in rows)
    return {role: counted[role] for role in ROLES if counted[role]}
