"""Decides how many workers of each role a fleet should have. Pure: state, observation and time in, decision and new
state out.

    counts of the last minutes ─▶ rate when a worker that is asked for now will serve, and the mean request
    queue beyond what the goal allows ─▶ requests to catch up with                 │
                                                                                   ▼
    needed by role (capacity.py) ─▶ within bounds and schedule ─▶ grow at once; shrink to the most that was needed
                                                                  within the cool-down

    nothing shrinks    unless everything was seen, for a whole cool-down
    nothing grows      beyond the bounds; while workers that were asked for do not come, one at a time
    a queue that makes a settled fleet grow means that workers are slower than their times say: the need is multiplied
    from then on, by 4 at most
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp2, sqrt

from msgspec import Struct
from msgspec.structs import replace

from deploy.local.autoscale.capacity import RequestMix, ScaleGoals, WorkerRole, Workers, WorkerTimes, workers_needed

KEPT = 720
"""The most looks that are remembered."""
CATCH_UP_S = 30.0
"""The time within which a queue should be gone."""
LONG_S = 10.0
"""The time within which the requests of a long queue have come."""
MOST_CORRECTION = 4.0
CORRECTION_STEP = 1.05
CORRECTION_HALVED_S = 21_600.0
"""The time without a queue after which half of a correction is left."""
STUCK = 3.0
"""How many times the start of a worker may take before the fleet does not settle."""
MIX_S = 300.0
"""The time after which a request counts a third in the mean."""

FORGOTTEN = 1e-6
"""The weight of requests below which their mean says nothing."""
LONGEST = 1e8
"""The most tokens of a mean request."""


class WorkerBounds(Struct, frozen=True):
    """How many workers of one role there may be."""

    least: int
    most: int


class DaySchedule(Struct, frozen=True):
    """At least `least` workers of a role at some time of the day."""

    begin_minute: int
    end_minute: int
    """The minute of the day at which it ends; before the beginning if that is on the next day."""
    role: WorkerRole
    least: int

    def holds(self, minute: int) -> bool:
        """Return whether it holds at a minute of the day."""
        if self.begin_minute <= self.end_minute:
            return self.begin_minute <= minute < self.end_minute
        return minute >= self.begin_minute or minute < self.end_minute


class ScalePolicy(Struct, frozen=True):
    """What the user wants."""

    times: WorkerTimes
    goals: ScaleGoals
    bounds: Mapping[WorkerRole, WorkerBounds]
    """The roles that are scaled, with their bounds."""
    schedules: tuple[DaySchedule, ...] = ()
    total: int = 0
    """The most workers of all roles together. 0 if only the bounds hold."""
    start_s: float = 60.0
    """The time from an order to a worker that serves."""
    cool_down_s: float = 300.0
    """The time for which fewer workers must have been enough before any is taken away."""
    window_s: float = 60.0
    """The time over which requests are counted."""
    headroom: float = 1.1
    """The factor by which more requests are planned for than are expected."""


class TrafficCounts(Struct, frozen=True):
    """What came and went in an interval."""

    over_s: float = 0.0
    prompts: float = 0.0
    refused: float = 0.0
    """The requests that were refused because no worker had room."""
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0
    answers: float = 0.0
    answer_tokens: float = 0.0


class FleetSeen(Struct, frozen=True):
    """One look at a fleet."""

    complete: bool
    """True if every process that should say something has. If not, the numbers are lower limits."""
    counts: TrafficCounts
    """What came and went since the last look."""
    in_flight: int
    """The requests at the frontends."""
    waiting_tokens: int
    """The prompt tokens that workers have accepted and not computed."""
    held: int
    """The requests of workers, running and waiting."""
    serving: Workers
    """The workers that take requests."""
    alive: Workers
    """The workers that serve, start or drain."""


class ScaleMoment(Struct, frozen=True):
    """What is remembered of one look."""

    at_s: float
    over_s: float
    arrived: float
    needed: Workers


class ScaleState(Struct, frozen=True):
    """What is remembered from one decision to the next."""

    wanted: Workers = {}
    """The workers that should be there. Empty before the first complete look, which takes those that are there."""
    moments: tuple[ScaleMoment, ...] = ()
    """The latest looks, oldest first."""
    mix: TrafficCounts = TrafficCounts()
    """TrafficCounts of which the older ones weigh less."""
    correction: float = 1.0
    served: int = 0
    """The workers that served at the last look."""
    settled_s: float = 0.0
    """When all that were wanted served last, or one more began to serve."""
    seen_s: float = 0.0
    apart_s: float = 0.0
    """Since when other workers are there than are wanted, or when they were asked for again."""


class ScaleDecision(Struct, frozen=True):
    """What should be there, and why."""

    wanted: Workers
    reason: str
    notes: tuple[str, ...] = ()
    needed: Workers = {}
    """What the load alone needs; 0 of a role while nothing is asked. Empty before a complete look."""
    again: bool = False
    """True if the launcher should be asked though nothing else is wanted: it began again, or the number of workers was
    changed without this."""


def decide(
    policy: ScalePolicy, state: ScaleState, seen: FleetSeen, now_s: float, minute: int
) -> tuple[ScaleDecision, ScaleState]:
    """Return what should be there now. `minute` is that of the day."""
    after_s = now_s - state.seen_s if state.seen_s else 0.0
    state = replace(state, mix=_faded(state.mix, seen.counts, after_s), seen_s=now_s)
    if after_s > policy.window_s:  # what was needed meanwhile, and who served, is not known
        state = replace(state, moments=(), settled_s=now_s, apart_s=now_s)
    if not state.wanted:
        there: Workers = {role: seen.alive.get(role, 0) for role in policy.bounds}
        if not seen.complete:
            return ScaleDecision(there, "nothing is decided before everything was seen once"), state
        state = replace(state, wanted=there, settled_s=now_s, apart_s=now_s)
    wanted, mix = state.wanted, _mean(state.mix)
    moment = ScaleMoment(now_s, seen.counts.over_s, seen.counts.prompts + seen.counts.refused, {})
    rate = _expected((*state.moments, moment), policy, now_s)
    queue = _queue(seen, mix, rate, policy)
    served = sum(seen.serving.values())
    settled = all(seen.serving.get(role, 0) >= number for role, number in wanted.items())
    if settled or served > state.served:
        state = replace(state, settled_s=now_s)
    needed = _needed(policy, seen, mix, rate * state.correction, queue / CATCH_UP_S * state.correction)
    bounded = _bounded(policy, needed, minute)
    kept: Workers = bounded if seen.complete else {role: max(number, wanted[role]) for role, number in bounded.items()}
    moments = (*state.moments, replace(moment, needed=kept))[-KEPT:]
    stuck_s = now_s - state.settled_s
    stuck = stuck_s > STUCK * policy.start_s
    new = _within_total(policy, _steered(policy, wanted, kept, moments, now_s, stuck=stuck), wanted)
    state = replace(state, wanted=new, moments=moments, served=served)
    state = replace(state, correction=_corrected(policy, state, seen, after_s, rate, queue, wanted if settled else new))
    if stuck and new != wanted:
        state = replace(state, settled_s=now_s)
    notes = []
    if not seen.complete:
        notes.append("not everything was seen: nothing is taken away")
    if stuck:
        serving = spelled({role: seen.serving.get(role, 0) for role in wanted})
        notes.append(f"the fleet does not settle: {spelled(wanted)} are wanted, {serving} serve")
    there = {role: seen.alive.get(role, 0) for role in new}
    if new != wanted or there == new or not seen.complete:
        state = replace(state, apart_s=now_s)
    again = now_s - state.apart_s > STUCK * policy.start_s
    if again:
        state = replace(state, apart_s=now_s)
        notes.append(f"{spelled(there)} are there, and {spelled(new)} are wanted: the launcher is asked again")
    if state.correction > 1.05:
        notes.append(f"workers are slower than their times say: {state.correction:.2f} times as many are planned")
    reason = f"{rate:.3g} requests/s expected, {queue:.0f} to catch up with, {spelled(needed)} needed"
    return ScaleDecision(new, reason, tuple(notes), needed, again), state


def _expected(points: Sequence[ScaleMoment], policy: ScalePolicy, now_s: float) -> float:
    """Return the requests a second when a worker that is asked for now serves: the mean of a window, more if it has
    risen since the window before, or that of the last quarter if this is a burst. What chance explains is left out, and
    more than twice what was seen is not expected. Exactly 0 if none has come."""
    window_s = policy.window_s

    def mean(begin_s: float, end_s: float) -> float:
        chosen = [each for each in points if begin_s <= now_s - each.at_s < end_s]
        over_s = sum(each.over_s for each in chosen)
        return sum(each.arrived for each in chosen) / over_s if over_s else 0.0

    lately, before, last = mean(0, window_s), mean(window_s, 2 * window_s), mean(0, window_s / 4)
    known = now_s - points[0].at_s >= window_s
    risen = max(0.0, lately - before - sqrt(before / window_s)) if known else 0.0
    burst = last - 2 * sqrt(4 * lately / window_s)
    return min(max(lately + risen * (policy.start_s / window_s + 0.5), burst), 2 * max(lately, last))


def _faded(old: TrafficCounts, new: TrafficCounts, after_s: float) -> TrafficCounts:
    weight = max(0.0, 1 - after_s / MIX_S)
    names = TrafficCounts.__struct_fields__
    return TrafficCounts(**{name: weight * getattr(old, name) + getattr(new, name) for name in names})


def _mean(counts: TrafficCounts) -> RequestMix | None:
    """Return the mean request. None if there has been none."""
    if counts.prompts < FORGOTTEN:
        return None
    prompt = min(max(1.0, counts.prompt_tokens / counts.prompts), LONGEST)
    cached = min(0.95 * prompt, counts.cached_tokens / counts.prompts)
    output = counts.answer_tokens / counts.answers if counts.answers > FORGOTTEN else 1.0
    return RequestMix(prompt, max(0.0, cached), min(max(1.0, output), LONGEST))


def _queue(seen: FleetSeen, mix: RequestMix | None, rate: float, policy: ScalePolicy) -> float:
    """Return how many requests wait beyond those that may, by the goal of nine first tokens of ten."""
    unheld = max(0, seen.in_flight - seen.held)
    computed = 1.0 if mix is None else mix.prompt_tokens - mix.cached_tokens
    return max(0.0, seen.waiting_tokens / max(1.0, computed) + unheld - max(1.0, rate * policy.goals.ttft_s))


def _corrected(
    policy: ScalePolicy, state: ScaleState, seen: FleetSeen, after_s: float, rate: float, queue: float, before: Workers
) -> float:
    """Return the correction after a decision. More workers than the `before`, all of which served, are wanted for a
    queue alone: then it becomes so large that the rate needs one more, or half more if the queue is long. Without a
    queue it fades."""
    found = state.correction
    if not queue:
        return 1 + (found - 1) * exp2(-after_s / CORRECTION_HALVED_S)
    if all(state.wanted[role] <= number for role, number in before.items()):
        return found
    most = 1.5 if queue > LONG_S * rate else 1.0
    wanted: Workers = {role: max(number + 1, int(number * most)) for role, number in before.items()}
    mix = _mean(state.mix)
    while found < MOST_CORRECTION:
        needed = _needed(policy, seen, mix, rate * found, 0.0)
        if any(needed[role] >= number for role, number in wanted.items()):
            return found
        found = min(MOST_CORRECTION, found * CORRECTION_STEP)
    return found


def _needed(
    policy: ScalePolicy, seen: FleetSeen, mix: RequestMix | None, rate: float, more: float
) -> dict[WorkerRole, int]:
    """Return the workers that a load needs: at least one of each role while there is any, none if there is none. `more`
    requests a second are those of a queue, whose prompts are not computed yet."""
    busy = rate > 0 or seen.in_flight > 0 or seen.waiting_tokens > 0 or seen.held > 0
    needed: dict[WorkerRole, int] = {}
    for role, bounds in policy.bounds.items():
        planned = (rate if role == "decode" else rate + more) * policy.headroom
        number = 0 if mix is None else workers_needed(role, planned, mix, policy.times, policy.goals, bounds.most)
        needed[role] = max(int(busy), number)
    return needed


def _bounded(policy: ScalePolicy, needed: Workers, minute: int) -> Workers:
    least: dict[WorkerRole, int] = {role: bounds.least for role, bounds in policy.bounds.items()}
    for each in policy.schedules:
        if each.role in least and each.holds(minute):
            least[each.role] = max(least[each.role], each.least)
    found: Workers = {role: min(max(needed[role], least[role]), bounds.most) for role, bounds in policy.bounds.items()}
    share = min(1.0, policy.total / max(1, sum(found.values()))) if policy.total else 1.0
    return {role: max(least[role], min(number, 1), int(number * share)) for role, number in found.items()}


def _steered(
    policy: ScalePolicy,
    wanted: Workers,
    bounded: Workers,
    moments: tuple[ScaleMoment, ...],
    now_s: float,
    *,
    stuck: bool,
) -> dict[WorkerRole, int]:
    """Grow at once, or by one if those that were asked for do not come; shrink to what a whole cool-down has needed."""
    since_s = now_s - policy.cool_down_s
    whole = moments[0].at_s <= since_s or len(moments) == KEPT
    new = dict(wanted)
    for role, number in bounded.items():
        if number > new[role]:
            new[role] = new[role] + 1 if stuck else number
        elif whole:
            new[role] = min(new[role], max(each.needed[role] for each in moments if each.at_s >= since_s))
    return {role: min(number, policy.bounds[role].most) for role, number in new.items()}


def _within_total(policy: ScalePolicy, new: dict[WorkerRole, int], wanted: Workers) -> dict[WorkerRole, int]:
    """Take from roles that grew what is over the total, first from the one that has most."""
    while policy.total and sum(new.values()) > policy.total:
        grown: list[WorkerRole] = [role for role in new if new[role] > wanted[role]]
        grown = grown or [role for role in new if new[role] > 1]
        if not grown:
            break
        largest: WorkerRole = max(grown, key=lambda role: new[role])
        new[largest] -= 1
    return new


def spelled(workers: Workers) -> str:
    """Return numbers of workers in words."""
    return ", ".join(f"{number} {role}" for role, number in workers.items()) or "none"
