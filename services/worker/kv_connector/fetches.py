"""Fetches: blocks on their way to the device, for the sequences that wait for them. Pure.

    queued ──Fetch──▶ open ──▶ no more blocks will be loaded ──▶ settled: the last copy has ended, the ticket released
       │               ▲ │       the last answer came; abandoned;             │
       │               └─┘       no room on the device; a copy was bad        │ the last answer came
       │            Fetched: batches of copies begin                          ▼
       └── abandoned: settled at once                                        over

The kvbm answers a Fetch. Blocks that another engine of the machine is computing are read from it, if there is a reader:
`AskSharer` and `SharedSlots` take the places of Fetch and Fetched, and a share takes that of the ticket. If that engine
shares nothing, the kvbm is asked.

A block whose bytes do not match the kvbm's checksum of it is damaged: it is reported to the kvbm as a block that may be
wrong, and computed.

A fetch that fails needs no cleaning up: its ticket ends by itself. Bytes are right whenever they come, since a copy
checks the slot's generation afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from msgspec import Struct

from services.worker.contracts.device_blocks import DeviceBlocks, FetchRequest
from services.worker.contracts.mover import Copied, Copy
from services.worker.contracts.sharing import SharedSlots
from services.worker.kv_connector.actions import (
    Action,
    AskSharer,
    CancelBatch,
    LinkLost,
    LoadBatch,
    ReturnShare,
    unpack_slots,
)
from services.worker.kv_connector.contract import KvbmAsk
from shared.hashing import unpack_hashes
from shared.messages.kvbm import FETCH, RELEASE, Fetch, Fetched, KvbmRefused, Release

FETCHES = 8
"""Most fetches that sequences wait for at once; others are queued. Those that await blocks are not counted: the
scheduler has a bound for them."""
BATCH_BLOCKS = 32
"""Most blocks that are copied, then reported, together. To take note of them takes 0.1 ms, while the next ones are
copied; the first token waits for the room of the first batch and the note of the last. While all requests wait, ends of
batches are also what shows that the engine lives."""
AWAITING_TIMEOUT_S = 15.0
"""Seconds to wait for each answer to a fetch that awaits blocks: longer than the kvbm's ticket lasts as it is usually
set."""
MOST_ASKED = 64
"""Most requests whose last answer is still to come, those of abandoned fetches included."""


class _Shown(Struct):
    """Blocks that the kvbm has named, and for which no copy has begun."""

    first: int
    """Index of the first."""
    pool_slots: list[int]
    generations: list[int]
    checksums: list[int | None]
    disk: bool


class _OpenFetch(Struct, eq=False):
    request: FetchRequest
    asked_s: float
    round_trip_s: float = 0.0
    """Seconds to the first answer, or until it was clear that none would come. 0 if neither has happened yet."""
    ticket: int = 0
    """0 if not known yet, or released."""
    share: int = 0
    """The share of another engine. 0 if the kvbm is asked."""
    shown: int = 0
    """Blocks that the kvbm's answers have named so far."""
    found: int = -1
    """Blocks that the kvbm has, as its last answer says. -1 if there was none."""
    unplaced: list[_Shown] = []
    """Shown blocks whose slots on the device are not known yet, in order."""
    batches: int = 0
    """Batches of copies under way."""
    open: bool = True
    """More blocks may be loaded."""
    answered: bool = False
    """The last answer has come."""
    settled: bool = False


class _LoadingBatch(Struct):
    fetch: _OpenFetch
    first: int
    """Index of its first block."""
    device_slots: list[int]
    disk: bool


class Fetches:
    """The fetches of one engine. Between `open` and `close` there is a kvbm to ask; copies may end later."""

    def __init__(
        self,
        blocks: DeviceBlocks,
        numbers: Iterator[int],
        batches: Iterator[int],
        *,
        checksums: bool = False,
        reads_shared: bool = False,
    ) -> None:
        """`numbers` names the requests, `batches` the mover's batches. With `checksums` the mover compares them, where
        the kvbm has any. With `reads_shared` other engines are asked to share blocks."""
        self._checksums = checksums
        self._reads_shared = reads_shared
        self._blocks = blocks
        self._numbers = numbers
        self._batches = batches
        self._owner = ""
        self._pool_slots = 0
        self._most_blocks = 0
        """Most blocks of one Fetch. 0 if closed."""
        self._queue: deque[FetchRequest] = deque()
        """Requests that were not sent yet; no longer than the scheduler looks ahead."""
        self._fetches: dict[int, _OpenFetch] = {}
        """`FetchRequest.number` → fetch, of those that are not settled."""
        self._asked: dict[int, _OpenFetch] = {}
        """Number of a request → fetch, of those whose last answer has not come."""
        self._shares: dict[int, _OpenFetch] = {}
        """Share → fetch, of those that are not settled."""
        self._loads: dict[int, _LoadingBatch] = {}
        """Batch of the mover → the blocks that it copies."""

    def open(self, owner: str, pool_slots: int, blocks_per_request: int) -> None:
        """The kvbm has attached this owner; what it fetches is in slots below `pool_slots`."""
        assert self.idle
        assert not self._asked
        assert not self._fetches
        self._owner = owner
        self._pool_slots = pool_slots
        self._most_blocks = blocks_per_request

    def close(self) -> list[Action]:
        """There is no kvbm to ask any longer: every fetch settles once its copies have ended."""
        self._most_blocks = 0
        self._asked.clear()
        while self._queue:
            self._blocks.end_fetch(self._queue.popleft().number, 0.0)
        actions: list[Action] = []
        for fetch in list(self._fetches.values()):
            fetch.ticket = 0
            actions += self._stop(fetch)
        return actions

    @property
    def idle(self) -> bool:
        """Whether no copy is under way."""
        return not self._loads

    def step(self, now_s: float) -> list[Action]:
        """Ask for what sequences wait for, and stop fetches that no sequence waits for any longer."""
        requests, abandoned = self._blocks.fetch_changes()
        self._queue.extend(requests)
        actions: list[Action] = []
        for fetch in [fetch for fetch in self._fetches.values() if fetch.unplaced]:
            actions += self._go_on(fetch)
        for number in abandoned:
            stopped = self._fetches.get(number)
            if stopped is not None:
                actions += self._stop(stopped)
            else:
                self._unqueue(number)
        while self._queue and len(self._asked) + len(self._shares) < MOST_ASKED:  # a share may become a Fetch
            awaiting = sum([fetch.request.awaits for fetch in self._fetches.values()])
            if not self._queue[0].awaits and len(self._fetches) - awaiting >= FETCHES:
                break
            actions.append(self._send(self._queue.popleft(), now_s))
        return actions

    def _send(self, request: FetchRequest, now_s: float) -> KvbmAsk | AskSharer:
        fetch = self._fetches[request.number] = _OpenFetch(request, now_s)
        if not (self._reads_shared and request.sharer):
            return self._ask_kvbm(fetch)
        fetch.share = next(self._numbers)
        self._shares[fetch.share] = fetch
        return AskSharer(fetch.share, request.sharer, request.keys)

    def _ask_kvbm(self, fetch: _OpenFetch) -> KvbmAsk:
        request = fetch.request
        number, keys = next(self._numbers), request.keys[: self._most_blocks]
        self._asked[number] = fetch
        payload = FETCH.encode(Fetch(self._owner, b"".join(keys), awaits=request.awaits))
        timeout_s = AWAITING_TIMEOUT_S if request.awaits else 0.0
        return KvbmAsk(number, "fetch", payload, timeout_s, request.trace)

    def _unqueue(self, number: int) -> None:
        for request in list(self._queue):
            if request.number == number:
                self._queue.remove(request)
                self._blocks.end_fetch(number, 0.0)

    def fetched(self, number: int, reply: Fetched | KvbmRefused | None, last: bool, now_s: float) -> Iterator[Action]:
        """A Fetch was answered; `reply` is None if the answer did not come. Raise LinkLost if it does not fit.

        Yields each batch as soon as there is room for it, so that the first copies begin before there is room for the
        last.
        """
        fetch = self._asked[number]
        if last:
            del self._asked[number]
            fetch.answered = True
        fetch.round_trip_s = fetch.round_trip_s or now_s - fetch.asked_s
        if isinstance(reply, Fetched):
            yield from self._take(fetch, reply)
        yield from self._go_on(fetch)

    def shared(self, answer: SharedSlots) -> Iterator[Action]:
        """Another engine shares blocks, or no more of them. Yields as `fetched`."""
        fetch = self._shares.get(answer.number)
        if fetch is None:
            return  # settled meanwhile
        count = len(answer.slots)
        if answer.last and not fetch.shown + count and fetch.open and self._most_blocks:
            del self._shares[fetch.share]
            yield ReturnShare(fetch.share)
            fetch.share = 0
            yield self._ask_kvbm(fetch)
            return
        self._show(fetch, fetch.shown, answer.slots, [0] * count, [None] * count, disk=False)
        fetch.answered = answer.last
        fetch.found = fetch.shown if answer.last else len(fetch.request.keys)
        yield from self._go_on(fetch)

    def _take(self, fetch: _OpenFetch, reply: Fetched) -> Iterator[Action]:
        """More of the prefix can be read."""
        pool_slots = unpack_slots(reply.slots, self._pool_slots)
        first, count = reply.first, len(pool_slots)
        generations = _unpack_numbers(reply.generations, count, "generations")
        checksums = _unpack_checksums(reply.checksums if self._checksums else b"", count)
        if first != fetch.shown or first + count > min(reply.found, len(fetch.request.keys)):
            raise LinkLost(f"blocks {first} … {first + count - 1} were shown where {fetch.shown} was the next one")
        if not fetch.settled:
            fetch.ticket = reply.ticket
        elif reply.ticket:  # the sequence did not wait for this answer, so that no ticket was known to release
            yield self._release(reply.ticket)
        fetch.found = reply.found
        self._show(fetch, first, pool_slots, generations, checksums, disk=reply.disk)

    def _show(
        self,
        fetch: _OpenFetch,
        first: int,
        slots: list[int],
        generations: list[int],
        checksums: list[int | None],
        *,
        disk: bool,
    ) -> None:
        """Blocks first, first + 1, … can be copied from these slots."""
        fetch.shown += len(slots)
        if fetch.open:
            for at in range(0, len(slots), BATCH_BLOCKS):
                part = slice(at, at + BATCH_BLOCKS)
                shown = _Shown(first + at, slots[part], generations[part], checksums[part], disk)
                fetch.unplaced.append(shown)

    def _go_on(self, fetch: _OpenFetch) -> Iterator[Action]:
        """Begin copies, as far as the device has room; settle the fetch if nothing more comes."""
        while fetch.unplaced:
            shown = fetch.unplaced[0]
            count = len(shown.pool_slots)
            device_slots = self._blocks.begin_load(fetch.request.number, shown.first, count, fetch.found)
            if device_slots is None:
                return
            fetch.unplaced.pop(0)
            if device_slots:
                batch = next(self._batches)
                self._loads[batch] = _LoadingBatch(fetch, shown.first, device_slots, shown.disk)
                fetch.batches += 1
                copies = list(map(Copy, shown.pool_slots, device_slots, shown.generations, shown.checksums))
                yield LoadBatch(batch, copies, fetch.share)
            if len(device_slots) < count:
                fetch.open = False
                fetch.unplaced.clear()
        if fetch.answered or 0 <= fetch.found <= fetch.shown:
            fetch.open = False
        yield from self._settle(fetch)

    def owns(self, batch: int) -> bool:
        """Whether the mover's batch is a load."""
        return batch in self._loads

    def loaded(self, copied: Copied) -> list[Action]:
        """A batch has ended: its good blocks enter the prefix cache."""
        load = self._loads.pop(copied.batch)
        fetch = load.fetch
        self._blocks.discard([fetch.request.keys[load.first + place] for place in copied.damaged])
        assert len(copied.good) == len(load.device_slots)
        sharer = fetch.request.sharer if fetch.share else ""
        self._blocks.end_loads(fetch.request.number, load.first, copied.good, load.disk, sharer)
        fetch.batches -= 1
        if fetch.open and not all(copied.good):
            return self._stop(fetch)  # blocks after one that is not there are of no use
        return self._settle(fetch)

    def _stop(self, fetch: _OpenFetch) -> list[Action]:
        """Begin no further copy for this fetch."""
        fetch.open = False
        fetch.unplaced.clear()
        cancels = [CancelBatch(batch) for batch, load in self._loads.items() if load.fetch is fetch]
        return [*cancels, *self._settle(fetch)]

    def _settle(self, fetch: _OpenFetch) -> list[Action]:
        """If nothing of the fetch is or will be under way, let its sequence go on and release its ticket."""
        if fetch.open or fetch.batches or fetch.settled:
            return []
        fetch.settled = True
        del self._fetches[fetch.request.number]
        self._blocks.end_fetch(fetch.request.number, fetch.round_trip_s)
        if fetch.share:
            del self._shares[fetch.share]
            return [ReturnShare(fetch.share)]
        ticket, fetch.ticket = fetch.ticket, 0
        return [self._release(ticket)] if ticket else []

    def _release(self, ticket: int) -> KvbmAsk:
        return KvbmAsk(next(self._numbers), "release", RELEASE.encode(Release(self._owner, ticket)))

    def validate(self) -> None:
        """Raise AssertionError if the fetches contradict themselves."""
        assert sum(not fetch.request.awaits for fetch in self._fetches.values()) <= FETCHES
        assert len(self._asked) + len(self._shares) <= MOST_ASKED
        if not self._most_blocks:
            assert not [*self._queue, *self._asked], "closed, and a request is open"
        assert {id(fetch) for fetch in self._shares.values()} == {id(f) for f in self._fetches.values() if f.share}
        for number, fetch in self._fetches.items():
            assert fetch.request.number == number
            assert not fetch.settled
            assert fetch.open or fetch.batches, f"fetch {number} waits for nothing"
            assert not fetch.open or not fetch.answered or fetch.unplaced, f"fetch {number} waits for nothing"
            assert fetch.open or not fetch.unplaced
        for fetch in {id(load.fetch): load.fetch for load in self._loads.values()}.values():
            assert fetch.batches == sum(load.fetch is fetch for load in self._loads.values())
            assert not fetch.settled
        device = [slot for load in self._loads.values() for slot in load.device_slots]
        assert len(device) == len(set(device)), "two copies write to one slot"
        numbers = [request.number for request in self._queue]
        assert len({*numbers, *self._fetches}) == len(numbers) + len(self._fetches)


def _unpack_checksums(packed: bytes, count: int) -> list[int | None]:
    """Return the checksums of `count` slots; None if there is none. Raise LinkLost."""
    checksums = _unpack_numbers(packed, count, "checksums") if packed else [0] * count
    return [checksum or None for checksum in checksums]


def _unpack_numbers(packed: bytes, count: int, what: str) -> list[int]:
    """Return one number for each of `count` slots. Raise LinkLost."""
    try:
        numbers = unpack_hashes(packed)
    except ValueError as wrong:
        raise LinkLost(str(wrong)) from None
    if len(numbers) != count:
        raise LinkLost(f"the kvbm sent {len(numbers)} {what} of {count} slots")
    return numbers
