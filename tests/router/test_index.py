"""The index against a naive model: sets of hashes, counted."""

from __future__ import annotations

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.index import BLOCK_BYTES, HOLDERS_BYTES, CandidateId, Index, Slot
from shared.messages import Overlap

UNLIMITED = 1 << 40
DEVICE, HOST, DISK = 0, 1, 2


def test_a_chain_held_by_one_is_found_to_its_end() -> None:
    index = Index(limit_bytes=UNLIMITED)
    slot = index.open(("a", 0))
    index.stored(slot, DEVICE, [1, 2, 3])
    assert index.find([1, 2, 3, 4]) == {("a", 0): Overlap(3)}
    assert index.find([9, 1, 2]) == {}
    assert index.find([]) == {}


def test_each_block_counts_in_its_best_tier() -> None:
    index = Index(limit_bytes=UNLIMITED)
    a, b = index.open(("a", 0)), index.open(("b", 0))
    index.stored(a, DEVICE, [1, 2])
    index.stored(a, HOST, [2, 3, 4])
    index.stored(a, DISK, [4, 5])
    index.stored(b, DISK, [1])
    assert index.find([1, 2, 3, 4, 5, 6]) == {("a", 0): Overlap(2, 2, 1), ("b", 0): Overlap(0, 0, 1)}


def test_a_block_that_leaves_the_middle_ends_the_chain_and_rejoins_it_when_it_is_back() -> None:
    index = Index(limit_bytes=UNLIMITED)
    slot = index.open(("a", 0))
    chain = list(range(1, 101))
    index.stored(slot, DEVICE, chain)
    index.removed(slot, DEVICE, [50])
    assert index.find(chain) == {("a", 0): Overlap(49)}
    index.stored(slot, DEVICE, [50])
    assert index.find(chain) == {("a", 0): Overlap(100)}


def test_chains_that_end_in_different_chunks_are_each_found_to_their_end() -> None:
    index = Index(limit_bytes=UNLIMITED)
    chain = list(range(1, 1025))
    for length in (1, 31, 32, 33, 64, 500, 1024):
        index.stored(index.open((f"w{length}", 0)), DEVICE, chain[:length])
    assert {name: overlap.device for (name, _), overlap in index.find(chain).items()} == {
        f"w{length}": length for length in (1, 31, 32, 33, 64, 500, 1024)
    }


def test_what_is_stored_twice_is_gone_when_it_is_removed_twice() -> None:
    index = Index(limit_bytes=UNLIMITED)
    slot = index.open(("a", 0))
    index.stored(slot, DEVICE, [1, 1])
    index.stored(slot, DEVICE, [1])
    for _ in range(2):
        index.removed(slot, DEVICE, [1])
        assert index.find([1]) == {("a", 0): Overlap(1)}
    index.removed(slot, DEVICE, [1, 1])
    assert index.find([1]) == {}
    assert index.bytes == 0


def test_a_retired_slot_is_not_found_and_its_number_is_used_again_once_it_is_empty() -> None:
    index = Index(limit_bytes=UNLIMITED)
    first = index.open(("a", 0))
    index.stored(first, DEVICE, [1, 2])
    index.retire(first)
    second = index.open(("a", 0))
    index.stored(second, DEVICE, [1])
    assert index.find([1, 2]) == {("a", 0): Overlap(1)}
    index.removed(first, DEVICE, [1, 2])
    assert index.open(("b", 0)).number == 0
    index.removed(first, DEVICE, [1, 2])  # the freed slot's number is another's now
    index.validate()


def test_at_the_limit_the_coldest_blocks_go_and_touched_ones_stay() -> None:
    index = Index(limit_bytes=BLOCK_BYTES * 100 + HOLDERS_BYTES)
    slot = index.open(("a", 0))
    index.stored(slot, DEVICE, range(100))
    assert index.crowded
    index.touch(range(10))
    index.stored(slot, DEVICE, range(100, 150))
    index.validate()
    assert index.find([5]) == {("a", 0): Overlap(1)}
    assert index.find([15]) == {}
    assert index.find([149]) == {("a", 0): Overlap(1)}
    assert slot.dropped_blocks == index.statistics().dropped_blocks == 50


HASHES = st.lists(st.integers(0, 40), max_size=12)
NAMES = ("a", "b", "c", "d")


class IndexMachine(RuleBasedStateMachine):
    """Random events on few hashes, so that sets split and merge; the model holds counted sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(limit_bytes=UNLIMITED)
        self.open: dict[str, Slot] = {}
        self.retired: list[Slot] = []
        self.held: dict[Slot, list[Counter[int]]] = {}

    @rule(name=st.sampled_from(NAMES))
    def join(self, name: str) -> None:
        if name not in self.open:
            self.open[name] = self.index.open((name, 0))
            self.held[self.open[name]] = [Counter(), Counter(), Counter()]

    @precondition(lambda self: self.open)
    @rule(pick=st.randoms(use_true_random=False), tier=st.integers(0, 2), hashes=HASHES)
    def store(self, pick: object, tier: int, hashes: list[int]) -> None:
        slot = self.open[pick.choice(sorted(self.open))]  # type: ignore[attr-defined]
        self.index.stored(slot, tier, hashes)
        self.held[slot][tier].update(hashes)

    @precondition(lambda self: self.held)
    @rule(number=st.integers(0, 50), tier=st.integers(0, 2), hashes=HASHES)
    def remove(self, number: int, tier: int, hashes: list[int]) -> None:
        slot = list(self.held)[number % len(self.held)]
        self.index.removed(slot, tier, hashes)
        for block in hashes:
            if self.held[slot][tier][block]:
                self.held[slot][tier][block] -= 1
            if not self.held[slot][tier][block]:
                del self.held[slot][tier][block]

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 3))
    def retire(self, number: int) -> None:
        name = sorted(self.open)[number % len(self.open)]
        slot = self.open.pop(name)
        self.index.retire(slot)
        self.retired.append(slot)

    @precondition(lambda self: self.retired)
    @rule()
    def purge(self) -> None:
        slot = self.retired.pop()
        for tier, counts in enumerate(self.held.pop(slot)):
            self.index.removed(slot, tier, list(counts.elements()))
        assert slot.state == "freed"

    @rule(hashes=st.lists(st.integers(0, 40), unique=True, max_size=40))
    def ask(self, hashes: list[int]) -> None:
        expected: dict[CandidateId, Overlap] = {}
        for slot in self.open.values():
            tiers = [0, 0, 0]
            for block in hashes:
                best = next((tier for tier in range(3) if self.held[slot][tier][block]), None)
                if best is None:
                    break
                tiers[best] += 1
            if sum(tiers):
                expected[slot.candidate] = Overlap(*tiers)
        assert self.index.find(hashes) == expected

    @invariant()
    def valid(self) -> None:
        self.index.validate()

    def teardown(self) -> None:
        for slot, tiers in self.held.items():
            for tier, counts in enumerate(tiers):
                self.index.removed(slot, tier, list(counts.elements()))
        assert self.index.bytes == 0, "removal leaves nothing behind"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
