"""The index compared with a naive model: counted sets of hashes."""

from __future__ import annotations

import gc
import tracemalloc
from array import array
from collections import Counter, deque
from collections.abc import Callable
from itertools import takewhile
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.router.index.index import BLOCK_BYTES, HOLDERS_BYTES, RUN_BYTES, CandidateId, Index, Slot
from services.router.index.runs import RUN_BLOCKS
from shared.messages.select import Overlap

UNLIMITED = 1 << 40
DEVICE, HOST, DISK = 0, 1, 2


def test_a_chain_of_one_candidate_is_found_to_its_end() -> None:
    index = Index(limit_bytes=UNLIMITED)
    slot = index.open_slot(("a", 0))
    index.add_blocks(slot, DEVICE, [1, 2, 3])
    assert index.find([1, 2, 3, 4]) == {("a", 0): Overlap(3)}
    assert index.find([9, 1, 2]) == {}
    assert index.find([]) == {}


def test_each_block_counts_in_its_best_tier() -> None:
    index = Index(limit_bytes=UNLIMITED)
    a, b = index.open_slot(("a", 0)), index.open_slot(("b", 0))
    index.add_blocks(a, DEVICE, [1, 2])
    index.add_blocks(a, HOST, [2, 3, 4])
    index.add_blocks(a, DISK, [4, 5])
    index.add_blocks(b, DISK, [1])
    assert index.find([1, 2, 3, 4, 5, 6]) == {("a", 0): Overlap(2, 2, 1), ("b", 0): Overlap(0, 0, 1)}


def test_a_stores_blocks_count_for_its_heirs_and_the_store_is_not_found() -> None:
    index = Index(limit_bytes=UNLIMITED)
    a, b, alone, store = (index.open_slot((name, 0)) for name in ("a", "b", "alone", "k"))
    for name in "ab":
        index.set_store((name, 0), ("k", 0))
    index.add_blocks(a, DEVICE, [1, 2, 3])
    index.add_blocks(b, DISK, [1, 2])
    index.add_blocks(alone, DEVICE, [1])
    index.add_blocks(store, HOST, [2, 4, 5])
    index.add_blocks(store, DISK, [5, 6])
    asked = [1, 2, 3, 4, 5, 6, 7]
    found = {("a", 0): Overlap(3, 2, 1), ("b", 0): Overlap(0, 1, 1), ("alone", 0): Overlap(1)}
    assert index.find(asked) == found
    index.remove_blocks(a, DEVICE, [2])
    assert index.find(asked)["a", 0] == Overlap(2, 3, 1), "from the device to the store and back"
    index.set_store(("a", 0), None)
    assert index.find(asked)["a", 0] == Overlap(1)
    index.retire_slot(store)
    assert index.find(asked)["b", 0] == Overlap(0, 0, 2)
    index.add_blocks(index.open_slot(("k", 0)), HOST, [1, 2, 3])
    assert index.find(asked)["b", 0] == Overlap(0, 3)
    index.validate()


@given(
    held=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 30)), max_size=12),
    gone=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(1, 5)), max_size=4),
    length=st.integers(0, 40),
    start=st.integers(0, 40),
)
def test_what_stores_hold_in_memory_is_counted_from_anywhere_in_a_chain(
    held: list[tuple[int, int, int]], gone: list[tuple[int, int, int]], length: int, start: int
) -> None:
    chain = list(range(100, 140))
    index = Index(limit_bytes=1 << 20)
    slots = [index.open_slot((f"store {number}", 0)) for number in range(3)]
    mine: list[set[int]] = [set(), set(), set()]
    for number, first, count in held:
        new = [block for block in chain[first : first + count] if block not in mine[number]]
        for block in new:
            index.add_blocks(slots[number], 1, [block])
        mine[number].update(new)
    index.add_blocks(slots[0], 0, chain)  # what is on a device or on disk is not in memory
    index.add_blocks(slots[1], 2, chain)
    for number, first, count in gone:
        index.remove_blocks(slots[number], 1, chain[first : first + count])
        mine[number].difference_update(chain[first : first + count])
    asked = chain[:length]
    expected = {}
    for number in (0, 1):  # the third is not asked for
        row = list(takewhile(mine[number].__contains__, asked[start:]))
        if row:
            expected[f"store {number}", 0] = len(row)
    assert index.find_in_memory(asked, start, [slots[0].number, slots[1].number]) == expected


def test_a_block_removed_from_the_middle_ends_the_overlap_until_it_is_stored_again() -> None:
    index = Index(limit_bytes=UNLIMITED)
    slot = index.open_slot(("a", 0))
    chain = list(range(1, 101))
    index.add_blocks(slot, DEVICE, chain)
    index.remove_blocks(slot, DEVICE, [50])
    assert index.find(chain) == {("a", 0): Overlap(49)}
    index.add_blocks(slot, DEVICE, [50])
    assert index.find(chain) == {("a", 0): Overlap(100)}


def test_chains_that_end_anywhere_are_each_found_to_their_end() -> None:
    index = Index(limit_bytes=UNLIMITED)
    chain = list(range(1, 1025))
    lengths = (1, 31, 32, 33, RUN_BLOCKS - 1, RUN_BLOCKS, RUN_BLOCKS + 1, 1024)
    for length in lengths:
        index.add_blocks(index.open_slot((f"w{length}", 0)), DEVICE, chain[:length])
    index.validate()
    for asked in (1, 32, 200, 1024):
        found = {name: overlap.device for (name, _), overlap in index.find([*chain[:asked], -1]).items()}
        assert found == {f"w{length}": min(length, asked) for length in lengths}


def test_a_prompt_that_leaves_a_chain_overlaps_up_to_that_block() -> None:
    index = Index(limit_bytes=UNLIMITED)
    slot = index.open_slot(("a", 0))
    chain = list(range(1, 601))
    index.add_blocks(slot, DEVICE, chain)
    for shared in range(1, 601):
        other = [*chain[:shared], *range(1000, 1600 - shared)]
        assert index.find(other) == {("a", 0): Overlap(shared)}
    index.add_blocks(slot, DEVICE, [1000, 1001], 10)
    assert index.find([*chain[:10], 1000, 1001, 1002]) == {("a", 0): Overlap(12)}


def test_a_block_added_twice_is_gone_when_it_is_removed_twice() -> None:
    index = Index(limit_bytes=UNLIMITED)
    slot = index.open_slot(("a", 0))
    for _ in range(3):
        index.add_blocks(slot, DEVICE, [1])
    for _ in range(2):
        index.remove_blocks(slot, DEVICE, [1])
        assert index.find([1]) == {("a", 0): Overlap(1)}
    index.remove_blocks(slot, DEVICE, [1, 1])
    assert index.find([1]) == {}
    assert index.bytes == 0


def test_blocks_added_and_removed_one_by_one_stay_in_few_runs() -> None:
    index = Index(limit_bytes=UNLIMITED)
    a, b = index.open_slot(("a", 0)), index.open_slot(("b", 0))
    chain = list(range(1, 201))
    for slot in (a, b):
        for block in chain:
            index.add_blocks(slot, DEVICE, [block], block - 1 or None)
    assert index.statistics().runs == 1
    for block in reversed(chain[100:]):
        index.remove_blocks(b, DEVICE, [block])
        index.validate()
        assert index.statistics().runs <= 2
    assert index.find(chain) == {("a", 0): Overlap(200), ("b", 0): Overlap(100)}


def test_a_chain_with_a_forged_hash_that_repeats_does_no_harm() -> None:
    index = Index(limit_bytes=UNLIMITED)
    a, b = index.open_slot(("a", 0)), index.open_slot(("b", 0))
    for slot in (a, b):
        index.add_blocks(slot, DEVICE, [1, 2, 3, 2, 4, 1], 9)
        index.add_blocks(slot, DEVICE, [1, 2], 3)
        index.add_blocks(slot, HOST, [3, 1, 4], 2)
        index.validate()
    for slot in (a, b):
        index.remove_blocks(slot, DEVICE, [1, 2, 3, 2, 4, 1, 1, 2])
        index.remove_blocks(slot, HOST, [4, 3, 1])
        index.validate()
    assert index.bytes == 0


def test_a_retired_slot_is_not_found_and_its_number_is_used_again_once_it_is_empty() -> None:
    index = Index(limit_bytes=UNLIMITED)
    first = index.open_slot(("a", 0))
    index.add_blocks(first, DEVICE, [1, 2])
    index.retire_slot(first)
    second = index.open_slot(("a", 0))
    index.add_blocks(second, DEVICE, [1])
    assert index.find([1, 2]) == {("a", 0): Overlap(1)}
    index.remove_blocks(first, DEVICE, [1, 2])
    assert index.open_slot(("b", 0)).number == 0
    index.remove_blocks(first, DEVICE, [1, 2])  # the number of the freed slot is reused
    index.validate()


def test_at_the_limit_the_coldest_runs_are_dropped_and_touched_ones_stay() -> None:
    index = Index(limit_bytes=BLOCK_BYTES * 100 + RUN_BYTES * 10 + HOLDERS_BYTES)
    slot = index.open_slot(("a", 0))
    for start in range(0, 100, 10):
        index.add_blocks(slot, DEVICE, [*range(start, start + 10)])
    assert index.nearly_full
    index.touch([0, 1])
    index.add_blocks(slot, DEVICE, [*range(100, 150)])
    index.validate()
    assert index.find([0]) == {("a", 0): Overlap(1)}
    assert index.find([10]) == {}
    assert index.find(range(100, 151)) == {("a", 0): Overlap(50)}
    assert slot.dropped_blocks == index.statistics().dropped_blocks == 50


def test_blocks_dropped_at_the_limit_are_gone_for_all_holders_and_tiers_with_their_repeats() -> None:
    index = Index(limit_bytes=BLOCK_BYTES * 20)
    a, b = index.open_slot(("a", 0)), index.open_slot(("b", 0))
    for slot, tier in ((a, DEVICE), (a, HOST), (b, DEVICE), (b, DEVICE)):
        index.add_blocks(slot, tier, [1, 2, 3])
    index.add_blocks(a, DEVICE, [*range(100, 112)])
    index.validate()
    assert index.find([1, 2, 3]) == {}
    assert (a.dropped_blocks, b.dropped_blocks) == (6, 3)
    index.remove_blocks(b, DEVICE, [1, 2, 3])
    index.retire_slot(b)
    assert b.state == "freed"


def test_a_run_larger_than_the_limit_is_dropped() -> None:
    index = Index(limit_bytes=BLOCK_BYTES)
    index.add_blocks(index.open_slot(("a", 0)), DEVICE, [*range(100)])
    index.validate()
    assert index.bytes == 0


def traced(index: Index, fill: Callable[[Index], None]) -> int:
    """Return the bytes by which the index grew while it was filled or searched."""
    gc.collect()
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    fill(index)
    gc.collect()
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return after - before


def churned(index: Index) -> None:
    """Fill it with as many blocks per shard as make its dict largest, after each block was replaced a few times."""
    draw = Random(3)
    slot = index.open_slot(("a", 0))
    held: deque[array[int]] = deque()
    for _ in range(4 * 210):
        hashes = [draw.getrandbits(64) for _ in range(32)]
        index.add_blocks(slot, DEVICE, hashes)
        held.append(array("Q", hashes))
        if len(held) > 210:
            index.remove_blocks(slot, DEVICE, held.popleft())


def scattered(index: Index) -> None:
    """Give every block other holders out of a thousand."""
    draw = Random(4)
    slots = [index.open_slot((f"w{number}", 0)) for number in range(1000)]
    for block in range(2000):
        index.add_blocks(draw.choice(slots), DEVICE, [block])
        index.add_blocks(slots[-1], DEVICE, [block])
        index.add_blocks(draw.choice(slots), HOST, [block])


@pytest.mark.parametrize("fill", [churned, scattered])
def test_the_index_is_no_larger_than_its_estimate(fill: Callable[[Index], None]) -> None:
    index = Index(limit_bytes=UNLIMITED)
    assert traced(index, fill) < index.bytes


def test_the_memo_of_candidates_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.router.index.index._MEMO_LIMIT_BYTES", 100_000)
    index = Index(limit_bytes=UNLIMITED)
    slots = [index.open_slot((f"w{number}", 0)) for number in range(100)]
    draw = Random(6)
    for block in range(200):
        for slot in draw.sample(slots, 50):
            index.add_blocks(slot, DEVICE, [block])

    def ask(index: Index) -> None:
        for block in range(200):
            assert len(index.find([block])) == 50

    assert traced(index, ask) < 120_000
    index.validate()


def test_after_all_blocks_are_removed_their_memory_is_freed() -> None:
    def fill_and_empty(index: Index) -> None:
        slot = index.open_slot(("a", 0))
        index.add_blocks(slot, DEVICE, [*range(20_000)])
        index.remove_blocks(slot, DEVICE, range(20_000))

    index = Index(limit_bytes=UNLIMITED)
    assert traced(index, fill_and_empty) < 50_000
    index.validate()


def test_the_limit_holds_when_one_more_slot_makes_sets_of_holders_larger() -> None:
    index = Index(limit_bytes=100_000)
    slots = [index.open_slot((f"w{number}", 0)) for number in range(10)]
    for block in range(1000):
        index.add_blocks(slots[block % 10], DEVICE, [block])
        index.add_blocks(slots[block % 7], HOST, [block])
    for number in range(100):
        index.open_slot((f"more {number}", 0))
        index.validate()
    assert index.find([999])


TREE: dict[int, int] = {}
"""Block → its parent; 0 for none. Some chains are longer than others, so that prompts differ early and late."""
_draw = Random(5)
for _block in range(1, 61):
    TREE[_block] = _draw.choice([0, *range(1, _block)]) if _block % 3 == 0 else _block - 1


def path(block: int) -> list[int]:
    """The chain from its first block to this one."""
    found: list[int] = []
    while block:
        found.append(block)
        block = TREE[block]
    return found[::-1]


BLOCKS = st.sampled_from(sorted(TREE))
NAMES = ("a", "b", "c", "d")
STORES = ("k", "l")


class IndexMachine(RuleBasedStateMachine):
    """Random events on a small tree of blocks cut and join runs; the model holds counted sets."""

    def __init__(self) -> None:
        super().__init__()
        self.index = Index(limit_bytes=UNLIMITED)
        self.open: dict[str, Slot] = {}
        self.retired: list[Slot] = []
        self.held: dict[Slot, list[Counter[int]]] = {}
        self.stores: dict[str, str] = {}
        """Heir → store."""

    @rule(name=st.sampled_from(NAMES), store=st.sampled_from([*STORES, None]))
    def inherit(self, name: str, store: str | None) -> None:
        self.index.set_store((name, 0), None if store is None else (store, 0))
        self.stores.pop(name, None)
        if store is not None:
            self.stores[name] = store

    @rule(name=st.sampled_from(NAMES + STORES))
    def join(self, name: str) -> None:
        if name not in self.open:
            self.open[name] = self.index.open_slot((name, 0))
            self.held[self.open[name]] = [Counter(), Counter(), Counter()]

    @precondition(lambda self: self.open)
    @rule(
        number=st.integers(0, 5),
        tier=st.integers(0, 2),
        end=BLOCKS,
        skipped=st.integers(0, 20),
        with_parent=st.booleans(),
    )
    def store(self, number: int, tier: int, end: int, skipped: int, with_parent: bool) -> None:
        slot = self.open[sorted(self.open)[number % len(self.open)]]
        chain = path(end)[skipped:] or [end]
        self.index.add_blocks(slot, tier, chain, TREE[chain[0]] or None if with_parent else None)
        self.held[slot][tier].update(chain)

    @precondition(lambda self: self.held)
    @rule(
        number=st.integers(0, 50),
        tier=st.integers(0, 2),
        end=BLOCKS,
        most=st.integers(1, 20),
        others=st.lists(BLOCKS, max_size=5),
        backwards=st.booleans(),
    )
    def remove(self, number: int, tier: int, end: int, most: int, others: list[int], backwards: bool) -> None:
        slot = list(self.held)[number % len(self.held)]
        hashes = path(end)[-most:][:: -1 if backwards else 1] + others
        self.index.remove_blocks(slot, tier, hashes)
        for block in hashes:
            if self.held[slot][tier][block]:
                self.held[slot][tier][block] -= 1
            if not self.held[slot][tier][block]:
                del self.held[slot][tier][block]

    @rule(end=BLOCKS)
    def touch(self, end: int) -> None:
        self.index.touch(path(end))

    @precondition(lambda self: self.open)
    @rule(number=st.integers(0, 5))
    def retire(self, number: int) -> None:
        name = sorted(self.open)[number % len(self.open)]
        slot = self.open.pop(name)
        self.index.retire_slot(slot)
        self.retired.append(slot)

    @precondition(lambda self: self.retired)
    @rule()
    def purge(self) -> None:
        slot = self.retired.pop()
        for tier, counts in enumerate(self.held.pop(slot)):
            self.index.remove_blocks(slot, tier, list(counts.elements()))
        assert slot.state == "freed"

    @rule(end=BLOCKS, strange=st.integers(0, 2))
    def ask(self, end: int, strange: int) -> None:
        hashes = path(end) + [-1, -2][:strange]
        expected: dict[CandidateId, Overlap] = {}
        for name, slot in self.open.items():
            if name in self.stores.values():
                continue
            tiers = [0, 0, 0]
            store = self.open.get(self.stores.get(name, ""), slot)
            for block in hashes:
                holding = [self.held[slot], [Counter[int](), *self.held[store][1:]]]
                best = next((tier for tier in range(3) if any(counts[tier][block] for counts in holding)), None)
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
                self.index.remove_blocks(slot, tier, list(counts.elements()))
        assert self.index.bytes == 0, "removal frees everything"


TestIndex = IndexMachine.TestCase
TestIndex.settings = settings(max_examples=80, stateful_step_count=40)
