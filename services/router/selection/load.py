"""The load of each candidate: reservations, corrected by the workers' own reports. Pure.

    reserved ──▶ prefill ──▶ decode ──▶ released
                        Prefilled   Finished, a lease that ended, or a worker that does not know the attempt
                                    and whose reports would have it

A candidate's load is its last report, updated by the events since:

    queued tokens = reported waiting tokens - those of known attempts that were prefilled since
                    + uncached tokens of reservations that the report does not know yet and that are not prefilled
    active blocks = reported held blocks - those of known attempts that ended since
                    + blocks of reservations that the report does not know yet

Reports never have an *unreported* attempt, which a gateway sends to the server that the worker is attached to. The
server's own counts have its blocks, but not its tokens, once the worker has looked again.

For a request with a priority, prompt tokens reserved at a lower priority are not ahead of it: workers compute the
higher priority first.

Events come in any order and may come more than once. The end or first token of an attempt that comes before its
reservation is remembered, up to a limit. No reservation is released by a timer alone: an attempt is given up only when
reports keep coming without it.

A worker is *frozen* when its reports show work but no engine step for `frozen_s`, or when no report has come for that
long. Only a router that receives reports without interruption can tell. A router that was cut off, or was frozen
itself, therefore starts again from the time of its recovery.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from itertools import accumulate

from msgspec import Struct

from services.router.config import LoadConfig
from services.router.index.index import CandidateId
from shared.messages.load import LoadReport, RankLoad
from shared.messages.select import Reserved

AttemptId = tuple[str, int]
"""A request id with the number of its attempt."""


class CandidateLoad(Struct, frozen=True, gc=False):
    """The load of one candidate, as of now."""

    requests: int = 0
    """Number of attempts reserved, prefilling or decoding."""
    queued_tokens: int = 0
    """Number of prompt tokens still to be computed."""
    active_blocks: int = 0
    """Number of blocks that running attempts use, or will use."""


IDLE = CandidateLoad()
REMEMBERED_LIMIT = 16_384
"""Attempts without a reservation that are remembered: 4 MB. The events of an attempt overtake one another by less than
a second, so that it is enough for as many requests in a second."""
SPEED_S = 60.0
"""For how long a worker's low prefill speed is believed after it was last seen to be as low."""
_PRIORITIES_LIMIT = 16
"""Most priorities for which one candidate's load is remembered."""


class WorkerSpeed(Struct, frozen=True, gc=False):
    """The speed that one worker reports; 0 if unknown."""

    prefill_tokens_per_s: float = 0.0
    step_s: float = 0.0
    """Seconds of a step that only decodes, with the attempts that run there now."""
    old: bool = False
    """Whether no prompt has shown for `SPEED_S` that the worker is as slow as this."""


UNKNOWN_SPEED = WorkerSpeed()


class LoadStatistics(Struct, frozen=True):
    """Counts over all candidates."""

    reservations: int
    remembered: int
    """Number of attempts whose end or first token came before their reservation, or that ended lately."""
    forgotten: int
    """Number of reservations released, since the start, because the worker's reports did not have them, or at the
    limit."""


class PromptReservation(Struct):
    """The load of one attempt; only LoadTracker changes it."""

    reserved: Reserved
    since_s: float
    prefilled: bool = False
    known: bool = False
    """Whether the candidate's last report has the attempt."""
    known_s: float = 0.0
    """When a report last had the attempt."""
    held: bool = False
    """Whether the candidate's last report counts its blocks."""

    @property
    def candidate(self) -> CandidateId:
        return self.reserved.instance, self.reserved.rank

    @property
    def due_s(self) -> float:
        """When the worker has heard of the attempt at the latest."""
        return self.since_s + self.reserved.delay_s

    @property
    def lasts_until_s(self) -> float:
        """When the frontend has said that an unreported attempt has ended, at the latest."""
        return self.due_s + self.reserved.lasts_s

    @property
    def queued_tokens(self) -> int:
        return 0 if self.prefilled else self.reserved.uncached_tokens


class _QueuedTokens:
    """Numbers of tokens by priority. Their sum below a priority takes a search; once after a change, one over all."""

    __slots__ = ("_below", "_levels", "_tokens")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._levels: list[int] = []
        """The priorities that have tokens, lowest first."""
        self._tokens: list[int] = []
        """The number of tokens of each of them."""
        self._below: list[int] = []
        """The number of tokens below each of them, and at last of all; empty after a change."""

    def add(self, priority: int, tokens: int) -> None:
        """Change the number of tokens at `priority` by `tokens`, which may be negative."""
        levels, counts = self._levels, self._tokens
        at = bisect_left(levels, priority)
        if at == len(levels) or levels[at] != priority:
            if tokens:
                levels.insert(at, priority)
                counts.insert(at, tokens)
        elif counts[at] + tokens:
            counts[at] += tokens
        else:
            del levels[at], counts[at]
        self._below = []

    def below(self, priority: int) -> int:
        """Return the number of tokens at lower priorities."""
        at = bisect_left(self._levels, priority)
        if not at:
            return 0
        if not self._below:
            self._below = list(accumulate(self._tokens, initial=0))
        return self._below[at]

    def by_priority(self) -> dict[int, int]:
        """Return the number of tokens at each priority that has some."""
        return dict(zip(self._levels, self._tokens, strict=True))


@dataclass(slots=True)
class _CandidateSums:
    """The sums over one candidate's reservations and its last report."""

    attempts: set[AttemptId] = field(default_factory=set)
    reported_requests: int = 0
    """Number of attempts in the last report that have no reservation here."""
    reported_tokens: int = 0
    waiting: int = 0
    """Number of reservations that are not prefilled and in the last report, if no other attempt waits there: once their
    first tokens have come, the reported tokens are computed, however many they were. Else 0."""
    reported_blocks: int = 0
    new_tokens: int = 0
    """Uncached tokens of reservations that the report does not have and that are not prefilled."""
    new_blocks: int = 0
    """Blocks of reservations that the report does not count."""
    queued: _QueuedTokens = field(default_factory=_QueuedTokens)
    """The tokens of all reservations that are not prefilled."""
    loads: dict[int, CandidateLoad] = field(default_factory=dict)
    """Priority → load as a request of that priority meets it; a memo, emptied when a sum changes."""

    def load(self, priority: int) -> CandidateLoad:
        if len(self.loads) >= _PRIORITIES_LIMIT:
            self.loads.clear()
        load = self.loads[priority] = CandidateLoad(
            requests=len(self.attempts) + self.reported_requests,
            queued_tokens=max(self.reported_tokens + self.new_tokens - self.queued.below(priority), 0),
            active_blocks=self.reported_blocks + self.new_blocks,
        )
        return load


@dataclass(slots=True)
class _WorkerReport:
    """The progress in one instance's last report."""

    progress: int
    busy: bool
    reported_s: float
    progress_s: float
    """When it last made a step or had no work."""
    speed_s: float
    """When its prefill speed was first known, or last fell. Steps with few tokens of prompts can only raise it, each a
    little, so a rise shows no slow worker."""


class LoadTracker:
    """All reservations of one model. Times are seconds on any monotonic clock."""

    def __init__(self, config: LoadConfig, *, remembered_limit: int = REMEMBERED_LIMIT) -> None:
        self._config = config
        self._remembered_limit = remembered_limit
        self._reservations: dict[AttemptId, PromptReservation] = {}
        self._sums: dict[CandidateId, _CandidateSums] = {}
        self._frontends: dict[str, set[AttemptId]] = {}
        self.speeds: dict[str, WorkerSpeed] = {}
        """Speed by instance, as last reported; instances that have not reported have no entry."""
        self._workers: dict[str, _WorkerReport] = {}
        """Progress by instance, with the same keys as `speeds`."""
        self._checked_s: float | None = None
        self._without_reservation: OrderedDict[AttemptId, bool] = OrderedDict()
        """Attempts without a reservation, oldest first → whether the attempt ended; else it was prefilled."""
        self._forgotten = 0

    # --- events

    def add_reservation(self, event: Reserved, now_s: float) -> bool:
        """Add an attempt's load; return False for an attempt that is reserved already or has ended. At the limit the
        oldest reservation is released."""
        attempt = event.request, event.attempt
        early = self._without_reservation.get(attempt)
        if attempt in self._reservations or early:
            return False
        if len(self._reservations) >= self._config.limit:
            self._forgotten += 1
            self._release(next(iter(self._reservations)))
        self._without_reservation.pop(attempt, None)
        reservation = PromptReservation(event, since_s=now_s, prefilled=early is not None)
        self._reservations[attempt] = reservation
        self._frontends.setdefault(event.frontend, set()).add(attempt)
        sums = self._sums.setdefault(reservation.candidate, _CandidateSums())
        sums.attempts.add(attempt)
        sums.new_blocks += event.blocks
        sums.new_tokens += reservation.queued_tokens
        sums.queued.add(event.priority, reservation.queued_tokens)
        sums.loads.clear()
        return True

    def mark_prefilled(self, attempt: AttemptId) -> PromptReservation | None:
        """Record the first token of an attempt. Return its reservation the first time, else None."""
        reservation = self._reservations.get(attempt)
        if reservation is None:
            self._remember(attempt, ended=False)
            return None
        if reservation.prefilled:
            return None
        self._unqueue(reservation)
        reservation.prefilled = True
        return reservation

    def mark_finished(self, attempt: AttemptId) -> None:
        """Release an attempt that has ended; later events about it are ignored."""
        if attempt in self._reservations:
            self._release(attempt)
        self._remember(attempt, ended=True)

    def apply_report(self, report: LoadReport, now_s: float, *, ranks: int = 1) -> None:
        """Apply a worker's own report. If an instance with several ranks does not report the load of each, only the
        attempts are used: the other figures are sums over the ranks."""
        self._update_worker(report, now_s)
        reported = {each.rank: each for each in report.ranks if 0 <= each.rank < ranks}
        if ranks == 1:
            reported = {0: RankLoad(0, report.waiting, report.running, report.waiting_tokens, report.held_blocks)}
        for rank in reported:
            self._sums.setdefault((report.instance, rank), _CandidateSums())
        candidates = [(report.instance, rank) for rank in range(ranks) if (report.instance, rank) in self._sums]
        running = set(report.attempts)
        grace_s, unknown_s = self._config.grace_s, self._config.unknown_s
        for candidate in candidates:
            sums = self._sums[candidate]
            figures = reported.get(candidate[1])
            sums.new_tokens = sums.new_blocks = 0
            sums.queued.clear()
            sums.loads.clear()
            ours = sums.waiting = 0
            for attempt in list(sums.attempts):
                reservation = self._reservations[attempt]
                if attempt in running:
                    reservation.known = reservation.held = figures is not None
                    reservation.known_s = now_s
                elif reservation.reserved.unreported and now_s < reservation.lasts_until_s + grace_s:
                    # A server that takes text alone reports no work, and so counts no blocks.
                    works = figures is not None and figures.waiting + figures.running > 0
                    reservation.held = works and now_s >= reservation.due_s + grace_s
                elif now_s - max(reservation.due_s + grace_s, reservation.known_s) >= unknown_s:
                    self._forgotten += 1
                    self._drop(attempt)
                    continue
                else:
                    reservation.known = reservation.held = False
                ours += reservation.held
                sums.waiting += reservation.known and not reservation.prefilled
                if not reservation.held:
                    sums.new_blocks += reservation.reserved.blocks
                if not reservation.known:
                    sums.new_tokens += reservation.queued_tokens
                if not reservation.prefilled:
                    sums.queued.add(reservation.reserved.priority, reservation.queued_tokens)
            if figures is not None:
                sums.reported_tokens = max(figures.waiting_tokens, 0)
                sums.reported_blocks = max(figures.held_blocks, 0)
                sums.reported_requests = max(figures.waiting + figures.running - ours, 0)
            if figures is None or sums.reported_requests or figures.waiting > sums.waiting:
                sums.waiting = 0

    def _update_worker(self, report: LoadReport, now_s: float) -> None:
        # The engine's own counts are those of its last step: one that stopped while idle knows of no attempt.
        busy = bool(report.waiting + report.running > 0 or report.attempts)
        tokens_per_s, step_s = _plausible(report.prefill_tokens_per_s), _plausible(report.step_s)
        worker = self._workers.get(report.instance)
        if worker is None:
            worker = self._workers[report.instance] = _WorkerReport(report.progress, busy, now_s, now_s, now_s)
        elif tokens_per_s < (former := self.speeds[report.instance].prefill_tokens_per_s) or not former:
            worker.speed_s = now_s
        self.speeds[report.instance] = WorkerSpeed(tokens_per_s, step_s, now_s - worker.speed_s >= SPEED_S)
        if report.progress != worker.progress or not (busy and worker.busy):
            worker.progress_s = now_s
        worker.progress, worker.busy, worker.reported_s = report.progress, busy, now_s

    def frozen_instances(self, now_s: float, *, listening: bool = True) -> frozenset[str]:
        """Return the instances that are frozen now; to be called a few times a second. `listening` is False if reports
        may have been missed since the last call."""
        asleep = self._checked_s is None or now_s - self._checked_s > self._config.frozen_s / 2
        self._checked_s = now_s
        if asleep or not listening:
            for worker in self._workers.values():
                worker.reported_s = worker.progress_s = now_s
        since_s = now_s - self._config.frozen_s
        return frozenset(
            instance
            for instance, worker in self._workers.items()
            if worker.reported_s <= since_s or (worker.busy and worker.progress_s <= since_s)
        )

    def remove_frontend(self, frontend: str) -> list[AttemptId]:
        """Release the reservations of a frontend whose lease ended."""
        attempts = sorted(self._frontends.get(frontend, ()))
        for attempt in attempts:
            self._release(attempt)
        return attempts

    def withdraw(self, attempt: AttemptId) -> None:
        """Release a reservation that must not count; the attempt may be reserved again."""
        if attempt in self._reservations:
            self._release(attempt)

    def remove_instance(self, instance: str) -> list[AttemptId]:
        """Release the reservations at an instance whose lease ended, and forget its reports."""
        released: list[AttemptId] = []
        self._workers.pop(instance, None)
        self.speeds.pop(instance, None)
        for candidate in [each for each in self._sums if each[0] == instance]:
            for attempt in sorted(self._sums[candidate].attempts):
                self._release(attempt)
                released.append(attempt)
            self._sums.pop(candidate, None)
        return released

    # --- lookups

    def load_of(self, candidate: CandidateId, priority: int = 0) -> CandidateLoad:
        """Return the candidate's load, as of now, as a request of that priority meets it."""
        sums = self._sums.get(candidate)
        if sums is None:
            return IDLE
        return sums.loads.get(priority) or sums.load(priority)

    def candidate_of(self, attempt: AttemptId) -> CandidateId | None:
        """Return the candidate where an attempt that has not ended is reserved."""
        reservation = self._reservations.get(attempt)
        return None if reservation is None else reservation.candidate

    def waits(self, attempt: AttemptId) -> bool:
        """Return whether the attempt is reserved and has no token yet."""
        reservation = self._reservations.get(attempt)
        return reservation is not None and not reservation.prefilled

    def statistics(self) -> LoadStatistics:
        """Return counts, in constant time."""
        return LoadStatistics(len(self._reservations), len(self._without_reservation), self._forgotten)

    def reservations(self) -> list[PromptReservation]:
        """Return all reservations, oldest first, for a router that starts. Linear."""
        return list(self._reservations.values())

    # --- changes

    def _remember(self, attempt: AttemptId, *, ended: bool) -> None:
        ended = self._without_reservation.pop(attempt, False) or ended
        self._without_reservation[attempt] = ended
        if len(self._without_reservation) > self._remembered_limit:
            self._without_reservation.popitem(last=False)

    def _unqueue(self, reservation: PromptReservation) -> None:
        """Take the prompt of the reservation out of the queued tokens."""
        sums = self._sums[reservation.candidate]
        tokens = reservation.queued_tokens
        sums.queued.add(reservation.reserved.priority, -tokens)
        sums.loads.clear()
        if not reservation.known:
            sums.new_tokens -= tokens
            return
        last = sums.waiting == 1 and not reservation.prefilled
        sums.waiting -= bool(sums.waiting and not reservation.prefilled)
        sums.reported_tokens = 0 if last else max(sums.reported_tokens - tokens, 0)

    def _release(self, attempt: AttemptId) -> None:
        reservation = self._reservations[attempt]
        self._unqueue(reservation)
        sums = self._sums[reservation.candidate]
        blocks = reservation.reserved.blocks
        if reservation.held:
            sums.reported_blocks = max(sums.reported_blocks - blocks, 0)
        else:
            sums.new_blocks -= blocks
        self._drop(attempt)
        if not sums.attempts and not (sums.reported_requests or sums.reported_tokens or sums.reported_blocks):
            del self._sums[reservation.candidate]

    def _drop(self, attempt: AttemptId) -> None:
        """Remove the attempt from every table; the caller updates the sums."""
        reservation = self._reservations.pop(attempt)
        self._sums[reservation.candidate].attempts.discard(attempt)
        frontend = self._frontends[reservation.reserved.frontend]
        frontend.discard(attempt)
        if not frontend:
            del self._frontends[reservation.reserved.frontend]

    def validate(self) -> None:
        """Assert every invariant. Linear in the reservations."""
        assert len(self._reservations) <= self._config.limit
        assert len(self._without_reservation) <= self._remembered_limit
        assert self.speeds.keys() == self._workers.keys()
        assert all(not self._without_reservation.get(attempt) for attempt in self._reservations), (
            "an ended attempt is reserved"
        )
        assert sum(len(attempts) for attempts in self._frontends.values()) == len(self._reservations)
        assert sum(len(sums.attempts) for sums in self._sums.values()) == len(self._reservations)
        for candidate, sums in self._sums.items():
            here = [self._reservations[attempt] for attempt in sums.attempts]
            assert all(reservation.candidate == candidate for reservation in here)
            assert sums.new_blocks == sum(reservation.reserved.blocks for reservation in here if not reservation.held)
            assert sums.waiting in (0, sum(each.known and not each.prefilled for each in here))
            assert sums.new_tokens == sum(reservation.queued_tokens for reservation in here if not reservation.known)
            queued: Counter[int] = Counter()
            for reservation in here:
                queued[reservation.reserved.priority] += reservation.queued_tokens
            assert sums.queued.by_priority() == +queued
            for priority in queued:
                assert sums.queued.below(priority) == sum(queued[level] for level in queued if level < priority)
            assert min(sums.reported_requests, sums.reported_tokens, sums.reported_blocks) >= 0


def _plausible(rate: float) -> float:
    """Return the reported rate, or 0 if it is not plausible: policies compute with it and must get a finite number."""
    return rate if 1e-9 < rate < 1e12 else 0.0
