"""Onboarding: which waiting sequences wait for blocks that the kvbm may hold, and what they hold for it. Pure.

                   look                 wanted                  settled
    waiting ──────────────────▶ noted ─────────▶ asked ───────────────────────▶ waiting, admitted like any other
       ▲      worth asking        │                │ waited long enough, ended, its room is needed, kvbm is gone:
       └──────────────────────────┤                ▼ told by `unwanted`; the sequence is not held back any more
         nothing is missing, or as below          left ───── settled ─────────▶ forgotten

Who is noted or asked is passed over at admission, so that others compute meanwhile, and waits no longer than computing
what is missing would take (or `wait_s`). A sequence that misses the same block as one that has asked stays
noted until that one is settled: what is loaded for one is there for both.

A loaded block is simply in the prefix cache. From the first `make_room` until it is settled, or leaves, a sequence
holds the prefix it builds on and all that loads behind it, so that nothing is evicted under it. Copies end in any
order, but blocks enter the cache in the order of the chain: a block is never there without its parent, and behind a bad
copy nothing is used.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Literal

from msgspec import Struct

from services.worker.scheduler.sequence import Sequence
from shared.blocks import BlockPool, Evicted, Stored
from shared.hashing import ContentKey

_SLOWER = 1 / 4
"""How far a worse measurement moves the belief of what asking costs; a better one is believed at once."""
_FORGETS = 1 - 1 / 64
"""What is left of that belief with each sequence that was not worth asking for, so that it is tried again."""


class Wanted(Struct, frozen=True):
    """These blocks are missing on the device; whoever asked waits for them."""

    number: int
    """Names what follows: make_room, loaded, settled. Always ends with one `settled`."""
    keys: list[ContentKey]
    """In order, behind the blocks that are there."""


@dataclass(slots=True, eq=False)
class Fetch:
    """One sequence's blocks.

    blocks | there when asked | slots given by make_room             | not yet asked room for, or none was there
           0                first          first + landed      first + len(slots)         first + count
                                  in the pool ─┘  loading, or `early` ─┘
    """

    sequence: Sequence
    noted_s: float
    until_s: float
    """Waits no longer."""
    behind: Fetch | None = None
    """While it is noted: the one that has asked for a block that it misses, too."""
    state: Literal["noted", "asked", "left"] = "noted"
    first: int = 0
    count: int = 0
    slots: list[int] = field(default_factory=list)
    landed: int = 0
    early: dict[int, tuple[bool, bool]] = field(default_factory=dict)
    """Copies that ended before one in front of them: index → good, from disk."""
    broken: bool = False
    """A copy was bad, or the chain in front has gone: what follows is not used."""
    held: list[int] = field(default_factory=list)
    """What the sequence holds: blocks 0 … first + len(slots) - 1, or nothing."""


class Onboarding:
    """See the module. `reserve`: blocks that are left to the running sequences."""

    def __init__(self, pool: BlockPool, *, block_size: int, look_ahead: int, wait_s: float) -> None:
        self._pool = pool
        self._block_size = block_size
        self._look_ahead = look_ahead
        self._wait_s = wait_s
        self.on = False
        """Whether there is a kvbm to ask."""
        self._fetches: dict[int, Fetch] = {}
        """By `Sequence.arrival`, in the order they were noted."""
        self._unwanted: set[int] = set()
        """Those that have left, and are neither told of nor settled."""
        self._cost_s = 0.0
        """What asking costs, at least, as it was lately."""
        self.late = 0
        """Sequences that waited in vain, or not long enough."""

    # --- the queue

    def turn(self, on: bool) -> None:
        """Off: nobody waits any more. On: it answers in time now, whatever asking cost before."""
        self.on = on
        if on:
            self._cost_s = 0.0
        else:
            for fetch in list(self._fetches.values()):
                self._leave(fetch)

    def look(self, waiting: Seq[Sequence], tokens_per_s: float, now_s: float) -> None:
        """Note the first of these that may find more with the kvbm; each is looked at once a wait."""
        for sequence in waiting[: self._look_ahead]:
            if len(self._fetches) == self._look_ahead:
                return
            if not sequence.looked_up and sequence.arrival not in self._fetches:
                sequence.looked_up = True
                self._note(sequence, tokens_per_s, now_s)

    def room_for(self, sequence: Sequence) -> int:
        """If it is to be passed over: the blocks that it will need beyond those it holds, at least one; else 0."""
        fetch = self._fetches.get(sequence.arrival)
        return 0 if fetch is None or fetch.state == "left" else sequence.blocks_needed - len(fetch.held)

    def give_up(self, now_s: float) -> None:
        """Those that have waited long enough leave."""
        for fetch in self._waiting():
            if fetch.until_s <= now_s:
                self.late += 1
                self._cost(2 * (fetch.until_s - fetch.noted_s))  # at least this; how much more is not known
                self._leave(fetch)

    def leave(self, sequence: Sequence) -> None:
        """It has ended."""
        fetch = self._fetches.get(sequence.arrival)
        if fetch is not None:
            self._leave(fetch)

    def give_back(self) -> bool:
        """The last of those that hold blocks leaves, since a running sequence needs them; False: there is none."""
        for fetch in reversed(self._fetches.values()):
            if fetch.held:
                self._leave(fetch)
                return True
        return False

    @property
    def until_s(self) -> float:
        """When the next one gives up."""
        return min((fetch.until_s for fetch in self._waiting()), default=float("inf"))

    @property
    def waiting(self) -> int:
        """Sequences that wait for blocks."""
        return len(self._waiting())

    # --- the fetches

    def wanted(self) -> list[Wanted]:
        """Those noted whose missing blocks nobody has asked for yet."""
        wanted: list[Wanted] = []
        for fetch in [fetch for fetch in self._fetches.values() if fetch.state == "noted"]:
            if fetch.behind is not None and fetch.behind.state == "asked":
                continue  # seven long prompts that were looked up in each step cost it 2 ms
            keys = fetch.sequence.reusable_keys
            first = self._pool.longest_prefix(keys)
            if first == len(keys):
                self._leave(fetch)
                continue
            fetch.behind = self._asked(first, keys[first])
            if fetch.behind is None:
                fetch.state, fetch.first, fetch.count = "asked", first, len(keys) - first
                wanted.append(Wanted(fetch.sequence.arrival, keys[first:]))
        return wanted

    def unwanted(self) -> list[int]:
        """Those asked that left since the last call and are not settled."""
        unwanted = sorted(self._unwanted)
        self._unwanted.clear()
        return unwanted

    def make_room(self, number: int, first: int, count: int, reserve: int) -> tuple[list[int], list[Evicted]]:
        """Loading slots for blocks first … of those wanted, at most `count`."""
        fetch = self._fetches[number]
        if fetch.state == "left" or first != len(fetch.slots):
            return [], []
        if not fetch.held and not self._hold_prefix(fetch, reserve):
            self._leave(fetch)
            return [], []
        count = min(count, fetch.count - first, self._pool.available - reserve)
        slots, evicted = self._pool.begin_load(max(count, 0))
        fetch.slots += slots
        fetch.held += slots
        return slots, evicted

    def loaded(self, number: int, index: int, slot: int, good: bool, disk: bool) -> list[Stored]:
        """The copy into this slot has ended."""
        fetch = self._fetches[number]
        assert fetch.slots[index] == slot, f"block {index} of {number} loads into slot {fetch.slots[index]}, not {slot}"
        assert fetch.landed <= index, f"block {index} of {number} was loaded before"
        assert index not in fetch.early, f"block {index} of {number} was loaded before"
        fetch.early[index] = good, disk
        stored: list[Stored] = []
        while (ended := fetch.early.pop(fetch.landed, None)) is not None:
            stored += self._land(fetch, *ended)
        return stored

    def settled(self, number: int, took_s: float) -> None:
        """Nothing more comes; `took_s`: a round trip, or 0."""
        fetch = self._fetches.pop(number)
        self._unwanted.discard(number)
        assert fetch.state != "noted", f"{number} is settled before it was wanted"
        assert fetch.landed == len(fetch.slots), f"{number} is settled with {len(fetch.early)} blocks loading"
        if fetch.state == "asked" and took_s > 0:
            self._cost(took_s)
        fetch.state = "left"
        self._release(fetch)

    # --- inside

    def _waiting(self) -> list[Fetch]:
        return [fetch for fetch in self._fetches.values() if fetch.state != "left"]

    def _note(self, sequence: Sequence, tokens_per_s: float, now_s: float) -> None:
        keys = sequence.reusable_keys
        missing_s = (len(keys) - self._pool.longest_prefix(keys)) * self._block_size / tokens_per_s
        if missing_s > self._cost_s:
            self._fetches[sequence.arrival] = Fetch(sequence, now_s, now_s + (self._wait_s or missing_s))
        elif missing_s:
            self._cost_s *= _FORGETS

    def _asked(self, index: int, key: ContentKey) -> Fetch | None:
        """Whose block this is that is on its way. A key names its whole chain, so it has the same index in each."""
        for fetch in self._fetches.values():
            if (
                fetch.state == "asked"
                and fetch.first <= index < fetch.first + fetch.count
                and fetch.sequence.keys[index] == key
            ):
                return fetch
        return None

    def _cost(self, took_s: float) -> None:
        weight = 1.0 if took_s < self._cost_s else _SLOWER
        self._cost_s += weight * (took_s - self._cost_s)

    def _hold_prefix(self, fetch: Fetch, reserve: int) -> bool:
        keys = fetch.sequence.keys[: fetch.first]
        if self._pool.longest_prefix(keys) < fetch.first:
            return False
        fetch.held = self._pool.acquire_prefix(keys)
        return self._pool.available > reserve

    def _land(self, fetch: Fetch, good: bool, disk: bool) -> list[Stored]:
        """The next block of the chain."""
        index = fetch.first + fetch.landed
        content = fetch.sequence.content(index)
        fetch.broken |= not good or not (content.parent is None or content.parent in self._pool)
        slot, stored = self._pool.end_load(fetch.slots[fetch.landed], None if fetch.broken else content)
        if fetch.held:
            fetch.held[index] = slot
        if not fetch.broken:
            fetch.sequence.loaded[index] = disk
        fetch.landed += 1
        return stored

    def _leave(self, fetch: Fetch) -> None:
        """It waits no more and holds nothing; what loads for it, loads on."""
        if fetch.state == "noted":
            del self._fetches[fetch.sequence.arrival]
        elif fetch.state == "asked":
            fetch.state = "left"
            self._unwanted.add(fetch.sequence.arrival)
            self._release(fetch)

    def _release(self, fetch: Fetch) -> None:
        for slot in reversed(fetch.held):
            self._pool.release(slot)
        fetch.held.clear()

    def holds(self) -> list[list[int]]:
        """What each sequence holds here, and what loads for those that have left; for `validate`."""
        return [fetch.held or fetch.slots[fetch.landed :] for fetch in self._fetches.values()]

    def validate(self) -> None:
        """Raises AssertionError where it contradicts itself. O(everything)."""
        assert self.on or not self._waiting(), "somebody waits though no kvbm is there"
        assert all(self.room_for(fetch.sequence) > 0 for fetch in self._waiting())
        assert len(self._fetches) <= self._look_ahead
        assert all(self._fetches[number].state == "left" for number in self._unwanted)
        for number, fetch in self._fetches.items():
            assert number == fetch.sequence.arrival
            assert 0 <= fetch.landed <= len(fetch.slots) <= fetch.count
            assert all(fetch.landed < index < len(fetch.slots) for index in fetch.early)
            assert not fetch.held or len(fetch.held) == fetch.first + len(fetch.slots)
            assert not fetch.held or fetch.state == "asked"
            assert fetch.state == "asked" or fetch.state == "left" or not fetch.slots
            for slot in fetch.slots[fetch.landed :]:
                assert self._pool.state(slot) == "loading"
