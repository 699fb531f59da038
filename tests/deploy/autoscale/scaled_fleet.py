"""A fleet in virtual time (services/virtual) whose workers come and go as a rule says, and what that has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from math import ceil, cos, pi
from random import Random

from deploy.local.autoscale.capacity import WorkerRole, Workers
from deploy.local.autoscale.decider import FleetSeen, ScalePolicy, ScaleState, TrafficCounts, decide
from services.virtual.fleet import SimulatedFleet
from services.virtual.loads import LoadTrace, TraceRequest
from services.virtual.machine import StepTime
from services.virtual.store import StoreSizes

BLOCK = 64
KV_TOKENS = 200_000
EVERY_S = 5.0
Rule = Callable[[FleetSeen, float], Workers]
"""From what was seen, and when, to the workers that are wanted."""


def day_curve(draw: Random, *, day_s: float, low: float, high: float, bursts: int = 0) -> LoadTrace:
    """Requests of one day: few at night, many at noon, with bursts of a minute that double the rate."""
    starts = [draw.uniform(0, day_s) for _ in range(bursts)]

    def rate(now_s: float) -> float:
        usual = low + (high - low) * (1 - cos(2 * pi * now_s / day_s)) / 2
        return usual * (2 if any(start <= now_s < start + 60 for start in starts) else 1)

    made: list[TraceRequest] = []
    names = iter(range(1, 1 << 40))
    now_s = 0.0
    while (now_s := now_s + draw.expovariate(2 * high)) < day_s:
        if draw.random() * 2 * high < rate(now_s):
            prompt, output = int(draw.lognormvariate(7.3, 0.6)), int(draw.lognormvariate(4.2, 0.6))
            prompt = min(8000, max(64, prompt))
            blocks = [next(names) for _ in range(-(-prompt // BLOCK))]
            made.append(TraceRequest(len(made), now_s, blocks, prompt, min(400, max(2, output))))
    return LoadTrace("day", BLOCK, made)


class ScaledFleet:
    """One run of a load. Misses and worker hours are known at its end."""

    def __init__(self, load: LoadTrace, step_s: StepTime, rule: Rule, *, workers: Workers, start_s: float) -> None:
        """`workers` are those at the beginning, and the roles. Those of a split hand over through a block store."""
        sizes = None if "aggregated" in workers else StoreSizes(40 * KV_TOKENS // BLOCK, 0)
        self.fleet = SimulatedFleet(load, "kv", capacity_blocks=KV_TOKENS // BLOCK, sizes=sizes)
        self._load, self._step_s, self._rule, self._start_s = load, step_s, rule, start_s
        self.worker_s = 0.0
        self.wanted: list[Workers] = []
        self._coming: dict[WorkerRole, int] = dict.fromkeys(workers, 0)
        self._serving: dict[WorkerRole, list[str]] = {role: [] for role in workers}
        self._leaving: list[str] = []
        self._arrived = 0
        self._open: list[int] = []
        for role, number in workers.items():
            self._serving[role] += [self.fleet.join(step_s, role) for _ in range(number)]
        self.fleet.clock.after(EVERY_S, self._turn)

    def run(self) -> ScaledFleet:
        self.fleet.run()
        return self

    def misses(self, ttft_s: float, itl_s: float) -> float:
        """The share of requests that failed, or whose first token or whose tokens came too late."""
        late = 0
        for each in self.fleet.journeys:
            tokens = max(1, each.request.output_tokens - 1)
            slow = each.end_s - each.first_token_s > itl_s * tokens
            late += bool(each.failed) or each.ttft_s > ttft_s or (slow and tokens > 8)
        return late / len(self.fleet.journeys)

    @property
    def changes(self) -> int:
        return sum(before != after for before, after in pairwise(self.wanted))

    def _turn(self) -> None:
        now_s = self.fleet.clock.now_s
        self.worker_s += EVERY_S * sum(self._alive().values())
        wanted = self._rule(self._seen(now_s), now_s)
        self.wanted.append(wanted)
        for role, number in wanted.items():
            serving = self._serving[role]
            for _ in range(number - len(serving) - self._coming[role]):
                self._coming[role] += 1
                self.fleet.clock.after(self._start_s, partial(self._join, role))
            while len(serving) > number:
                self._drain(role, min(serving, key=lambda name: len(self.fleet.workers[name].attempts)))
        for name in [name for name in self._leaving if not self.fleet.workers[name].attempts]:
            self._leaving.remove(name)
            self.fleet.workers.pop(name).gone = True
        self.fleet.clock.after(EVERY_S, self._turn)

    def _alive(self) -> dict[WorkerRole, int]:
        """The workers that are paid for. Those that drain count for the first role."""
        alive = {role: len(names) + self._coming[role] for role, names in self._serving.items()}
        alive[next(iter(alive))] += len(self._leaving)
        return alive

    def _join(self, role: WorkerRole) -> None:
        self._coming[role] -= 1
        self._serving[role].append(self.fleet.join(self._step_s, role))

    def _drain(self, role: WorkerRole, name: str) -> None:
        """Take a worker out of routing, as one that drains is; it goes once it has ended its requests."""
        self._serving[role].remove(name)
        self._leaving.append(name)
        for cleanup in self.fleet.router.remove_instance(name):
            while cleanup.step(1 << 16):
                pass

    def _seen(self, now_s: float) -> FleetSeen:
        requests, journeys = self._load.requests, self.fleet.journeys
        new = list(self._new(now_s))
        self._open += new
        over = [number for number in self._open if journeys[number].end_s >= 0]
        refused = sum(bool(journeys[number].failed) for number in over)
        self._open = [number for number in self._open if journeys[number].end_s < 0]
        reports = [worker.report(KV_TOKENS // BLOCK) for worker in self.fleet.workers.values()]
        return FleetSeen(
            complete=True,
            counts=TrafficCounts(
                EVERY_S,
                len(new) - refused,
                refused,
                sum(requests[number].prompt_tokens for number in new),
                sum(journeys[number].cached_tokens for number in over),
                len(over),
                sum(requests[number].output_tokens for number in over),
            ),
            in_flight=len(self._open),
            waiting_tokens=sum(report.waiting_tokens for report in reports),
            held=sum(report.running + report.waiting for report in reports),
            serving={role: len(names) for role, names in self._serving.items()},
            alive=self._alive(),
        )

    def _new(self, now_s: float) -> Iterator[int]:
        while self._arrived < len(self._load.requests) and self._load.requests[self._arrived].arrival_s <= now_s:
            yield self._arrived
            self._arrived += 1


def planned(policy: ScalePolicy) -> Rule:
    """The rule of `headrace autoscale`."""
    state = ScaleState()

    def rule(seen: FleetSeen, now_s: float) -> Workers:
        nonlocal state
        decision, state = decide(policy, state, seen, now_s, 0)
        return decision.wanted

    return rule


def threshold(requests: float, cool_down_s: float, most: int) -> Rule:
    """The rule of a HorizontalPodAutoscaler: a number of requests a worker, with its window."""
    wanted: list[tuple[float, int]] = []

    def rule(seen: FleetSeen, now_s: float) -> Workers:
        wanted.append((now_s, min(most, max(1, ceil(seen.held / requests)))))
        return {"aggregated": max(number for at_s, number in wanted if at_s > now_s - cool_down_s)}

    return rule


def fixed(workers: Workers) -> Rule:
    return lambda _seen, _now_s: workers
