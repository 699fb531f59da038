"""A machine's block store in a fleet's virtual time: kvbm's own decisions, with a model of its disk and its messages.

    engine's KVConnector ── HOP_S ──▶ Tickets, Tiers ── HOP_S ──▶ engine      what comes from disk later, as it is read
                                      │    ▲
                                      ▼    │ a read or a write ends: one after another, each `block_bytes` ÷ rate
                                     the disk

Real: tickets, tiers, policies, admission, messages as they are encoded, generations, KV events. Modelled: the time that
copies, the disk and messages take. Left out: bytes, the pool file and its locks, failures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count, groupby
from operator import itemgetter

from msgspec import Struct

from services.kvbm.config import TiersConfig
from services.kvbm.tickets.packing import SlotChecksums, pack_slots, to_contents, unpack_keys, unpack_slots
from services.kvbm.tickets.pending_fetches import PendingFetches
from services.kvbm.tickets.results import TicketLimits
from services.kvbm.tickets.tickets import Tickets
from services.kvbm.tiers.actions import Read, Spill, TierEvent
from services.kvbm.tiers.policies import make_policy
from services.kvbm.tiers.tiers import Tiers
from services.worker.kv_connector.contract import KvbmAsk, KvbmReply
from shared.hashing import pack_hashes
from shared.kv_events import to_kv_events
from shared.messages import kvbm as wire
from shared.messages.kv_events import EVENT_BATCH, EventBatch, KvEvent
from shared.pool.format import PAGE_BYTES, Arena

KVBM = "kvbm"
TICK_S = 0.25
SPILLS_MOST = 64
"""The most writes to disk under way at once."""
_BLOCKS_PER_REQUEST = 4096


class StoreSizes(Struct, frozen=True):
    """The sizes of a machine's block store."""

    slots: int
    """How many blocks fit into host memory."""
    records: int
    """How many blocks fit on disk."""
    read_bytes_per_s: float = 6e9
    write_bytes_per_s: float = 3e9
    tiers: TiersConfig = TiersConfig()


class FleetClock:
    """Virtual time, with a queue of actions."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()

    def at(self, time_s: float, act: Callable[[], None]) -> None:
        """Schedule an action; actions for the same time happen in the order of these calls."""
        heappush(self._heap, (time_s, next(self._order), act))

    def after(self, delay_s: float, act: Callable[[], None]) -> None:
        """Schedule an action `delay_s` from now."""
        self.at(self.now_s + delay_s, act)

    def step(self) -> None:
        """Advance to the next action and do it."""
        self.now_s, _, act = heappop(self._heap)
        act()


class PoolTable:
    """Slots without bytes, with their generations, which a mover and the store share."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.arena = Arena(0, -(-block_bytes // PAGE_BYTES) * PAGE_BYTES, slots, PAGE_BYTES)
        self.bytes = memoryview(b"")
        self._generations = [0] * slots

    def generation(self, slot: int) -> int:
        return self._generations[slot]

    def generations(self, slots: bytes) -> bytes:
        return pack_hashes(map(self.generation, unpack_slots(slots)))

    def grant(self, slot: int) -> None:
        self._generations[slot] += 1


class PoolPlace:
    """A pool attachment that needs no lock."""

    def __init__(self, owner: str, table: PoolTable) -> None:
        self._owner = owner
        self._table = table

    def hold(self) -> str:
        return self._owner

    def map(self, attached: wire.Attached) -> PoolTable:
        assert attached.slots == self._table.arena.slots
        return self._table

    def close(self) -> None: ...


class _StoreLine:
    """One direction of the disk, which serves requests one after another."""

    def __init__(self, clock: FleetClock, block_s: float) -> None:
        self._clock = clock
        self._block_s = block_s
        self._free_s = 0.0

    def add(self, ended: Callable[[], None]) -> None:
        self._free_s = max(self._free_s, self._clock.now_s) + self._block_s
        self._clock.after(self._free_s - self._clock.now_s, ended)


class BlockStore:
    """One kvbm with one layout. `tell` is called with encoded batches of KV events."""

    def __init__(
        self,
        clock: FleetClock,
        layout: wire.StoreLayout,
        sizes: StoreSizes,
        hop_s: float,
        tell: Callable[[bytes], None],
    ) -> None:
        self.layout = layout
        self.table = PoolTable(sizes.slots, layout.kv.block_bytes)
        self.looked_up = self.in_host = self.on_disk = 0
        """How many blocks were requested, found in memory and found on disk."""
        self._clock = clock
        self._hop_s = hop_s
        self._tell = tell
        host, disk = (
            make_policy(sizes.tiers.host_policy, sizes.slots),
            make_policy(sizes.tiers.disk_policy, max(1, sizes.records)),
        )
        self.tiers = Tiers(sizes.tiers.sizes(sizes.slots, sizes.records), host, disk)
        self.tickets = Tickets(self.tiers, TicketLimits(blocks_per_request=_BLOCKS_PER_REQUEST))
        if sizes.records:
            self.tiers.disk_ready([])
        self._reading = _StoreLine(clock, layout.kv.block_bytes / sizes.read_bytes_per_s)
        self._writing = _StoreLine(clock, layout.kv.block_bytes / sizes.write_bytes_per_s)
        self._spilling = 0
        self._pending = PendingFetches(self.table.generations, SlotChecksums(sizes.slots))
        self._tick()

    def ask(self, ask: KvbmAsk, answer: Callable[[KvbmReply], None]) -> None:
        """Receive an engine's request after its time on the way; `answer` is called with each reply."""
        self._clock.after(self._hop_s, partial(self._serve, ask, answer))

    def _serve(self, ask: KvbmAsk, answer: Callable[[KvbmReply], None]) -> None:
        now_s = self._clock.now_s

        def reply(payload: bytes, last: bool = True) -> None:
            self._clock.after(self._hop_s, partial(answer, KvbmReply(ask.number, payload, last=last)))

        match ask.operation:
            case "attach":
                reply(wire.ATTACH_REPLY.encode(self._attach(wire.ATTACH.decode(ask.payload))))
            case "store":
                reply(wire.STORE_REPLY.encode(self._store(wire.STORE.decode(ask.payload), now_s)))
            case "commit":
                commit = wire.COMMIT.decode(ask.payload)
                events = self.tickets.commit(commit.owner, commit.ticket, unpack_slots(commit.slots), now_s)
                self._hear(events)
                self._pending.add_progress(self.tickets.hold_awaited(events, now_s))
                reply(wire.SETTLED.encode(wire.Settled()))
            case "abort":
                abort = wire.ABORT.decode(ask.payload)
                self.tickets.abort(abort.owner, abort.ticket)
                reply(wire.SETTLED.encode(wire.Settled()))
            case "fetch":
                self._fetch(wire.FETCH.decode(ask.payload), now_s, reply)
            case "release":
                release = wire.RELEASE.decode(ask.payload)
                self.tickets.release(release.owner, release.ticket)
                self._pending.refuse(release.ticket, "unknown_ticket", "it was released", owner=release.owner)
                reply(wire.SETTLED.encode(wire.Settled()))
            case "discard":
                raise AssertionError("nothing that is simulated is not finite")
        self._settle()

    def _attach(self, attach: wire.Attach) -> wire.Attached:
        assert attach.layout == self.layout
        self.tickets.attach(attach.owner)
        arena = self.table.arena
        return wire.Attached(
            kvbm=KVBM,
            layout=self.layout.digest,
            pool_bytes=arena.size_bytes,
            offset=arena.offset,
            slot_bytes=arena.slot_bytes,
            slots=arena.slots,
            generations=arena.generations,
            blocks_per_request=_BLOCKS_PER_REQUEST,
        )

    def _store(self, store: wire.Store, now_s: float) -> wire.Granted:
        contents = to_contents(store.blocks, self.layout.kv.block_size)
        granted = self.tickets.store(store.owner, contents, now_s)
        for slot in granted.slots:
            self.table.grant(slot)
        self._hear(granted.events)
        return wire.Granted(
            granted.ticket, self.tickets.limits.store_time_s, granted.indices, pack_slots(granted.slots)
        )

    def _fetch(self, fetch: wire.Fetch, now_s: float, reply: Callable[[bytes, bool], None]) -> None:
        keys = unpack_keys(fetch.keys)
        held = self.tickets.fetch(fetch.owner, keys, now_s, awaits=fetch.awaits)
        self.looked_up += len(keys) - held.awaited
        self.in_host += len(held.slots) - len(held.loading)
        self.on_disk += len(held.loading)
        self._hear(held.events)
        for read in held.reads:
            self.table.grant(read.slot)
            self._reading.add(partial(self._read, read))
        length, ready = len(held.slots) + held.awaited, held.slots[: held.ready]
        complete = held.ready == length
        if not complete:
            self._pending.add(held.ticket, fetch.owner, lambda more, last: reply(wire.FETCH_REPLY.encode(more), last))
        first = self._pending.reply(held.ticket, self.tickets.limits.fetch_time_s, 0, ready, length, disk=False)
        reply(wire.FETCH_REPLY.encode(first), complete)

    # --- the disk, and time

    def _read(self, read: Read) -> None:
        advanced, events = self.tickets.read_done(read, "ok", self._clock.now_s)
        self._hear(events)
        self._pending.add_progress(advanced)
        self._settle()

    def _settle(self) -> None:
        """Run the pending actions, as the shell does after each reply."""
        self._hear(self.tiers.prepare())
        if self._spilling < SPILLS_MOST:
            spills, events = self.tiers.take_spills(SPILLS_MOST - self._spilling)
            self._hear(events)
            self._spilling += len(spills)
            for spill in spills:
                self._writing.add(partial(self._spilled, spill))
        self._pending.send_progress()

    def _spilled(self, spill: Spill) -> None:
        self._spilling -= 1
        self._hear(self.tiers.spill_done(spill, "ok"))
        self._settle()

    def _tick(self) -> None:
        for ticket in self.tickets.expire(self._clock.now_s):
            self._pending.refuse(ticket.ticket, "expired", "its time is over")
        self._clock.after(TICK_S, self._tick)

    def _hear(self, changes: list[TierEvent]) -> None:
        events: list[KvEvent] = []
        for tier, run in groupby(changes, itemgetter(0)):
            events += to_kv_events((event for _, event in run), self.layout.kv.block_size, tier)
        if events:
            self._tell(EVENT_BATCH.encode(EventBatch(self._clock.now_s, events)))
