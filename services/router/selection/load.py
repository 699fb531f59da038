"""How busy each candidate is: reservations, corrected by the workers' own reports. Pure.

    reserved ──▶ prefill ──▶ decode ──▶ released
                        Prefilled   Finished, a lease that ended, or a worker that does not know the attempt

A candidate's load is what its last report says, moved on by what has been told since:

    queued tokens = reported waiting tokens - those of known attempts that were prefilled since
                    + uncached tokens of reservations that the report does not know yet and that are not prefilled
    active blocks = reported held blocks - those of known attempts that ended since
                    + blocks of reservations that the report does not know yet

Of a question with a priority, prompt tokens reserved at a lower one are not ahead: workers compute the higher first.

Events come in any order and more than once: what is told of an attempt before its reservation is remembered, up to a
bound. Nothing is released by a timer alone: an attempt is given up only when reports keep coming without it.

A worker *stands still* when its reports show work and no engine step for `frozen_s`, or when no report has come for
that long. Only one who listens all the time can tell: whoever was cut off, or stood still himself, starts afresh.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from msgspec import Struct

from services.router.index.index import CandidateId
from shared.messages import LoadReport, Reserved

AttemptId = tuple[str, int]
"""(request, attempt)."""


class CandidateLoad(Struct, frozen=True, gc=False):
    """One candidate's load as of now."""

    requests: int = 0
    """Attempts reserved, prefilling or decoding."""
    queued_tokens: int = 0
    """Prompt tokens still to be computed."""
    active_blocks: int = 0
    """Blocks that running attempts use, or will."""


IDLE = CandidateLoad()
_PRIORITIES_LIMIT = 16
"""Remembered at once."""


class Speed(Struct, frozen=True, gc=False):
    """How fast one worker is, as it reports; 0: not told."""

    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    """A step that only decodes, with what runs there now."""


UNTOLD = Speed()


class LoadStatistics(Struct, frozen=True):
    """Counts of the whole."""

    reservations: int
    remembered: int
    """Attempts whose end or first token was told before their reservation, or that ended lately."""
    forgotten: int
    """Released because the worker's reports did not know them, or at the limit, since the start."""


class Reservation(Struct):
    """One attempt's load; changed by `Load` alone."""

    reserved: Reserved
    since_s: float
    prefilled: bool = False
    known: bool = False
    """In the candidate's last report."""
    known_s: float = 0.0
    """When a report last had it."""

    @property
    def candidate(self) -> CandidateId:
        return self.reserved.instance, self.reserved.rank

    @property
    def queued_tokens(self) -> int:
        return 0 if self.prefilled else self.reserved.uncached_tokens


@dataclass(slots=True)
class _Place:
    """One candidate's sums."""

    attempts: set[AttemptId] = field(default_factory=set)
    reported_requests: int = 0
    """In the last report, less those of ours in it."""
    reported_tokens: int = 0
    reported_blocks: int = 0
    new_tokens: int = 0
    """Of reservations that the report does not know and that are not prefilled."""
    new_blocks: int = 0
    """Of reservations that the report does not know."""
    queued: dict[int, int] = field(default_factory=dict)
    """Priority → tokens of all reservations that are not prefilled."""
    loads: dict[int, CandidateLoad] = field(default_factory=dict)
    """Priority → what these sums come to for a question of that priority: a memo, emptied when they change."""

    def load(self, priority: int) -> CandidateLoad:
        if len(self.loads) >= _PRIORITIES_LIMIT:
            self.loads.clear()
        behind = sum(tokens for level, tokens in self.queued.items() if level < priority)
        load = self.loads[priority] = CandidateLoad(
            requests=len(self.attempts) + self.reported_requests,
            queued_tokens=max(self.reported_tokens + self.new_tokens - behind, 0),
            active_blocks=self.reported_blocks + self.new_blocks,
        )
        return load

    def queue(self, reservation: Reservation, tokens: int) -> None:
        """So many tokens of the reservation are queued more, or less."""
        priority = reservation.reserved.priority
        self.queued[priority] = self.queued.get(priority, 0) + tokens
        if not self.queued[priority]:
            del self.queued[priority]


@dataclass(slots=True)
class _Worker:
    """One instance's last report."""

    progress: int
    busy: bool
    heard_s: float
    moved_s: float
    """When it last made a step, or had nothing to do."""


class Load:
    """All reservations of one model. Times are seconds on any clock that only grows."""

    def __init__(
        self,
        *,
        limit: int = 100_000,
        remembered_limit: int = 65_536,
        grace_s: float = 3.0,
        unknown_s: float = 10.0,
        frozen_s: float = 5.0,
    ) -> None:
        self._limit = limit
        self._remembered_limit = remembered_limit
        self._grace_s = grace_s
        self._unknown_s = unknown_s
        self._frozen_s = frozen_s
        self._reservations: dict[AttemptId, Reservation] = {}
        self._places: dict[CandidateId, _Place] = {}
        self._frontends: dict[str, set[AttemptId]] = {}
        self.speeds: dict[str, Speed] = {}
        """By instance, as last reported; of those that have reported."""
        self._workers: dict[str, _Worker] = {}
        """By instance, the same."""
        self._looked_s: float | None = None
        self._early: OrderedDict[AttemptId, bool] = OrderedDict()
        """Attempts without a reservation: True ended, False prefilled; oldest first."""
        self._forgotten = 0

    # --- events

    def reserved(self, event: Reserved, now_s: float) -> bool:
        """Take on an attempt's load; False for one that is there already or has ended. At the limit the oldest
        reservation goes."""
        attempt = event.request, event.attempt
        early = self._early.get(attempt)
        if attempt in self._reservations or early:
            return False
        if len(self._reservations) >= self._limit:
            self._forgotten += 1
            self._release(next(iter(self._reservations)))
        self._early.pop(attempt, None)
        reservation = Reservation(event, since_s=now_s, prefilled=early is not None)
        self._reservations[attempt] = reservation
        self._frontends.setdefault(event.frontend, set()).add(attempt)
        place = self._places.setdefault(reservation.candidate, _Place())
        place.attempts.add(attempt)
        place.new_blocks += event.blocks
        place.new_tokens += reservation.queued_tokens
        place.queue(reservation, reservation.queued_tokens)
        place.loads.clear()
        return True

    def prefilled(self, attempt: AttemptId) -> Reservation | None:
        """Its first token has come; the reservation, the first time."""
        reservation = self._reservations.get(attempt)
        if reservation is None:
            self._remember(attempt, ended=False)
            return None
        if reservation.prefilled:
            return None
        self._take_tokens(reservation)
        reservation.prefilled = True
        return reservation

    def finished(self, attempt: AttemptId) -> None:
        """It has ended; whatever is told of it later is ignored."""
        if attempt in self._reservations:
            self._release(attempt)
        self._remember(attempt, ended=True)

    def reported(self, report: LoadReport, now_s: float, *, ranks: int = 1) -> None:
        """A worker's own account. Of an instance with several ranks only which attempts it has is taken from it: the
        rest is their sum, and nobody says whose."""
        self._heard(report, now_s)
        alone = ranks == 1
        if alone:
            self._places.setdefault((report.instance, 0), _Place())
        places = [(report.instance, rank) for rank in range(ranks) if (report.instance, rank) in self._places]
        running = set(report.attempts)
        for candidate in places:
            place = self._places[candidate]
            place.new_tokens = place.new_blocks = 0
            place.queued.clear()
            place.loads.clear()
            for attempt in list(place.attempts):
                reservation = self._reservations[attempt]
                if attempt in running:
                    reservation.known = alone
                    reservation.known_s = now_s
                elif now_s - max(reservation.since_s + self._grace_s, reservation.known_s) >= self._unknown_s:
                    self._forgotten += 1
                    self._drop(attempt)
                    continue
                else:
                    reservation.known = False
                if not reservation.known:
                    place.new_blocks += reservation.reserved.blocks
                    place.new_tokens += reservation.queued_tokens
                place.queue(reservation, reservation.queued_tokens)
            if alone:
                place.reported_tokens = max(report.waiting_tokens, 0)
                place.reported_blocks = max(report.held_blocks, 0)
                ours = sum(self._reservations[attempt].known for attempt in place.attempts)
                place.reported_requests = max(report.waiting + report.running - ours, 0)

    def _heard(self, report: LoadReport, now_s: float) -> None:
        busy = report.waiting + report.running > 0
        self.speeds[report.instance] = Speed(_told(report.prefill_tokens_per_s), _told(report.step_s))
        worker = self._workers.get(report.instance)
        if worker is None:
            self._workers[report.instance] = _Worker(report.progress, busy, now_s, now_s)
            return
        if report.progress != worker.progress or not (busy and worker.busy):
            worker.moved_s = now_s
        worker.progress, worker.busy, worker.heard_s = report.progress, busy, now_s

    def standing_still(self, now_s: float, *, listening: bool = True) -> frozenset[str]:
        """The instances that stand still, as of now; to be asked a few times a second. Not `listening`: reports may
        have been missed since the last time."""
        asleep = self._looked_s is None or now_s - self._looked_s > self._frozen_s / 2
        self._looked_s = now_s
        if asleep or not listening:
            for worker in self._workers.values():
                worker.heard_s = worker.moved_s = now_s
        since_s = now_s - self._frozen_s
        return frozenset(
            instance
            for instance, worker in self._workers.items()
            if worker.heard_s <= since_s or (worker.busy and worker.moved_s <= since_s)
        )

    def frontend_gone(self, frontend: str) -> list[AttemptId]:
        """Its lease ended: what it asked for is released."""
        attempts = sorted(self._frontends.get(frontend, ()))
        for attempt in attempts:
            self._release(attempt)
        return attempts

    def withdrawn(self, attempt: AttemptId) -> None:
        """A reservation that nobody is to count; the attempt may be reserved again."""
        if attempt in self._reservations:
            self._release(attempt)

    def instance_gone(self, instance: str) -> list[AttemptId]:
        """Its lease ended: what was reserved there is released, and its reports are forgotten."""
        released: list[AttemptId] = []
        self._workers.pop(instance, None)
        self.speeds.pop(instance, None)
        for candidate in [place for place in self._places if place[0] == instance]:
            for attempt in sorted(self._places[candidate].attempts):
                self._release(attempt)
                released.append(attempt)
            self._places.pop(candidate, None)
        return released

    # --- questions

    def of(self, candidate: CandidateId, priority: int = 0) -> CandidateLoad:
        """The candidate's load as of now, as a question of that priority meets it."""
        place = self._places.get(candidate)
        if place is None:
            return IDLE
        return place.loads.get(priority) or place.load(priority)

    def candidate_of(self, attempt: AttemptId) -> CandidateId | None:
        """Where an attempt that has not ended is reserved."""
        reservation = self._reservations.get(attempt)
        return None if reservation is None else reservation.candidate

    def statistics(self) -> LoadStatistics:
        """Counts, in constant time."""
        return LoadStatistics(len(self._reservations), len(self._early), self._forgotten)

    def living(self) -> list[Reservation]:
        """All reservations as of now, oldest first; for a router that starts. Linear."""
        return list(self._reservations.values())

    # --- changes

    def _remember(self, attempt: AttemptId, *, ended: bool) -> None:
        ended = self._early.pop(attempt, False) or ended
        self._early[attempt] = ended
        if len(self._early) > self._remembered_limit:
            self._early.popitem(last=False)

    def _take_tokens(self, reservation: Reservation) -> None:
        """Its prompt is not queued any more."""
        place = self._places[reservation.candidate]
        tokens = reservation.queued_tokens
        place.queue(reservation, -tokens)
        place.loads.clear()
        if reservation.known:
            place.reported_tokens = max(place.reported_tokens - tokens, 0)
        else:
            place.new_tokens -= tokens

    def _release(self, attempt: AttemptId) -> None:
        reservation = self._reservations[attempt]
        self._take_tokens(reservation)
        place = self._places[reservation.candidate]
        blocks = reservation.reserved.blocks
        if reservation.known:
            place.reported_blocks = max(place.reported_blocks - blocks, 0)
        else:
            place.new_blocks -= blocks
        self._drop(attempt)
        if not place.attempts and not (place.reported_requests or place.reported_tokens or place.reported_blocks):
            del self._places[reservation.candidate]

    def _drop(self, attempt: AttemptId) -> None:
        """Take the attempt out of every table; its sums are the caller's."""
        reservation = self._reservations.pop(attempt)
        self._places[reservation.candidate].attempts.discard(attempt)
        frontend = self._frontends[reservation.reserved.frontend]
        frontend.discard(attempt)
        if not frontend:
            del self._frontends[reservation.reserved.frontend]

    def validate(self) -> None:
        """Assert every invariant. Linear in the reservations."""
        assert len(self._reservations) <= self._limit
        assert len(self._early) <= self._remembered_limit
        assert self.speeds.keys() == self._workers.keys()
        assert all(not self._early.get(attempt) for attempt in self._reservations), "an ended attempt is reserved"
        assert sum(len(attempts) for attempts in self._frontends.values()) == len(self._reservations)
        assert sum(len(place.attempts) for place in self._places.values()) == len(self._reservations)
        for candidate, place in self._places.items():
            here = [self._reservations[attempt] for attempt in place.attempts]
            assert all(reservation.candidate == candidate for reservation in here)
            new = [reservation for reservation in here if not reservation.known]
            assert place.new_blocks == sum(reservation.reserved.blocks for reservation in new)
            assert place.new_tokens == sum(reservation.queued_tokens for reservation in new)
            assert sum(place.queued.values()) == sum(reservation.queued_tokens for reservation in here)
            assert all(tokens > 0 for tokens in place.queued.values())
            assert min(place.reported_requests, place.reported_tokens, place.reported_blocks) >= 0


def _told(rate: float) -> float:
    """As reported, if it can be: what policies make of it must stay a number."""
    return rate if 1e-9 < rate < 1e12 else 0.0
