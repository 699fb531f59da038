"""A fleet in virtual time (services/virtual) whose workers come and go as a rule says, and what that has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import ceil, cos, pi
from random import Random

from deploy.local.autoscale.capacity import Workers
from deploy.local.autoscale.decider import FleetSeen, ScalePolicy, ScaleState, TrafficCounts, decide
from services.virtual.fleet import SimulatedFleet
from services.virtual.loads import LoadTrace, TraceRequest
from services.virtual.workers import StepTime

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

    def __init__(self, load: LoadTrace, step_s: StepTime, rule: Rule, *, workers: int, start_s: float) -> None:
        self.fleet = SimulatedFleet(load, "kv", capacity_blocks=KV_TOKENS // BLOCK)
        self._load, self._step_s, self._rule, self._start_s = load, step_s, rule, start_s
        self.worker_s = 0.0
        self.wanted: list[int] = []
        self._coming = 0
        self._serving: list[str] = []
        self._leaving: list[str] = []
        self._arrived = self._ended = 0
        self._open: list[int] = []
        for _ in range(workers):
            self._serving.append(self.fleet.join(step_s))
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
        now_s, there = self.fleet.clock.now_s, len(self._serving) + len(self._leaving) + self._coming
        self.worker_s += EVERY_S * there
        (number,) = self._rule(self._seen(now_s), now_s).values()
        self.wanted.append(number)
        for _ in range(number - len(self._serving) - self._coming):
            self._coming += 1
            self.fleet.clock.after(self._start_s, self._join)
        while len(self._serving) > number:
            self._drain(min(self._serving, key=lambda name: len(self.fleet.workers[name].attempts)))
        for name in [name for name in self._leaving if not self.fleet.workers[name].attempts]:
            self._leaving.remove(name)
            self.fleet.workers.pop(name).gone = True
        self.fleet.clock.after(EVERY_S, self._turn)

    def _join(self) -> None:
        self._coming -= 1
        self._serving.append(self.fleet.join(self._step_s))

    def _drain(self, name: str) -> None:
        """Take a worker out of routing, as one that drains is; it goes once it has ended its requests."""
        self._serving.remove(name)
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
            serving={"aggregated": len(self._serving)},
            alive={"aggregated": len(self._serving) + len(self._leaving) + self._coming},
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


def fixed(workers: int) -> Rule:
    return lambda _seen, _now_s: {"aggregated": workers}
