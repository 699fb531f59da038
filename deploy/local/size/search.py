"""Which fleets a plan tries, and which of them is the answer. Pure.

    the first setting, with more and more workers ─▶ a number that meets the targets
    one worker less, with every setting that may still do ─▶ again, down to one worker
    every setting with the fewest workers that meet the targets ─▶ the best of them

A setting may still do with fewer workers unless its first tokens already came too late with more. Times between tokens
say nothing of that kind: fewer workers may have longer queues, and fewer prompts between the steps of their answers.
Fleets that are larger than one that meets the targets are left out. Prices are by worker, so that the cheapest fleet is
the one with the fewest workers. Each profile has a search of its own, up to the GPUs of what is known to do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product

from msgspec import Struct

from shared.messages.virtual import VirtualResult

GIVEN_UP = 4.0
"""How many times its target a figure of a run that was given up is at least."""


class FleetSetting(Struct, frozen=True):
    """A setting of all workers."""

    split: bool
    policy: str
    max_running: int
    step_s: float
    store_tokens: int


class FleetCandidate(Struct, frozen=True):
    """One fleet that a plan may choose."""

    workers: int
    """The number of all workers."""
    prefill: int
    """The number of those that compute prompts for others. 0 if all do all."""
    setting: FleetSetting

    @property
    def name(self) -> str:
        """The fleet in words."""
        mine = self.setting
        parts = [f"{self.prefill}+{self.workers - self.prefill}" if self.prefill else f"{self.workers}"]
        parts += [mine.policy, f"{mine.max_running} running", f"steps of {mine.step_s:g} s"]
        return ", ".join([*parts, f"store of {mine.store_tokens:,} tokens"] if mine.store_tokens else parts)


class Targets(Struct, frozen=True):
    """Upper limits in seconds, such as `ttft_p90`."""

    limits: Mapping[str, float]

    def misses(self, result: VirtualResult) -> dict[str, float]:
        """Return each figure of a result, divided by its limit: above 1 it misses."""
        figures = {
            f"{name}_{share}": getattr(getattr(result, f"{name}_s"), share)
            for name in ("ttft", "itl")
            for share in ("p50", "p90", "p99")
        }
        found = {name: figures[name] / limit for name, limit in self.limits.items()}
        if result.given_up:
            return {name: max(ratio, GIVEN_UP) if name.startswith("ttft") else ratio for name, ratio in found.items()}
        return found

    def is_late(self, result: VirtualResult) -> bool:
        """Return whether first tokens come too late."""
        found = self.misses(result).items()
        return bool(result.failed) or any(ratio > 1 for name, ratio in found if name.startswith("ttft"))

    def worst(self, result: VirtualResult) -> float:
        """Return the worst ratio; above 1 the result does not meet the targets."""
        return max([*self.misses(result).values(), *([GIVEN_UP] if result.failed else [])])


def settings_of(
    *,
    splits: bool,
    policies: Sequence[str],
    max_running: Sequence[int],
    step_s: Sequence[float],
    store_tokens: Sequence[int],
) -> list[FleetSetting]:
    """Return all settings; the first one is the one that a plan begins with. Roles need a block store."""
    together = [FleetSetting(False, *each) for each in product(policies, max_running, step_s, store_tokens)]
    stores = [tokens for tokens in store_tokens if tokens]
    apart = [FleetSetting(True, *each) for each in product(policies, max_running, step_s[:1], stores)]
    return together + (apart if splits else [])


class FleetSearch:
    """A search, which is given each result. `results` has all that were run."""

    def __init__(self, settings: Sequence[FleetSetting], most: int, targets: Targets, *, width: int) -> None:
        """`most` is the largest number of workers, `width` how many fleets are run at the same time."""
        self.results: dict[FleetCandidate, VirtualResult] = {}
        self._settings = settings
        self._most = most
        self._targets = targets
        self._width = width
        self._few = 0
        """The first setting misses with this number of workers."""
        self._enough = most + 1
        """The fewest workers of which it is known that they meet the targets; `most` + 1 if none do."""
        self._sized = False
        """True once the first setting's number is known."""
        self._size = most
        """The number of workers that is looked at on the way down. 0 at its end."""

    def add(self, candidate: FleetCandidate, result: VirtualResult) -> None:
        """Take up a result."""
        self.results[candidate] = result

    def next(self) -> list[FleetCandidate]:
        """Return the fleets to run next, all of which may run at the same time; empty at the end."""
        while not self._sized:
            if wanted := self._sizes():
                return wanted
        self._size = min(self._size, self._enough - 1)
        while self._size:
            if wanted := self._missing(self._size):
                return wanted
            if any(self._targets.worst(self.results[each]) <= 1 for each in self._run(self._size)):
                self._enough = self._size
            self._size = self._size - 1 if self._run(self._size) else 0
        return self._missing(min(self._enough, self._most))

    def _sizes(self) -> list[FleetCandidate]:
        """Return further sizes of the first setting to run; empty once the results so far were taken into account."""
        for candidate, result in self.results.items():
            if candidate.setting != self._settings[0] or candidate.prefill:
                continue
            if self._targets.worst(result) <= 1:
                self._enough = min(self._enough, candidate.workers)
        missed = [
            each.workers
            for each, result in self.results.items()
            if each.setting == self._settings[0] and each.workers < self._enough and self._targets.worst(result) > 1
        ]
        self._few = max(missed, default=0)
        between = range(self._few + 1, self._enough)
        self._sized = not between
        if self._enough > self._most:  # none is enough yet: twice as many each time
            wanted = (
                {min(self._most, max(1, 2 * self._few) << step) for step in range(self._width)} if between else set()
            )
        else:
            wanted = {
                between[len(between) * step // (self._width + 1)] for step in range(1, self._width + 1) if between
            }
        return [FleetCandidate(size, 0, self._settings[0]) for size in sorted(wanted)]

    def _run(self, workers: int) -> list[FleetCandidate]:
        """Return the fleets of a size that were run."""
        return [each for each in self._fleets(workers) if each in self.results]

    def _missing(self, workers: int) -> list[FleetCandidate]:
        """Return the fleets of a size that are to be run."""
        return [each for each in self._fleets(workers) if each not in self.results and not self._is_hopeless(each)]

    def _is_hopeless(self, candidate: FleetCandidate) -> bool:
        """Return whether a fleet of the same setting, with no fewer workers of any kind, had first tokens too late."""
        return any(
            other.setting == candidate.setting
            and other.prefill >= candidate.prefill
            and other.workers - other.prefill >= candidate.workers - candidate.prefill
            and self._targets.is_late(result)
            for other, result in self.results.items()
        )

    def _fleets(self, workers: int) -> list[FleetCandidate]:
        """Return all fleets of a size."""
        return [
            FleetCandidate(workers, prefill, setting)
            for setting in self._settings
            for prefill in (range(1, workers) if setting.split else (0,))
            if workers >= 1
        ]
