"""The workers that live and get no requests, and why. Pure.

A fleet of which a part does nothing looks healthy: every process is up, and every request is answered, late.

    unregistered   its load reports come, and discovery does not have it
    no_card        discovery has it without a model card, and no operator asked for that
    refused        the cards of it are refused: they contradict this program, or other workers of the model
    unused         it had no request for UNUSED_S in which prompts waited at another worker of its model
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, get_args

from services.router.selection.load import CandidateLoad
from shared.messages.cards import Instance

Kind = Literal["unregistered", "no_card", "refused", "unused"]
KINDS: tuple[Kind, ...] = get_args(Kind)
REPORTED_S = 10.0
"""How long a worker without an entry is remembered after its last report."""
UNUSED_S = 60.0
LOOK_LIMIT_S = 5.0
"""The most seconds that one look adds to the time for which a worker is unused: a router that was frozen saw none."""
HEARD_LIMIT = 4096
"""Most workers without an entry that are remembered."""


class LeftOutWorker(NamedTuple):
    """One worker that gets no requests."""

    instance: str
    kind: Kind
    reason: str


class LeftOutWorkers:
    """Tells which workers are left out. Times are seconds on any monotonic clock."""

    def __init__(self) -> None:
        self.found: list[LeftOutWorker] = []
        """The workers that were left out at the last look, in the order of their ids."""
        self._heard_s: dict[str, float] = {}
        """Workers that were not in discovery when their last report came → when that was, longest ago first."""
        self._unused_s: dict[tuple[str, str], float] = {}
        """(Model, worker) → for how long it had nothing to do while prompts waited elsewhere."""
        self._looked_s = 0.0

    def report_of_unknown(self, instance: str, now_s: float) -> None:
        """Note the load report of a worker that discovery does not have."""
        self._heard_s.pop(instance, None)
        self._heard_s[instance] = now_s
        if len(self._heard_s) > HEARD_LIMIT:
            del self._heard_s[next(iter(self._heard_s))]

    def look(
        self,
        now_s: float,
        workers: Iterable[Instance],
        cards: Iterable[tuple[str, str]],
        refused: Mapping[tuple[str, str], str],
        loads: Mapping[str, Mapping[str, CandidateLoad]],
    ) -> list[LeftOutWorker]:
        """Find the workers that are left out now; to be called about once a second. Return `found`.

        `workers` are those in discovery, `cards` the (model, instance) of accepted cards, `refused` those of refused
        ones with the reason, `loads` model → worker → load of the workers that may be chosen for a prompt.
        """
        known = {each.instance: each for each in workers}
        self._heard_s = {
            worker: at_s for worker, at_s in self._heard_s.items() if worker not in known and now_s - at_s < REPORTED_S
        }
        found = [
            LeftOutWorker(worker, "unregistered", "it reports, and is not in discovery") for worker in self._heard_s
        ]
        serving = {instance for _, instance in cards}
        whys: dict[str, str] = {}
        for (model, instance), why in refused.items():
            whys.setdefault(instance, f"its card of {model} is refused: {why}")
        for instance, worker in known.items():
            if instance in serving or worker.state:
                continue
            if instance in whys:
                found.append(LeftOutWorker(instance, "refused", whys[instance]))
            else:
                found.append(LeftOutWorker(instance, "no_card", "it is in discovery without a model card"))
        self.found = sorted(found + self._unused(now_s, loads))
        return self.found

    def _unused(self, now_s: float, loads: Mapping[str, Mapping[str, CandidateLoad]]) -> list[LeftOutWorker]:
        passed_s = min(now_s - self._looked_s, LOOK_LIMIT_S)
        self._looked_s = now_s
        before, self._unused_s = self._unused_s, {}
        for model, of_workers in loads.items():
            # One request's own prompt is no queue.
            queues = any(load.requests > 1 and load.queued_tokens for load in of_workers.values())
            for worker, load in of_workers.items():
                if not load.requests:
                    self._unused_s[model, worker] = before.get((model, worker), 0.0) + queues * passed_s
        return [
            LeftOutWorker(
                worker, "unused", f"it had no request for {model}, while prompts waited elsewhere for {idle_s:.0f} s"
            )
            for (model, worker), idle_s in self._unused_s.items()
            if idle_s >= UNUSED_S
        ]
