"""Two workers and the store they are attached to: the blocks that each can get, compared with sets of blocks."""

from __future__ import annotations

from collections import deque

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.router.index.chains import Chains
from services.router.index.index import Index
from services.router.index.kv_events import CacheEvent, RemovedEvent, StoredEvent
from shared.hashing import content_keys, event_hash, pack_tokens, root_key, sequence_hashes
from shared.messages.select import Overlap

DEVICE, HOST, DISK = 0, 1, 2
STORE = "k/l"
TREE = {1: 0, 2: 1, 3: 2, 4: 3, 5: 2, 6: 5, 7: 0, 8: 7}
"""Block → its parent; 0 for none."""


def path(block: int) -> list[int]:
    found: list[int] = []
    while block:
        found.insert(0, block)
        block = TREE[block]
    return found


def name(block: int) -> int:
    return event_hash(content_keys(root_key("m"), pack_tokens(path(block)), 1)[-1])


def stored(block: int, tier: int) -> StoredEvent:
    parent = name(TREE[block]) if TREE[block] else None
    return StoredEvent([name(block)], parent, pack_tokens([block]), 1, tier, None, False, "", "", 1)


def removed(block: int, tier: int) -> RemovedEvent:
    return RemovedEvent([name(block)], tier, None)


def chains_of(index: Index, candidate: str) -> Chains:
    return Chains(index, (candidate, 0), block_size=1, vocab_size=100, limit_blocks=100, orphan_limit_blocks=100)


def found(index: Index, candidate: str, block: int) -> Overlap:
    hashes = sequence_hashes(pack_tokens(path(block)), 1)
    return index.find(hashes).get((candidate, 0), Overlap())


def test_a_stores_block_whose_parent_only_a_worker_has_is_found_after_it_in_either_order_of_events() -> None:
    for store_first in (True, False):
        index = Index(limit_bytes=1 << 30)
        worker, store = chains_of(index, "a"), chains_of(index, STORE)
        index.set_store(("a", 0), (STORE, 0))
        worker.link_store(store)
        ordered: list[tuple[Chains, CacheEvent]] = [(store, stored(2, HOST)), (worker, stored(1, DEVICE))]
        for chains, event in ordered if store_first else ordered[::-1]:
            chains.apply(event)
        assert found(index, "a", 2) == Overlap(1, 1)
        assert store.orphan_blocks == 0
        assert store.digest(HOST) == name(2)
        for chains in (worker, store):
            chains.validate()


def test_a_worker_that_attaches_supplies_the_parents_that_a_store_waits_for() -> None:
    index = Index(limit_bytes=1 << 30)
    worker, store = chains_of(index, "a"), chains_of(index, STORE)
    worker.apply(stored(1, DEVICE))
    store.apply(stored(3, DISK))
    store.apply(stored(2, HOST))
    store.apply(removed(3, DISK))
    assert store.orphan_blocks == 1
    index.set_store(("a", 0), (STORE, 0))
    worker.link_store(store)
    assert found(index, "a", 3) == Overlap(1, 1), "a block removed while it waited is gone"
    worker.link_store(None)
    store.apply(stored(8, HOST))
    worker.apply(stored(7, DEVICE))
    assert store.orphan_blocks == 1, "it is the worker's store no longer"


class ChainsOfStoresMachine(RuleBasedStateMachine):
    """Workers offer their blocks to the store, which drops any of them. The events of each source come in order, but
    those of one source may overtake another's. A device evicts the end of a prefix before its beginning."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(limit_bytes=1 << 30)
        self.chains = {each: chains_of(self.index, each) for each in ("a", "b", STORE)}
        for worker in "ab":
            self.index.set_store((worker, 0), (STORE, 0))
            self.chains[worker].link_store(self.chains[STORE])
        self.devices: dict[str, set[int]] = {"a": set(), "b": set()}
        self.lower: dict[int, set[int]] = {HOST: set(), DISK: set()}
        self.wires: dict[str, deque[CacheEvent]] = {each: deque() for each in self.chains}

    @rule(worker=st.sampled_from("ab"), end=st.sampled_from(sorted(TREE)))
    def compute(self, worker: str, end: int) -> None:
        for block in path(end):
            if block not in self.devices[worker]:
                self.devices[worker].add(block)
                self.wires[worker].append(stored(block, DEVICE))

    @rule(worker=st.sampled_from("ab"), block=st.sampled_from(sorted(TREE)))
    def evict(self, worker: str, block: int) -> None:
        held = self.devices[worker]
        if block in held and not any(TREE[child] == block for child in held):
            held.remove(block)
            self.wires[worker].append(removed(block, DEVICE))

    @rule(block=st.sampled_from(sorted(TREE)), tier=st.sampled_from([HOST, DISK]))
    def offer(self, block: int, tier: int) -> None:
        if block in self.devices["a"] | self.devices["b"] and block not in self.lower[tier]:
            self.lower[tier].add(block)
            self.wires[STORE].append(stored(block, tier))

    @rule(block=st.sampled_from(sorted(TREE)), tier=st.sampled_from([HOST, DISK]))
    def drop(self, block: int, tier: int) -> None:
        if block in self.lower[tier]:
            self.lower[tier].remove(block)
            self.wires[STORE].append(removed(block, tier))

    @rule(source=st.sampled_from(["a", "b", STORE]), events=st.integers(1, 5))
    def deliver(self, source: str, events: int) -> None:
        wire = self.wires[source]
        for _ in range(min(events, len(wire))):
            self.chains[source].apply(wire.popleft())

    @rule()
    def settle(self) -> None:
        for source, wire in self.wires.items():
            self.deliver(source, len(wire))
        for worker, held in self.devices.items():
            for end in TREE:
                tiers = [0, 0, 0]
                for block in path(end):
                    best = [tier for tier in range(3) if block in {DEVICE: held, **self.lower}[tier]]
                    if not best:
                        break
                    tiers[best[0]] += 1
                assert found(self.index, worker, end) == Overlap(*tiers)

    @invariant()
    def valid(self) -> None:
        self.index.validate()
        for chains in self.chains.values():
            chains.validate()

    def teardown(self) -> None:
        self.settle()


TestStore = ChainsOfStoresMachine.TestCase
TestStore.settings = settings(max_examples=60, stateful_step_count=40)
