"""Owners that crash, freeze and thaw; a kvbm that is killed; a disk that fails: bytes are never wrong, no slot leaks.

The machine models the memory: which block's bytes each slot and each record has, who may still write to a slot, and
the generations by which a late reader sees that a slot was granted again.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product
from random import Random
from typing import get_args

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from services.kvbm.tickets.errors import TicketExpired
from services.kvbm.tickets.results import ExpiredTicket, FetchProgress, TicketLimits
from services.kvbm.tickets.tickets import Tickets
from services.kvbm.tiers.actions import Read, ReadOutcome, Spill, TierEvent, TierSizes
from services.kvbm.tiers.disk_records import FoundBlock, WriteOutcome
from services.kvbm.tiers.policies import LruPolicy
from services.kvbm.tiers.reuse import ReusePolicy
from services.kvbm.tiers.tiers import Tiers
from shared.blocks import Content, ContentStored
from shared.hashing import ContentKey, event_hash
from shared.messages.kv_events import Tier
from tests.kvbm.chains import chain, keys

SLOTS, RECORDS = 5, 3
OWNERS = ("a", "b", "c")
GARBAGE = b"garbage"
BOUNDS = TicketLimits(store_time_s=3, fetch_time_s=3, tickets_per_owner=4, owner_share=0.7)
PATHS = {keys(chain(*path))[-1]: keys(chain(*path)) for n in (1, 2, 3) for path in product((0, 1), repeat=n)}
"""Block → the chain that ends with it, for all blocks that can be stored."""
tokens = st.lists(st.integers(0, 1), min_size=1, max_size=3)
picks = st.integers(0, 99)


class Writer:
    """A store as its owner sees it; it may write until it has ended it, whatever the kvbm believes."""

    def __init__(self, owner: str, ticket: int, blocks: dict[int, Content]) -> None:
        self.owner = owner
        self.ticket = ticket
        self.blocks = blocks


class Reader:
    """A fetch as its owner sees it. After its time is over only the generation decides whether a copy is right."""

    def __init__(self, owner: str, ticket: int, wanted: list[ContentKey]) -> None:
        self.owner = owner
        self.ticket = ticket
        self.wanted = wanted
        self.slots: list[int] = []
        self.generations: list[int] = []
        self.over = False
        self.discarded: set[int] = set()
        """Its slots whose block was discarded meanwhile: the generation shows it."""


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.run = 0
        self.bytes: list[bytes] = [GARBAGE] * SLOTS
        self.generation = [0] * SLOTS
        self.disk_bytes: dict[int, Content] = {}
        self.alive: set[str] = set(OWNERS)
        self.attached: set[str] = set()
        self.writers: list[Writer] = []
        self.readers: list[Reader] = []
        self.reads: list[Read] = []
        self.spills: list[Spill] = []
        self.erases: list[int] = []
        self.discarded: set[ContentKey] = set()
        """Blocks that were discarded, with no slot granted for them since: no fetch may find them."""
        self.told: dict[Tier, dict[ContentKey, Content]] = {}
        self.start(before=())
        for owner in OWNERS:
            self.attach(owner)

    def start(self, before: tuple[str, ...]) -> None:
        """Start a kvbm, with what it finds on disk."""
        self.run += 1
        self.told = {"host": {}, "disk": {}}
        sizes = TierSizes(
            slots=SLOTS,
            records=RECORDS,
            disk_sightings=2 - self.run % 2,
            fill_disk=self.run % 4 == 2,
            held_share=0.8,
        )
        self.tiers = Tiers(sizes, LruPolicy(SLOTS), ReusePolicy(RECORDS), quarantined=bool(before))
        self.tickets = Tickets(self.tiers, BOUNDS, former_owners=before, first_ticket=1000 * self.run)
        self.on = False
        self.switch_disk(replaced=False)

    # --- what the shell does

    def hear(self, events: list[TierEvent]) -> None:
        for tier, event in events:
            told = self.told[tier]
            if isinstance(event, ContentStored):
                assert event.content.key not in self.discarded, "a discarded block can be found"
                assert event.content.key not in told, "stored twice"
                told[event.content.key] = event.content
            else:
                assert told.pop(event.content.key) == event.content

    def granted(self, slot: int) -> None:
        """Record that the slot is about to be written."""
        assert all(slot not in writer.blocks for writer in self.writers), "granted while a worker may still write"
        assert all(slot != read.slot for read in self.reads), "granted while the disk may still write"
        assert all(slot != spill.slot for spill in self.spills), "granted while the disk reads"
        assert all(slot not in reader.slots for reader in self.readers if not reader.over), "granted while it is read"
        self.generation[slot] += 1
        self.bytes[slot] = GARBAGE

    def readable(self, reader: Reader, slots: list[int]) -> None:
        reader.slots += slots
        reader.generations += [self.generation[slot] for slot in slots]

    def expired(self, expired: list[ExpiredTicket]) -> None:
        for one in expired:
            for reader in self.readers:
                if (one.owner, one.ticket) == (reader.owner, reader.ticket):
                    reader.over = True

    # --- owners

    @precondition(lambda self: len(self.attached) < len(OWNERS) or self.writers or self.readers)
    @rule(owner=st.sampled_from(OWNERS))
    def attach(self, owner: str) -> None:
        """A process that was dead is another one under its old name: what it did before is over."""
        self.alive.add(owner)
        self.attached.add(owner)
        self.forget(owner)
        self.tickets.attach(owner)

    def forget(self, owner: str) -> None:
        self.writers = [writer for writer in self.writers if writer.owner != owner]
        self.readers = [reader for reader in self.readers if reader.owner != owner]

    @precondition(lambda self: self.writers or self.readers)
    @rule(owner=st.sampled_from(OWNERS))
    def die(self, owner: str) -> None:
        self.forget(owner)
        self.alive.discard(owner)
        self.attached.discard(owner)
        self.tickets.owner_dead(owner)

    @precondition(lambda self: self.writers)
    @rule(pick=picks)
    def lose_lease(self, pick: int) -> None:
        self.expired(self.tickets.worker_lease_lost(self.writers[pick % len(self.writers)].owner))

    @precondition(lambda self: self.free_owners())
    @rule(pick=picks, path=tokens, at_once=st.booleans())
    def store(self, pick: int, path: list[int], at_once: bool) -> None:
        owner = self.free_owners()[pick % len(self.free_owners())]
        contents = chain(*path)
        granted = self.tickets.store(owner, contents, self.now_s)
        self.hear([*granted.events, *self.tiers.prepare()])
        for slot in granted.slots:
            self.granted(slot)
        self.discarded.difference_update(contents[index].key for index in granted.indices)
        assert len(granted.indices) == len(granted.slots)
        assert len(granted.slots) + granted.known + granted.declined == len(contents)
        assert bool(granted.ticket) == bool(granted.slots)
        if granted.ticket:
            blocks = {slot: contents[index] for index, slot in zip(granted.indices, granted.slots, strict=True)}
            self.writers.append(Writer(owner, granted.ticket, blocks))
            if at_once:
                self.commit(len(self.writers) - 1, len(blocks))

    def free_owners(self) -> list[str]:
        """Return the owners that may open a ticket."""
        attached = sorted(self.attached)
        return [
            owner
            for owner in attached
            if self.tickets_of(owner) < BOUNDS.tickets_per_owner and owner not in self.forgetful()
        ]

    def forgetful(self) -> set[str]:
        """Return the owners that must attach again before they may open a ticket."""
        long_ago_s = self.now_s - BOUNDS.store_time_s
        return {store.owner for store in self.tickets._expired.values() if store.deadline_s <= long_ago_s}

    def tickets_of(self, owner: str) -> int:
        writing = sum(writer.owner == owner for writer in self.writers)
        return writing + sum(reader.owner == owner and not reader.over for reader in self.readers)

    @precondition(lambda self: self.writers)
    @rule(pick=picks, noise=st.booleans())
    def write(self, pick: int, noise: bool) -> None:
        """A copy makes progress, perhaps long after its ticket's deadline, or in a kvbm that knows nothing of it."""
        writer = self.writers[pick % len(self.writers)]
        for slot, content in writer.blocks.items():
            self.bytes[slot] = GARBAGE if noise else content.key

    @precondition(lambda self: self.writers)
    @rule(pick=picks, most=st.integers(0, 4))
    def commit(self, pick: int, most: int) -> None:
        writer = self.writers[pick % len(self.writers)]
        if writer.owner not in self.attached:  # it has to attach first, and forgets its stores then
            return
        slots = list(writer.blocks)[:most]
        for slot in slots:
            self.bytes[slot] = writer.blocks[slot].key
        self.writers.remove(writer)
        with suppress(TicketExpired):
            events = self.tickets.commit(writer.owner, writer.ticket, slots, self.now_s)
            self.hear(events)
            for one in self.tickets.hold_awaited(events, self.now_s):
                self.advance(one)

    @precondition(lambda self: self.writers)
    @rule(pick=picks)
    def abort(self, pick: int) -> None:
        writer = self.writers[pick % len(self.writers)]
        if writer.owner in self.attached:
            self.writers.remove(writer)
            self.tickets.abort(writer.owner, writer.ticket)

    @initialize(paths=st.lists(tokens, min_size=2, max_size=6))
    def begin(self, paths: list[list[int]]) -> None:
        """Start with blocks in the tiers, so that not every run has to fill them by luck."""
        for path in paths:
            self.store(0, path, at_once=True)
            self.spill(3, at_once=True)

    @precondition(lambda self: self.free_owners() and any(self.told.values()))
    @rule(pick=picks, path=tokens)
    def fetch_any(self, pick: int, path: list[int]) -> None:
        self.fetch(pick, keys(chain(*path)))

    @precondition(lambda self: self.free_owners() and any(self.told.values()))
    @rule(pick=picks, which=picks)
    def fetch_known(self, pick: int, which: int) -> None:
        """Fetch a chain whose last block is stored; preferably only on disk."""
        known = sorted(self.told["disk"].keys() - self.told["host"].keys()) or sorted(self.told["host"])
        self.fetch(pick, PATHS[known[which % len(known)]])

    @precondition(lambda self: self.free_owners())
    @rule(pick=picks, path=tokens)
    def fetch_awaiting(self, pick: int, path: list[int]) -> None:
        """Fetch what may be stored later."""
        self.fetch(pick, keys(chain(*path)), awaits=True)

    def fetch(self, pick: int, wanted: list[ContentKey], *, awaits: bool = False) -> None:
        owner = self.free_owners()[pick % len(self.free_owners())]
        fetched = self.tickets.fetch(owner, wanted, self.now_s, awaits=awaits)
        self.hear(fetched.events)
        for read in fetched.reads:
            self.granted(read.slot)
            self.reads.append(read)
        assert bool(fetched.ticket) == bool(fetched.slots or fetched.awaited)
        assert awaits or not fetched.awaited
        if fetched.ticket:
            reader = Reader(owner, fetched.ticket, wanted)
            self.readable(reader, fetched.slots[: fetched.ready])
            self.readers.append(reader)

    @precondition(lambda self: self.free_owners() and self.told["host"])
    @rule(pick=picks, which=picks)
    def lend(self, pick: int, which: int) -> None:
        """Hold a chain for a peer: its slots stay as they are until it is released or its owner ends, however late."""
        owner = self.free_owners()[pick % len(self.free_owners())]
        known = sorted(self.told["host"])
        wanted = PATHS[known[which % len(known)]]
        held = self.tickets.lend(owner, wanted, self.now_s)
        assert not held.reads
        assert not held.loading
        assert set(wanted[: len(held.slots)]) <= self.told["host"].keys()
        if held.ticket:
            reader = Reader(owner, held.ticket, wanted)
            self.readable(reader, held.slots)
            self.readers.append(reader)

    @precondition(lambda self: self.readers)
    @rule(pick=picks)
    def copy_and_release(self, pick: int) -> None:
        """Copy and release: the bytes are right, or the generation shows that they are not; also long after the
        ticket's end."""
        reader = self.readers.pop(pick % len(self.readers))
        for key, slot, generation in zip(reader.wanted, reader.slots, reader.generations, strict=False):
            assert self.bytes[slot] == key or self.generation[slot] != generation, "wrong bytes"
            same = self.generation[slot] == generation
            assert reader.over or same != (slot in reader.discarded), "granted while it was held"
        if reader.owner in self.attached:
            self.tickets.release(reader.owner, reader.ticket)

    @precondition(lambda self: self.attached)
    @rule(pick=picks, path=tokens)
    def discard(self, pick: int, path: list[int]) -> None:
        """Discard the last blocks of a chain, which may be wrong. Their readers see it by the generation."""
        wanted = keys(chain(*path))[-2:]
        slots, events = self.tickets.discard(sorted(self.attached)[pick % len(self.attached)], wanted)
        self.discarded.update(wanted)
        self.hear(events)
        for slot in slots:
            self.generation[slot] += 1
            for reader in self.readers:
                if slot in reader.slots and not reader.over:
                    reader.discarded.add(slot)
        self.erases += self.tiers.take_erases()
        assert not {*wanted} & {*self.told["host"], *self.told["disk"]}

    @precondition(lambda self: self.erases)
    @rule(pick=picks)
    def erase(self, pick: int) -> None:
        record = self.erases.pop(pick % len(self.erases))
        self.disk_bytes.pop(record, None)
        self.tiers.erase_done(record)

    # --- time

    @precondition(lambda self: self.writers or self.readers)
    @rule(seconds=st.integers(1, 4), noticed=st.booleans())
    def wait(self, seconds: int, noticed: bool) -> None:
        self.now_s += seconds
        if not noticed:
            return
        self.expired(self.tickets.expire(self.now_s))
        assert all(store.deadline_s > self.now_s for store in self.tickets._stores.values())
        assert all(fetch.deadline_s > self.now_s for fetch in self.tickets._fetches.values())

    # --- the disk

    @precondition(lambda self: self.reads)
    @rule(pick=picks, refused=st.booleans())
    def read(self, pick: int, refused: bool) -> None:
        read = self.reads.pop(pick % len(self.reads))
        there = self.disk_bytes.get(read.record)
        outcome: ReadOutcome = "lost" if there is None or there.key != read.content.key else "ok"
        if refused:
            outcome = "failed"
        elif outcome == "ok":
            self.bytes[read.slot] = read.content.key
        advanced, events = self.tickets.read_done(read, outcome, self.now_s)
        self.hear(events)
        for one in advanced:
            self.advance(one)

    def advance(self, one: FetchProgress) -> None:
        (reader,) = [reader for reader in self.readers if (reader.owner, reader.ticket) == (one.owner, one.ticket)]
        assert not reader.over
        assert one.first == len(reader.slots), "out of order"
        self.readable(reader, one.slots)
        assert len(reader.slots) <= one.found <= len(reader.wanted)
        reader.over = one.found == 0

    @precondition(lambda self: self.tiers.statistics().spills_waiting)
    @rule(most=st.integers(1, 3), at_once=st.booleans())
    def spill(self, most: int, at_once: bool) -> None:
        spills, events = self.tiers.take_spills(most)
        assert len(spills) <= most
        self.hear(events)
        for spill in spills:
            assert all(spill.record != other.record for other in self.spills), "two writes to one record"
            assert all(spill.record != read.record for read in self.reads), "written while it is read"
            assert spill.record not in self.erases, "written while it is erased"
            self.disk_bytes.pop(spill.record, None)
            self.spills.append(spill)
            if at_once:
                self.spilled(len(self.spills) - 1, "ok")

    @precondition(lambda self: self.spills)
    @rule(pick=picks, outcome=st.sampled_from(get_args(WriteOutcome)))
    def spilled(self, pick: int, outcome: WriteOutcome) -> None:
        spill = self.spills.pop(pick % len(self.spills))
        assert self.bytes[spill.slot] == spill.content.key, "wrong bytes go to disk"
        if outcome == "ok":
            self.disk_bytes[spill.record] = spill.content
        self.hear(self.tiers.spill_done(spill, outcome))
        self.erases += self.tiers.take_erases()

    @precondition(lambda self: self.disk_bytes)
    @rule(pick=picks)
    def corrupt(self, pick: int) -> None:
        """Damage the record: its checksum will show it."""
        del self.disk_bytes[sorted(self.disk_bytes)[pick % len(self.disk_bytes)]]

    @precondition(lambda self: self.tiers.statistics().disk.withheld)
    @rule()
    def space(self) -> None:
        self.tiers.retry_space()

    @precondition(lambda self: not self.on or self.told["disk"] or self.reads or self.spills)
    @rule(replaced=st.booleans())
    def switch_disk(self, replaced: bool) -> None:
        if self.on:
            self.hear(self.tiers.disk_failed())
            if replaced:  # another directory: the same blocks elsewhere
                self.disk_bytes = {RECORDS - 1 - record: content for record, content in self.disk_bytes.items()}
        else:  # what was not erased yet is found again
            self.discarded -= {content.key for content in self.disk_bytes.values()}
            self.hear(
                self.tiers.disk_ready([FoundBlock(record, content) for record, content in self.disk_bytes.items()])
            )
        self.on = not self.on

    # --- the kvbm

    @precondition(lambda self: self.attached and any(self.told.values()))
    @rule(first=st.sampled_from((*OWNERS, None)))
    def kill(self, first: str | None) -> None:
        """Kill kvbm. The disk's threads end with it; workers go on writing to and reading from what they were
        granted."""
        self.reads, self.spills, self.erases = [], [], []
        for reader in self.readers:
            reader.over = True
        self.attached.clear()
        self.start(before=tuple(sorted(self.alive)))
        if first is not None:
            self.attach(first)

    # --- always

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        self.tickets.validate()
        for tier in ("host", "disk"):
            assert {content.key for content in self.tiers.snapshot(tier)} == self.told[tier].keys()
            digest = 0
            for key in self.told[tier]:
                digest ^= event_hash(key)
            assert digest == self.tiers.digest(tier)

    @invariant()
    def who_holds_a_slot_reads_its_block(self) -> None:
        for reader in self.readers:
            if not reader.over:
                for key, slot in zip(reader.wanted, reader.slots, strict=False):
                    assert self.bytes[slot] == key, "wrong bytes under a ticket"

    def teardown(self) -> None:
        """Let every engine die, and the disk end what it started: all slots are free or can be found."""
        for owner in OWNERS:
            self.forget(owner)
            self.tickets.owner_dead(owner)
        for read in self.reads:
            self.hear(self.tickets.read_done(read, "failed", self.now_s)[1])
        for spill in self.spills:
            self.hear(self.tiers.spill_done(spill, "failed"))
        for record in [*self.erases, *self.tiers.take_erases()]:
            self.tiers.erase_done(record)
        self.tickets.validate()
        counts = self.tickets.statistics()
        assert (counts.owners, counts.stores, counts.fetches, counts.expired, counts.awaited) == (0, 0, 0, 0, 0)
        host, disk = counts.tiers.host, counts.tiers.disk
        assert host.free + host.ready == host.capacity, "a slot has leaked"
        assert host.held == 0
        assert disk.writing + disk.reading + disk.erasing + host.leaving == 0
        assert not disk.on or disk.free + disk.withheld + disk.ready == disk.capacity, "a record has leaked"


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=60, stateful_step_count=30)


def disorder(machine: StoreMachine, draw: Random, steps: int) -> None:
    """Run a long life of one machine: everything happens, what is usual more often."""

    def number() -> int:
        return draw.randrange(100)

    def path() -> list[int]:
        return [draw.randrange(2) for _ in range(draw.randint(1, 3))]

    actions: list[tuple[int, Callable[[], object], Callable[[], None]]] = [
        (20, machine.free_owners, lambda: machine.store(number(), path(), draw.random() < 0.6)),
        (
            20,
            lambda: machine.free_owners() and any(machine.told.values()),
            lambda: machine.fetch_known(number(), number()),
        ),
        (5, machine.free_owners, lambda: machine.fetch_any(number(), path())),
        (8, machine.free_owners, lambda: machine.fetch_awaiting(number(), path())),
        (5, lambda: machine.free_owners() and machine.told["host"], lambda: machine.lend(number(), number())),
        (5, lambda: machine.writers, lambda: machine.write(number(), draw.random() < 0.5)),
        (8, lambda: machine.writers, lambda: machine.commit(number(), draw.randrange(4))),
        (2, lambda: machine.writers, lambda: machine.abort(number())),
        (15, lambda: machine.readers, lambda: machine.copy_and_release(number())),
        (2, lambda: machine.attached, lambda: machine.discard(number(), path())),
        (5, lambda: machine.erases, lambda: machine.erase(number())),
        (4, lambda: True, lambda: machine.wait(draw.randint(1, 3), draw.random() < 0.7)),
        (15, lambda: machine.reads, lambda: machine.read(number(), draw.random() < 0.2)),
        (15, lambda: machine.tiers.statistics().spills_waiting, lambda: machine.spill(2, draw.random() < 0.5)),
        (10, lambda: machine.spills, lambda: machine.spilled(number(), draw.choice(get_args(WriteOutcome)))),
        (2, lambda: machine.tiers.statistics().disk.withheld, machine.space),
        (1, lambda: machine.disk_bytes, lambda: machine.corrupt(number())),
        (1, lambda: True, lambda: machine.switch_disk(draw.random() < 0.3)),
        (2, lambda: not machine.on, lambda: machine.switch_disk(draw.random() < 0.3)),
        (1, lambda: machine.writers, lambda: machine.lose_lease(number())),
        (1, lambda: True, lambda: machine.die(draw.choice(OWNERS))),
        (1, lambda: True, lambda: machine.attach(draw.choice(OWNERS))),
        (5, lambda: len(machine.attached) < len(OWNERS), lambda: machine.attach(draw.choice(OWNERS))),
        (1, lambda: True, lambda: machine.kill(draw.choice(OWNERS))),
    ]
    for _ in range(steps):
        possible = [(weight, act) for weight, may, act in actions if may()]
        (chosen,) = draw.choices([act for _, act in possible], [weight for weight, _ in possible])
        chosen()
        machine.nothing_contradicts_itself()
        machine.who_holds_a_slot_reads_its_block()


@pytest.mark.parametrize("seed", range(30))
def test_a_long_life_of_disorder_never_brings_wrong_bytes_and_leaks_nothing(seed: int) -> None:
    machine = StoreMachine()
    disorder(machine, Random(seed), steps=300)
    machine.teardown()
