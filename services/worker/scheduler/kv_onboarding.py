"""Onboarding: which waiting sequences wait for blocks that the kvbm may have, and which device blocks are held for
them. Pure.

                 consider              new_fetches                end_fetch
    waiting ─────────────────▶ queued ─────────────▶ fetching ──────────────▶ waiting, admitted like any other
       ▲     worth a fetch        │                      │ waited enough, has all, ended, its room is needed, no kvbm:
       └──────────────────────────┤                      ▼ `abandoned_fetches` reports it; the sequence is free to go on
         nothing is missing, or as on the right      abandoned ──── end_fetch ──▶ forgotten

The scheduler passes over sequences that are `queued` or `fetching`, so that others can run. They wait no longer than
computing the missing blocks would take (or `wait_s`). A sequence that misses a block which another one is fetching
stays queued until that fetch has ended: a loaded block serves both.

A prefetch is a fetch for a sequence that has not come yet, since another worker is computing its prompt. It awaits the
blocks at the kvbm. When the sequence comes, it waits for its prefetch as for a fetch of its own, and no longer: then
both end. Until then nothing waits for a prefetch, and its room is taken back first. Few prefetches run at once. The
others are `queued`, and the one that is due first is next, since the worker that computes the prompts keeps that order.

A loaded block is simply in the prefix cache. From the first `begin_load` until its fetch ends or is abandoned, a
sequence holds the prefix that it builds on and all blocks that load after it, so that none of them is evicted. Copies
end in any order, but blocks enter the cache in the order of the chain: a block is never cached before its parent, and
no block after a bad copy is used.

A prefetch is advice: where it is lost, late or refused, the blocks are loaded after the first token. The prefill worker
does not push blocks, since it would have to know the other's room.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf
from typing import Literal

from services.worker.contracts.device_blocks import PREFETCHES, FetchRequest
from services.worker.scheduler.sequence import Sequence
from shared.blocks import BlockPool, ContentEvicted, ContentStored
from shared.hashing import ContentKey

_SLOWER = 1 / 4
"""Weight of a round trip that took longer than the estimate. A shorter one replaces the estimate at once."""
_FORGETS = 1 - 1 / 64
"""Factor on the estimate for each sequence that was not worth a fetch, so that the kvbm is tried again some time."""
PREFETCH_SHARE = 1 / 4
"""The share of the device's blocks that prefetches may hold."""
MOST_EXPECTED = 64
"""The most prefetches, those that are queued included. A request for more is ignored."""


@dataclass(slots=True, eq=False)
class SequenceFetch:
    """The blocks that one sequence waits for.

    blocks | cached when it was asked | slots given by begin_load           | not asked for yet, or there was no room
           0                        first        first + landed     first + len(slots)                    first + count
                                  in the prefix cache ─┘  loading, or `early` ─┘
    """

    sequence: Sequence
    began_s: float
    """When it was queued."""
    until_s: float
    """When the sequence gives up."""
    after: SequenceFetch | None = None
    """The running fetch that will also load one of this sequence's missing blocks, while it is queued."""
    state: Literal["queued", "fetching", "abandoned"] = "queued"
    first: int = 0
    count: int = 0
    slots: list[int] = field(default_factory=list)
    landed: int = 0
    """Copies that have ended, up to the first that has not."""
    early: dict[int, tuple[Seq[bool], bool]] = field(default_factory=dict)
    """Copies that ended together, before one in front of them: index of the first → (which are good, from disk)."""
    broken: bool = False
    """A copy was bad, or the chain in front was evicted: no block that follows is used."""
    held: list[int] = field(default_factory=list)
    """Slots that the sequence holds: those of blocks 0 … first + len(slots) - 1, or none."""
    prefetch: bool = False
    """No sequence waits for it yet."""
    sharer: str = ""
    """The worker that computes its blocks."""

    @property
    def keys(self) -> list[ContentKey]:
        """The blocks that the sequence can use. An expected one comes with a token more, so it can use all that are
        full."""
        return self.sequence.keys if self.prefetch else self.sequence.reusable_keys


class Onboarding:
    """Fetches of one engine's waiting sequences."""

    def __init__(self, pool: BlockPool, *, block_size: int, look_ahead: int, wait_s: float) -> None:
        """`look_ahead` bounds the fetches, `wait_s` how long each waits. 0 means as long as computing would take."""
        self._pool = pool
        self._block_size = block_size
        self._look_ahead = look_ahead
        self._wait_s = wait_s
        self.enabled = False
        """Whether there is a kvbm to ask."""
        self._fetches: dict[int, SequenceFetch] = {}
        """`Sequence.arrival` → fetch, in the order they were queued."""
        self._abandoned: set[int] = set()
        """Abandoned fetches that were not reported yet and have not ended."""
        self._cost_s = 0.0
        """Estimate of how long a fetch takes at least, from recent ones."""
        self.late = 0
        """Sequences that gave up, since the start."""
        self.prefetched = 0
        """Blocks that prefetches have brought, since the start."""

    # --- the queue

    def prefetch(self, sequence: Sequence, sharer: str, until_s: float, now_s: float) -> bool:
        """Fetch the blocks of a sequence that is expected, also those that are still to be computed, by the worker
        `sharer`, as soon as there is a place for a prefetch. Return False if there is no kvbm, nothing is missing, the
        prompt is too long for a prefetch, or too many are queued."""
        expected, keys = self._prefetches(), sequence.keys
        if not self.enabled or len(expected) >= MOST_EXPECTED:
            return False
        if any(one.sequence.name == sequence.name for one in expected) or not self._fits_share(sequence.blocks_needed):
            return False
        if self._is_cached(keys):
            return False
        self._fetches[sequence.arrival] = SequenceFetch(sequence, now_s, until_s, prefetch=True, sharer=sharer)
        return True

    def end_prefetch(self, request: str, attempt: int) -> None:
        """The sequence that a prefetch is for will not come. Without such a prefetch nothing happens."""
        for fetch in self._prefetches():
            if fetch.sequence.name == (request, attempt):
                self._abandon(fetch)

    def arrived(self, sequence: Sequence) -> None:
        """The sequence that a prefetch may be for has come, and was considered."""
        own = self._fetches.get(sequence.arrival)
        for fetch in self._prefetches():
            if fetch.sequence.name == sequence.name:
                if own is not None and fetch.state == "fetching":
                    own.after = fetch
                else:
                    self._abandon(fetch)

    def _fits_share(self, blocks: int) -> bool:
        return blocks <= PREFETCH_SHARE * self._pool.capacity

    def _running_prefetches(self) -> list[SequenceFetch]:
        return [fetch for fetch in self._prefetches() if fetch.state == "fetching"]

    def _has_place(self, sequence: Sequence) -> bool:
        """Return whether one more prefetch may run."""
        needed = [one.sequence.blocks_needed for one in self._running_prefetches()]
        return len(needed) < PREFETCHES and self._fits_share(sum(needed) + sequence.blocks_needed)

    def _prefetches(self) -> list[SequenceFetch]:
        return [fetch for fetch in self._fetches.values() if fetch.prefetch and fetch.state != "abandoned"]

    def set_enabled(self, enabled: bool) -> None:
        """A kvbm is there, or no longer. With a new one the estimate of what a fetch costs begins again; without one no
        sequence waits any longer."""
        self.enabled = enabled
        if enabled:
            self._cost_s = 0.0
        else:
            for fetch in list(self._fetches.values()):
                self._abandon(fetch)

    def consider(self, waiting: Seq[Sequence], tokens_per_s: float, now_s: float) -> None:
        """Queue the first of these sequences for which a fetch is worth its time. Each is considered once a wait."""
        for sequence in waiting[: self._look_ahead]:
            if not sequence.looked_up and sequence.arrival not in self._fetches:
                if sum([not fetch.prefetch for fetch in self._fetches.values()]) == self._look_ahead:
                    return
                sequence.looked_up = True
                self._enqueue(sequence, tokens_per_s, now_s)

    def blocks_reserved(self, sequence: Sequence) -> int:
        """Return 0 unless the sequence waits for the kvbm. Else return how many blocks it will need beyond those it
        holds, at least one: the scheduler passes over it and keeps that room."""
        fetch = self._fetches.get(sequence.arrival)
        if fetch is None or fetch.state == "abandoned":
            return 0
        prefetch = fetch.after if fetch.after is not None and fetch.after.prefetch else fetch
        return max(1, sequence.blocks_needed - len(prefetch.held))

    def give_up(self, now_s: float) -> None:
        """Abandon the fetches of sequences that have waited long enough, or have all blocks by now, which a step was
        computing when they came."""
        if not self._fetches:
            return
        for fetch in self._prefetches():
            if fetch.until_s <= now_s:
                self._abandon(fetch)
        for fetch in self._waiting():
            if fetch.until_s <= now_s:
                self.late += 1
                if fetch.after is None or not fetch.after.prefetch:
                    self._learn_cost(2 * (fetch.until_s - fetch.began_s))  # at least this; how much more is not known
                self._abandon(fetch)
            elif not fetch.held and fetch.keys[-1] in self._pool and self._is_cached(fetch.keys):
                self._abandon(fetch)  # nothing of it has come: what it holds is taken up as it comes

    def abandon(self, sequence: Sequence) -> None:
        """The sequence has ended, so its fetch, if it has one, is of no use."""
        fetch = self._fetches.get(sequence.arrival)
        if fetch is not None:
            self._abandon(fetch)

    def clear(self) -> None:
        """The cache was cleared: abandon all fetches, and let none of their blocks into the cache."""
        for fetch in list(self._fetches.values()):
            fetch.broken = True
            self._abandon(fetch)

    def reclaim(self, *, prefetches_only: bool = False) -> bool:
        """Abandon the last fetch that holds blocks, prefetches first, since a running sequence needs them. Return False
        if no fetch holds any."""
        for fetch in (*reversed(self._prefetches()), *([] if prefetches_only else reversed(self._waiting()))):
            if fetch.held:
                self._abandon(fetch)
                return True
        return False

    @property
    def until_s(self) -> float:
        """When the next sequence gives up, or a prefetch ends; infinite if there is none."""
        return min((fetch.until_s for fetch in self._fetches.values() if fetch.state != "abandoned"), default=inf)

    @property
    def waiting(self) -> int:
        """How many sequences wait for blocks."""
        return len(self._waiting())

    # --- the fetches

    def new_fetches(self) -> list[FetchRequest]:
        """Return what to fetch for queued sequences, unless a fetch under way brings the block that they miss. Queued
        prefetches begin in the order in which they are due, as far as there are places."""
        requests: list[FetchRequest] = []
        queued = [fetch for fetch in self._fetches.values() if fetch.state == "queued"]
        for fetch in sorted(queued, key=_order):
            if fetch.after is not None and fetch.after.state == "fetching":
                continue  # without this, seven long prompts, looked up in each step, cost the step 2 ms
            if fetch.prefetch and not self._has_place(fetch.sequence):
                break  # all that follow are prefetches
            keys = fetch.keys
            first = self._pool.longest_prefix(keys)
            if first == len(keys):
                self._abandon(fetch)
                continue
            if fetch.prefetch:
                fetch.state, fetch.first, fetch.count = "fetching", first, len(keys) - first
                arrival = fetch.sequence.arrival
                requests.append(FetchRequest(arrival, keys[first:], awaits=True, sharer=fetch.sharer))
                continue
            fetch.after = self._fetching(first, keys[first])
            if fetch.after is None:
                fetch.state, fetch.first, fetch.count = "fetching", first, len(keys) - first
                if fetch.sequence.onboarding_s is None:
                    fetch.sequence.onboarding_s = fetch.began_s
                requests.append(FetchRequest(fetch.sequence.arrival, keys[first:], fetch.sequence.submit.trace))
        return requests

    def abandoned_fetches(self) -> list[int]:
        """Return the numbers of fetches that were abandoned since the last call and have not ended."""
        abandoned = sorted(self._abandoned)
        self._abandoned.clear()
        return abandoned

    def begin_load(self, number: int, first: int, count: int, reserve: int) -> tuple[list[int], list[ContentEvicted]]:
        """Return at most `count` loading slots for blocks first … of the request, and the blocks that were evicted for
        them. `reserve` blocks stay available."""
        fetch = self._fetches[number]
        if fetch.state == "abandoned" or first != len(fetch.slots):
            return [], []
        if not fetch.held and not self._hold_prefix(fetch, reserve):
            self._abandon(fetch)
            return [], []
        count = min(count, fetch.count - first, self._pool.available - reserve)
        slots, evicted = self._pool.begin_load(max(count, 0))
        fetch.slots += slots
        fetch.held += slots
        return slots, evicted

    def end_loads(self, number: int, first: int, good: Seq[bool], disk: bool) -> list[ContentStored]:
        """The copies of blocks first … first + len(good) - 1 have ended. Return the blocks that entered the cache."""
        fetch = self._fetches[number]
        assert fetch.landed <= first <= len(fetch.slots) - len(good), f"block {first} of {number} is not loading"
        assert first not in fetch.early, f"block {first} of {number} was loaded before"
        fetch.early[first] = good, disk
        stored: list[ContentStored] = []
        while (ended := fetch.early.pop(fetch.landed, None)) is not None:
            stored += self._land(fetch, *ended)
        self.prefetched += len(stored) if fetch.prefetch else 0
        return stored

    def end_fetch(self, number: int, round_trip_s: float) -> None:
        """Nothing more comes; `round_trip_s` is 0 if it is not known."""
        fetch = self._fetches.pop(number)
        self._abandoned.discard(number)
        assert fetch.state != "queued", f"fetch {number} ends before it began"
        assert fetch.landed == len(fetch.slots), f"fetch {number} ends with {len(fetch.early)} blocks loading"
        if fetch.state == "fetching" and round_trip_s > 0 and not fetch.prefetch:  # a prefetch waits for computing
            self._learn_cost(round_trip_s)
        fetch.state = "abandoned"
        self._release(fetch)
        for waiting in [one for one in self._fetches.values() if one.after is fetch and one.state == "queued"]:
            if self._is_cached(waiting.keys):
                self._abandon(waiting)  # it goes on in the next step

    # --- inside

    def _is_cached(self, keys: Seq[ContentKey]) -> bool:
        return self._pool.longest_prefix(keys) == len(keys)

    def _waiting(self) -> list[SequenceFetch]:
        return [fetch for fetch in self._fetches.values() if not fetch.prefetch and fetch.state != "abandoned"]

    def _enqueue(self, sequence: Sequence, tokens_per_s: float, now_s: float) -> None:
        keys = sequence.reusable_keys
        missing_s = (len(keys) - self._pool.longest_prefix(keys)) * self._block_size / tokens_per_s
        if missing_s > (0.0 if self._wait_s else self._cost_s):
            self._fetches[sequence.arrival] = SequenceFetch(sequence, now_s, now_s + (self._wait_s or missing_s))
        elif missing_s:
            self._cost_s *= _FORGETS

    def _fetching(self, index: int, key: ContentKey) -> SequenceFetch | None:
        """Return the fetch under way that brings this block. A key names its whole chain, so it has the same index in
        each sequence."""
        for fetch in self._fetches.values():
            if (
                fetch.state == "fetching"
                and not fetch.prefetch
                and fetch.first <= index < fetch.first + fetch.count
                and fetch.sequence.keys[index] == key
            ):
                return fetch
        return None

    def _learn_cost(self, took_s: float) -> None:
        weight = 1.0 if took_s < self._cost_s else _SLOWER
        self._cost_s += weight * (took_s - self._cost_s)

    def _hold_prefix(self, fetch: SequenceFetch, reserve: int) -> bool:
        keys = fetch.sequence.keys[: fetch.first]
        if self._pool.longest_prefix(keys) < fetch.first:
            return False
        fetch.held = self._pool.acquire_prefix(keys)
        return self._pool.available > reserve

    def _land(self, fetch: SequenceFetch, good: Seq[bool], disk: bool) -> list[ContentStored]:
        """Take up the next blocks of the chain."""
        first, last = fetch.landed, fetch.landed + len(good)
        index = fetch.first + first
        fetch.broken |= index > 0 and fetch.sequence.keys[index - 1] not in self._pool
        usable = 0 if fetch.broken else len(list(takewhile(bool, good)))
        fetch.broken |= usable < len(good)
        slots, stored = self._pool.end_loads(fetch.slots[first:last], fetch.sequence.contents(index, usable))
        if fetch.held:
            fetch.held[index : index + len(good)] = slots
        fetch.sequence.loaded.update(dict.fromkeys(range(index, index + usable), disk))
        fetch.landed = last
        return stored

    def _abandon(self, fetch: SequenceFetch) -> None:
        """End the sequence's wait and release what it holds. Copies that load for it go on."""
        if fetch.state == "queued":
            del self._fetches[fetch.sequence.arrival]
            if fetch.after is not None and fetch.after.prefetch:
                self._abandon(fetch.after)
        elif fetch.state == "fetching":
            fetch.state = "abandoned"
            self._abandoned.add(fetch.sequence.arrival)
            self._release(fetch)

    def _release(self, fetch: SequenceFetch) -> None:
        self._pool.release_prefix(fetch.held)
        fetch.held.clear()

    def held(self) -> list[list[int]]:
        """Return the slots that each sequence holds here, and those that still load for abandoned fetches."""
        return [fetch.held or fetch.slots[fetch.landed :] for fetch in self._fetches.values()]

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself. O(everything)."""
        assert self.enabled or not (self._waiting() or self._prefetches()), "a fetch waits though there is no kvbm"
        assert len(self._prefetches()) <= MOST_EXPECTED
        assert len(self._running_prefetches()) <= PREFETCHES
        assert all(self.blocks_reserved(fetch.sequence) > 0 for fetch in self._waiting())
        assert sum(not fetch.prefetch for fetch in self._fetches.values()) <= self._look_ahead
        assert all(self._fetches[number].state == "abandoned" for number in self._abandoned)
        for number, fetch in self._fetches.items():
            assert number == fetch.sequence.arrival
            assert 0 <= fetch.landed <= len(fetch.slots) <= fetch.count
            for index, (good, _) in fetch.early.items():
                assert fetch.landed < index <= len(fetch.slots) - len(good)
            assert not fetch.held or len(fetch.held) == fetch.first + len(fetch.slots)
            assert not fetch.held or fetch.state == "fetching"
            assert fetch.state == "fetching" or fetch.state == "abandoned" or not fetch.slots
            for slot in fetch.slots[fetch.landed :]:
                assert self._pool.state(slot) == "loading"


def _order(fetch: SequenceFetch) -> tuple[bool, float]:
    """Sort key: what sequences wait for comes first, then prefetches by when they are due."""
    return fetch.prefetch, fetch.sequence.due_s if fetch.prefetch else 0.0
