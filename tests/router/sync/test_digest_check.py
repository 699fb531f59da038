"""Digests are compared at one sequence; a worker with wrong events is detected by them and corrected."""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce
from operator import xor

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.index.chains import Chains, SlotCleanup
from services.router.index.index import Index
from services.router.index.kv_events import CacheEvent, DecodedBatch, RemovedEvent, StoredEvent, shortened
from services.router.sync.digest_check import CLAIMS_LIMIT, STATES_LIMIT, DigestCheck, DigestResult
from services.router.sync.source import Action, ApplyBatch, ClearBlocks, RequestReplay, RequestSnapshot, SourceSync
from shared.hashing import content_keys, event_hash, pack_tokens, root_key, sequence_hashes
from shared.messages.kv_events import SnapshotBlock
from shared.messages.load import KvState
from shared.messages.select import Overlap

BLOCK_SIZE = 2
RANKS = 2


def test_a_reported_and_an_applied_digest_are_compared_whichever_comes_first() -> None:
    check = DigestCheck(every_s=60.0)
    assert check.add_source_digest(1, 5, (77,), 0.0) is None
    assert check.open
    assert check.add_chains_digest(1, 4, (11,)) is None
    assert check.add_chains_digest(1, 5, (77,)) == "agreed"
    assert not check.open
    assert check.add_source_digest(1, 6, (78,), 60.0) is None
    assert check.add_chains_digest(1, 8, (80,)) is None
    assert check.add_source_digest(1, 8, (81,), 60.25) == "differed"


def test_digests_of_another_sequence_or_another_epoch_are_not_compared() -> None:
    check = DigestCheck(every_s=60.0)
    assert check.add_source_digest(1, 5, (77,), 0.0) is None
    assert check.add_chains_digest(2, 5, (11,)) is None
    assert check.add_chains_digest(1, 6, (11,)) is None
    assert check.add_chains_digest(None, 5, (11,)) is None
    assert check.open


def test_chains_that_left_blocks_out_are_exempt() -> None:
    check = DigestCheck(every_s=60.0)
    check.add_source_digest(1, 5, (77,), 0.0)
    assert check.add_chains_digest(1, 5, None) == "exempt"


def test_comparisons_keep_their_interval_and_can_be_disabled() -> None:
    check = DigestCheck(every_s=60.0)
    check.add_source_digest(1, 5, (77,), 0.0)
    check.add_chains_digest(1, 5, (77,))
    check.add_source_digest(1, 6, (78,), 59.0)
    assert not check.open
    check.add_source_digest(1, 6, (78,), 60.0)
    assert check.open
    never = DigestCheck(every_s=0.0)
    never.add_source_digest(1, 5, (77,), 1000.0)
    assert not never.open


def test_kept_digests_are_bounded_and_the_oldest_is_dropped() -> None:
    check = DigestCheck(every_s=60.0)
    for sequence in range(2 * CLAIMS_LIMIT):
        check.add_source_digest(1, 1000 + sequence, (0,), 0.0)
        check.validate()
    for sequence in range(2 * STATES_LIMIT):
        assert check.add_chains_digest(1, sequence, (0,)) is None
        check.validate()
    assert check.add_source_digest(1, STATES_LIMIT - 1, (0,), 0.0) is None, "too late"
    assert check.add_source_digest(1, STATES_LIMIT, (0,), 0.0) == "agreed"


def test_states_from_before_a_clear_are_not_compared() -> None:
    check = DigestCheck(every_s=60.0)
    check.add_source_digest(1, 9, (0,), 0.0)
    check.add_chains_digest(1, 5, (11,))
    check.chains_cleared()
    assert check.add_source_digest(1, 5, (12,), 0.1) is None


@dataclass
class RankCache:
    """The blocks of one rank of the model worker: prompts of 1 to 4 blocks, each with one of two contents."""

    blocks: dict[int, SnapshotBlock]

    @property
    def digest(self) -> int:
        return reduce(xor, self.blocks, 0)


def prompt(choices: list[bool]) -> tuple[bytes, list[int]]:
    """Return (packed tokens, engine hashes); prompts with the same beginning share blocks."""
    packed = pack_tokens([int(choice) + 1 for choice in choices for _ in range(BLOCK_SIZE)])
    return packed, shortened(map(event_hash, content_keys(root_key("m"), packed, BLOCK_SIZE)))


PROMPTS = st.lists(st.booleans(), min_size=1, max_size=4)
RANK = st.integers(0, RANKS - 1)


class HealingMachine(RuleBasedStateMachine):
    """A worker of two ranks and a router that carries out the actions of `SourceSync` and `DigestCheck`. The connection
    loses, repeats and delays batches, and some events are wrong. Once the worker is quiet, the router has its blocks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(limit_bytes=1 << 20)
        self.chains = [
            Chains(
                self.index,
                ("w", rank),
                block_size=BLOCK_SIZE,
                vocab_size=10,
                limit_blocks=1000,
                orphan_limit_blocks=1000,
            )
            for rank in range(RANKS)
        ]
        self.checks = [DigestCheck(every_s=60.0) for _ in range(RANKS)]
        self.source = SourceSync(snapshots=True, replays=True, epochs=True, held_limit_batches=4)
        self.caches = [RankCache({}) for _ in range(RANKS)]
        self.epoch = 1
        self.sequence = -1
        self.ring: list[tuple[int, DecodedBatch]] = []
        self.wire: list[tuple[int, DecodedBatch]] = []
        self.request: RequestSnapshot | RequestReplay | None = None
        self.restored: dict[int, int] = {}
        self.now_s = 0.0
        self.results: list[DigestResult] = []
        self.cleanups: list[SlotCleanup] = []
        self.perform(self.source.start())

    # --- the router

    def perform(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case ClearBlocks():
                    for chains, check in zip(self.chains, self.checks, strict=True):
                        self.cleanups.append(chains.clear())
                        check.chains_cleared()
                case ApplyBatch(batch):
                    for event in batch.events:
                        self.chains[batch.rank].apply(event)
                case RequestSnapshot() | RequestReplay():
                    self.request = action
                    self.restored = {}
        for rank, check in enumerate(self.checks):
            as_of = self.source.sequence_of(rank) if check.open else None
            if as_of is not None:
                self.judge(check.add_chains_digest(self.source.epoch, as_of, (self.chains[rank].digest(0),)))

    def judge(self, result: DigestResult | None) -> None:
        if result is not None:
            self.results.append(result)
        if result == "differed":
            self.perform(self.source.digest_differed())

    # --- the worker

    def tell(self, rank: int, events: list[CacheEvent], fault: str) -> None:
        """Send the events as a batch; with a `fault` the worker sends something else."""
        match fault:
            case "forgets":
                events = []
            case "repeats":
                events = events + events
            case "corrupts":
                events = [self.corrupted(event) for event in events]
        self.sequence += 1
        entry = self.sequence, DecodedBatch(1000.0 * self.epoch + self.sequence, rank, events, 0)
        self.ring = [*self.ring[-3:], entry]
        self.wire.append(entry)

    def corrupted(self, event: CacheEvent) -> CacheEvent:
        if isinstance(event, RemovedEvent):
            return RemovedEvent([99], event.tier, event.group)
        assert isinstance(event, StoredEvent)
        return stored(event.parent if isinstance(event.parent, int) else None, [98], event.tokens[: 4 * BLOCK_SIZE])

    @rule(rank=RANK, choices=PROMPTS, fault=st.sampled_from([*["none"] * 5, "forgets", "repeats", "corrupts"]))
    def store(self, rank: int, choices: list[bool], fault: str) -> None:
        packed, names = prompt(choices)
        held = self.caches[rank].blocks
        events: list[CacheEvent] = []
        for number, name in enumerate(names):
            if name not in held:
                tokens = packed[4 * BLOCK_SIZE * number : 4 * BLOCK_SIZE * (number + 1)]
                parent = names[number - 1] if number else None
                held[name] = SnapshotBlock(name, parent, tokens)
                events.append(stored(parent, [name], tokens))
        if events:
            self.tell(rank, events, fault)

    @rule(rank=RANK, which=st.integers(0, 30), fault=st.sampled_from([*["none"] * 5, "forgets", "repeats", "corrupts"]))
    def evict(self, rank: int, which: int, fault: str) -> None:
        """Evict any block, also in the middle of its chain."""
        held = self.caches[rank].blocks
        if held:
            name = list(held)[which % len(held)]
            del held[name]
            self.tell(rank, [RemovedEvent([name], 0, None)], fault)

    @rule()
    def restart(self) -> None:
        for cache in self.caches:
            cache.blocks.clear()
        self.epoch += 1
        self.sequence = -1
        self.ring.clear()

    # --- the connection

    @rule()
    def deliver(self) -> None:
        if self.wire:
            self.perform(self.source.batch_received(*self.wire.pop(0)))

    @rule()
    def deliver_twice(self) -> None:
        if self.wire:
            self.perform(self.source.batch_received(*self.wire[0]))
            self.deliver()

    @rule()
    def deliver_out_of_order(self) -> None:
        if len(self.wire) > 1:
            self.perform(self.source.batch_received(*self.wire.pop(1)))

    @rule()
    def lose(self) -> None:
        if self.wire:
            self.wire.pop(0)

    @rule(pause_s=st.sampled_from([0.25, 61.0]))
    def report(self, pause_s: float) -> None:
        self.now_s += pause_s
        states = [KvState(rank, self.epoch, self.sequence, cache.digest) for rank, cache in enumerate(self.caches)]
        self.perform(self.source.report_received(states[0]))
        for state in states:
            self.judge(
                self.checks[state.rank].add_source_digest(state.epoch, state.sequence, (state.digest,), self.now_s)
            )
        self.perform([])

    @rule()
    def fail(self) -> None:
        if self.request is not None:
            request, self.request = self.request, None
            self.perform(self.source.request_failed(request.ticket))

    @rule()
    def answer(self) -> None:
        """Answer a replay at once, and snapshots one rank at a time, so that batches come in between."""
        request = self.request
        if isinstance(request, RequestReplay):
            self.request = None
            self.perform(
                self.source.replay_received(request.ticket, [entry for entry in self.ring if entry[0] >= request.first])
            )
        elif request is not None:
            rank = len(self.restored)
            if not rank:
                self.asked_epoch = self.epoch
                self.perform(self.source.snapshot_started(request.ticket))
            if self.asked_epoch != self.epoch:
                self.fail()
                return
            self.chains[rank].restore_snapshot(list(self.caches[rank].blocks.values()))
            self.restored[rank] = self.sequence
            if len(self.restored) == RANKS:
                self.request = None
                self.perform(self.source.snapshot_restored(request.ticket, self.epoch, self.restored))

    # --- invariants

    @invariant()
    def every_part_is_sound(self) -> None:
        self.source.validate()
        for check in self.checks:
            check.validate()
        for chains in self.chains:
            chains.validate()

    def teardown(self) -> None:
        for _ in range(20):
            while self.wire:
                self.deliver()
            self.report(61.0)
            while self.request is not None:
                self.answer()
        assert self.source.state == "live"
        assert self.results[-RANKS:] == ["agreed"] * RANKS
        for rank, (chains, cache) in enumerate(zip(self.chains, self.caches, strict=True)):
            assert chains.blocks_in(0).keys() | waiting(chains) == cache.blocks.keys()
            for choices in ([True] * 4, [False] * 4, [True, False, True, False]):
                packed, names = prompt(choices)
                depth = next((depth for depth, name in enumerate(names) if name not in cache.blocks), len(names))
                found = self.index.find(sequence_hashes(packed, BLOCK_SIZE)).get(("w", rank), Overlap())
                assert found.blocks == depth


def stored(parent: int | None, names: list[int], tokens: bytes) -> StoredEvent:
    return StoredEvent([*names], parent, tokens, BLOCK_SIZE, 0, None, False, "", "", len(names))


def waiting(chains: Chains) -> set[int]:
    """Blocks that wait for a parent that is gone."""
    return {name for _, name in chains._runs_parked_with if isinstance(name, int)}


TestHealing = HealingMachine.TestCase
TestHealing.settings = settings(max_examples=150, stateful_step_count=40)
