"""Fetches: blocks on their way from the kvbm to the device, for the sequences that wait for them. Pure.

    queued ──Fetch──▶ open ──▶ no block more will be loaded ──▶ settled: the last copy has ended, the ticket is released
       │               ▲ │       the last answer came; unwanted;              │
       │               └─┘       no room on the device; a copy was bad        │ the last answer came
       │            Fetched: batches of copies begin                          ▼
       └── unwanted: settled at once                                         over

A block whose bytes have not the checksum that kvbm has of it is damaged: it is named to the kvbm, as one that may be
wrong, and computed.

A fetch that fails needs nothing: its ticket ends by itself. Bytes are right whenever they come, since a copy looks at
the slot's generation afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from services.worker.kv_connector.link import Ask, LinkLost, unpack_checksums, unpack_generations, unpack_slots
from services.worker.mover import Copied, Copy, Mover
from services.worker.scheduler.kv_cache_manager import KVCacheManager
from services.worker.scheduler.kv_onboarding import FetchRequest
from shared.kvbm_messages import FETCH, RELEASE, Fetch, Fetched, KvbmRefused, Release

FETCHES = 8
"""That sequences wait for, at once; others are queued."""
BATCH_BLOCKS = 32
"""That are copied, then told, at once: taking note of them takes 0.2 ms, while the next ones are copied; for the first
ones to have room, and for the last ones to be noted, the first token waits. While all requests wait, their ends are
also what says that the engine lives."""
MOST_ASKED = 64
"""With those whose sequences wait no more and whose last answer is still to come."""


class _Fetch(Struct, eq=False):
    wanted: FetchRequest
    asked_s: float
    round_trip_s: float = 0.0
    """To the first answer, or until it was clear that none would come; 0: neither yet."""
    ticket: int = 0
    """0: not known yet, or released."""
    taken: int = 0
    """Blocks that were told so far."""
    batches: int = 0
    """Of copies, under way."""
    open: bool = True
    """More blocks may be loaded."""
    answered: bool = False
    """The last answer has come."""
    settled: bool = False


class _Load(Struct):
    fetch: _Fetch
    first: int
    """Index of its first block."""
    device_slots: list[int]
    disk: bool


class Fetches:
    """Between `open` and `close` there is a kvbm to ask; copies may end later."""

    def __init__(
        self, kv_cache: KVCacheManager, mover: Mover, batches: Iterator[int], ask: Ask, *, checks: bool = False
    ) -> None:
        """`batches` names the mover's; `checks`: checksums are compared, where there are any."""
        self._checks = checks
        self._kv_cache = kv_cache
        self._mover = mover
        self._batches = batches
        self._ask = ask
        self._owner = ""
        self._pool_slots = 0
        self._most_blocks = 0
        """Of one Fetch; 0: closed."""
        self._queue: deque[FetchRequest] = deque()
        """No longer than the scheduler looks ahead."""
        self._fetches: dict[int, _Fetch] = {}
        """Those that are not settled, by `Wanted.number`."""
        self._asked: dict[int, _Fetch] = {}
        """Those whose last answer has not come, by number."""
        self._loads: dict[int, _Load] = {}
        """By batch."""

    def open(self, owner: str, pool_slots: int, blocks_per_request: int) -> None:
        """The kvbm has taken up this owner; what it fetches is in slots below `pool_slots`."""
        assert self.quiet
        assert not self._asked
        assert not self._fetches
        self._owner = owner
        self._pool_slots = pool_slots
        self._most_blocks = blocks_per_request

    def close(self) -> None:
        """There is nobody to ask any more."""
        self._most_blocks = 0
        self._asked.clear()
        while self._queue:
            self._kv_cache.end_fetch(self._queue.popleft().number, 0.0)
        for fetch in list(self._fetches.values()):
            fetch.ticket = 0
            self._stop(fetch)

    @property
    def quiet(self) -> bool:
        """Whether no copy is under way."""
        return not self._loads

    def turn(self, now_s: float) -> None:
        """Asks for what sequences wait for, and stops what nobody waits for."""
        requested, abandoned = self._kv_cache.fetch_changes()
        self._queue.extend(requested)
        for number in abandoned:
            fetch = self._fetches.get(number)
            if fetch is not None:
                self._stop(fetch)
            else:
                self._unqueue(number)
        while self._queue and len(self._fetches) < FETCHES and len(self._asked) < MOST_ASKED:
            wanted = self._queue.popleft()
            keys = wanted.keys[: self._most_blocks]
            number = self._ask("fetch", FETCH.encode(Fetch(self._owner, b"".join(keys))))
            self._asked[number] = self._fetches[wanted.number] = _Fetch(wanted, now_s)

    def _unqueue(self, number: int) -> None:
        for wanted in list(self._queue):
            if wanted.number == number:
                self._queue.remove(wanted)
                self._kv_cache.end_fetch(number, 0.0)

    def fetched(self, number: int, reply: Fetched | KvbmRefused | None, last: bool, now_s: float) -> None:
        """An answer to a Fetch; None: there is none. Raises LinkLost."""
        fetch = self._asked[number]
        if last:
            del self._asked[number]
            fetch.answered = True
        fetch.round_trip_s = fetch.round_trip_s or now_s - fetch.asked_s
        if isinstance(reply, Fetched):
            self._take(fetch, reply)
            if fetch.taken >= reply.found:
                fetch.open = False
        if fetch.answered:
            fetch.open = False
        self._settle(fetch)

    def _take(self, fetch: _Fetch, reply: Fetched) -> None:
        """More of the prefix can be read: as far as the device has room, copies begin."""
        pool_slots = unpack_slots(reply.slots, self._pool_slots)
        first, count = reply.first, len(pool_slots)
        generations = unpack_generations(reply.generations, count)
        checksums = unpack_checksums(reply.checksums if self._checks else b"", count)
        if first != fetch.taken or first + count > min(reply.found, len(fetch.wanted.keys)):
            raise LinkLost(f"blocks {first} … {first + count - 1} were shown where {fetch.taken} was the next one")
        if not fetch.settled:
            fetch.ticket = reply.ticket
        elif reply.ticket:
            self._release(reply.ticket)  # its sequence did not wait for this, and there was no ticket to release then
        fetch.taken += count
        if not fetch.open or not count:
            return
        for at in range(0, count, BATCH_BLOCKS):  # the first copies begin before there is room for the last
            end = min(at + BATCH_BLOCKS, count)
            device_slots = self._kv_cache.begin_load(fetch.wanted.number, first + at, end - at)
            if device_slots:
                batch = next(self._batches)
                self._loads[batch] = _Load(fetch, first + at, device_slots, reply.disk)
                fetch.batches += 1
                self._mover.load(
                    batch, list(map(Copy, pool_slots[at:end], device_slots, generations[at:end], checksums[at:end]))
                )
            if len(device_slots) < end - at:
                fetch.open = False
                return

    def owns(self, batch: int) -> bool:
        """Whether the mover's batch is one of these."""
        return batch in self._loads

    def ended(self, copied: Copied) -> None:
        """A batch has ended."""
        load = self._loads.pop(copied.batch)
        fetch = load.fetch
        self._kv_cache.discard([fetch.wanted.keys[load.first + place] for place in copied.damaged])
        for index, (slot, good) in enumerate(zip(load.device_slots, copied.good, strict=True), load.first):
            self._kv_cache.end_load(fetch.wanted.number, index, slot, good, load.disk)
        fetch.batches -= 1
        if fetch.open and not all(copied.good):
            self._stop(fetch)  # what follows a block that is not there is of no use
        else:
            self._settle(fetch)

    def _stop(self, fetch: _Fetch) -> None:
        """No copy of it begins any more."""
        fetch.open = False
        for batch, load in self._loads.items():
            if load.fetch is fetch:
                self._mover.cancel(batch)
        self._settle(fetch)

    def _settle(self, fetch: _Fetch) -> None:
        """If nothing of it is or will be under way, its sequence goes on, and its ticket ends."""
        if fetch.open or fetch.batches or fetch.settled:
            return
        fetch.settled = True
        del self._fetches[fetch.wanted.number]
        self._kv_cache.end_fetch(fetch.wanted.number, fetch.round_trip_s)
        if fetch.ticket:
            self._release(fetch.ticket)
            fetch.ticket = 0

    def _release(self, ticket: int) -> None:
        self._ask("release", RELEASE.encode(Release(self._owner, ticket)))

    def validate(self) -> None:
        """Raises AssertionError where the fetches contradict themselves."""
        assert len(self._fetches) <= FETCHES
        assert len(self._asked) <= MOST_ASKED
        if not self._most_blocks:
            assert not [*self._queue, *self._asked], "closed, and something is asked"
        for number, fetch in self._fetches.items():
            assert fetch.wanted.number == number
            assert not fetch.settled
            assert fetch.open or fetch.batches, f"fetch {number} waits for nothing"
            assert not fetch.open or not fetch.answered, f"fetch {number} waits for an answer that has come"
        for fetch in {id(load.fetch): load.fetch for load in self._loads.values()}.values():
            assert fetch.batches == sum(load.fetch is fetch for load in self._loads.values())
            assert not fetch.settled
        device = [slot for load in self._loads.values() for slot in load.device_slots]
        assert len(device) == len(set(device)), "two copies write to one slot"
        numbers = [wanted.number for wanted in self._queue]
        assert len({*numbers, *self._fetches}) == len(numbers) + len(self._fetches)
