from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, precondition, rule

from shared.blocks import BlockPool, Content, ContentEvicted, ContentStored, PoolEvent
from shared.hashing import ContentKey, content_key, event_hash, pack_tokens, root_key

ROOT = root_key("model")


def chain(*first_tokens: int) -> list[Content]:
    """Blocks of one token that follow one another."""
    contents: list[Content] = []
    parent: ContentKey | None = None
    for token in first_tokens:
        packed = pack_tokens([token])
        key = content_key(parent or ROOT, packed)
        contents.append(Content(key=key, parent=parent, tokens=packed))
        parent = key
    return contents


def fill(pool: BlockPool, contents: list[Content]) -> list[int]:
    slots, _ = pool.allocate(len(contents))
    return [pool.store(slot, content)[0] for slot, content in zip(slots, contents, strict=True)]


def release(pool: BlockPool, slots: list[int]) -> None:
    for slot in reversed(slots):
        pool.release(slot)


def test_a_released_keyed_block_stays_findable_until_its_room_is_needed() -> None:
    pool = BlockPool(2)
    (content,) = chain(1)
    release(pool, fill(pool, [content]))
    assert content.key in pool
    assert pool.available == 2
    _, evicted = pool.allocate(2)
    assert evicted == [ContentEvicted(content)]
    assert content.key not in pool


def test_free_slots_are_given_before_cached_ones_are_evicted() -> None:
    pool = BlockPool(3)
    release(pool, fill(pool, chain(1)))
    _, evicted = pool.allocate(2)
    assert evicted == []


def test_the_last_block_of_a_chain_is_evicted_first() -> None:
    pool = BlockPool(3)
    contents = chain(1, 2, 3)
    release(pool, fill(pool, contents))
    _, evicted = pool.allocate(3)
    assert evicted == [ContentEvicted(content) for content in reversed(contents)]


def test_a_block_used_again_outlives_one_that_was_not() -> None:
    pool = BlockPool(2)
    first, second = chain(1)[0], chain(2)[0]
    release(pool, fill(pool, [first]))
    release(pool, fill(pool, [second]))
    pool.release(pool.acquire(first.key))
    _, evicted = pool.allocate(1)
    assert evicted == [ContentEvicted(second)]


def test_the_same_content_stored_twice_is_kept_once_and_reported_once() -> None:
    pool = BlockPool(4)
    (content,) = chain(1)
    (first,) = fill(pool, [content])
    (blank,), _ = pool.allocate(1)
    slot, events = pool.store(blank, content)
    assert (slot, events) == (first, [])
    assert pool.statistics().held == 1
    pool.release(first)
    assert pool.state(first) == "held"
    pool.release(first)
    assert pool.state(first) == "cached"


def test_a_blank_block_goes_back_to_free() -> None:
    pool = BlockPool(1)
    (slot,), _ = pool.allocate(1)
    pool.release(slot)
    assert pool.state(slot) == "free"


def test_a_copy_keeps_a_block_whose_sequence_has_ended() -> None:
    pool = BlockPool(1)
    (content,) = chain(1)
    (slot,) = fill(pool, [content])
    pool.hold_for_copy(slot)
    pool.release(slot)
    assert pool.available == 0
    pool.release_copies([slot])
    assert pool.state(slot) == "cached"


def test_a_block_that_was_only_copied_is_evicted_when_it_would_have_been() -> None:
    pool = BlockPool(4)
    first, second = chain(1, 2), chain(3, 4)
    release(pool, fill(pool, first))
    release(pool, fill(pool, second))
    assert pool.next_evicted(0) == []
    order = pool.next_evicted(4)
    assert [pool.content(slot) for slot in order] == [*reversed(first), *reversed(second)]
    parents_first = [order[1], order[0]]
    for slot in parents_first:
        pool.hold_for_copy(slot)
    assert pool.next_evicted(4) == order[2:]
    pool.release_copies(parents_first)
    assert pool.next_evicted(4) == order


@pytest.mark.parametrize("copied", [[0], [1], [0, 1], [1, 0]])
def test_blocks_that_were_just_used_and_then_copied_are_not_evicted_before_older_ones(copied: list[int]) -> None:
    pool = BlockPool(4)
    release(pool, fill(pool, chain(1, 2)))
    slots = fill(pool, chain(3, 4))
    release(pool, slots)
    order = pool.next_evicted(4)
    for index in copied:
        pool.hold_for_copy(slots[index])
    pool.release_copies([slots[index] for index in copied])
    assert pool.next_evicted(4) == order
    assert order[2:] == [slots[1], slots[0]], "a child leaves before its parent"


def test_a_block_that_is_copied_is_passed_over_and_leaves_next() -> None:
    pool = BlockPool(2)
    slots = fill(pool, chain(1, 2))
    release(pool, slots)
    pool.hold_for_copy(slots[1])
    assert pool.available == 1
    (taken,), _ = pool.allocate(1)
    assert taken == slots[0]
    pool.release_copies([slots[1]])
    assert pool.next_evicted(1) == [slots[1]]


def test_a_block_that_was_used_while_it_was_copied_stays_as_long_as_any_other() -> None:
    pool = BlockPool(4)
    contents = chain(1, 2)
    slots = fill(pool, contents)
    release(pool, slots)
    for slot in slots:
        pool.hold_for_copy(slot)
    release(pool, [pool.acquire(content.key) for content in contents])
    release(pool, fill(pool, chain(3)))
    pool.release_copies(slots)
    assert pool.next_evicted(4)[:2] == list(reversed(slots)), "and its child leaves before it"


def test_two_copies_of_one_block_are_two_holds() -> None:
    pool = BlockPool(1)
    (slot,) = fill(pool, chain(1))
    pool.hold_for_copy(slot)
    pool.release(slot)
    pool.hold_for_copy(slot)
    pool.release_copies([slot])
    assert pool.available == 0
    pool.release_copies([slot])
    assert pool.available == 1


def test_a_loading_block_is_found_only_when_its_copy_has_ended() -> None:
    pool = BlockPool(1)
    (content,) = chain(1)
    (slot,), _ = pool.begin_load(1)
    assert pool.state(slot) == "loading"
    assert pool.longest_prefix([content.key]) == 0
    assert pool.end_loads([slot], [content]) == ([slot], [ContentStored(content)])
    assert pool.longest_prefix([content.key]) == 1


def test_a_loading_block_given_up_by_its_sequence_is_not_reused_while_the_copy_writes() -> None:
    pool = BlockPool(1)
    (slot,), _ = pool.begin_load(1)
    pool.release(slot)
    assert pool.available == 0
    pool.end_loads([slot], [])
    assert pool.state(slot) == "free"


def test_of_blocks_that_were_loaded_together_those_before_the_first_failed_copy_are_found() -> None:
    pool = BlockPool(3)
    contents = chain(1, 2, 3)
    slots, _ = pool.begin_load(3)
    used, stored = pool.end_loads(slots, contents[:2])
    assert used == slots
    assert stored == [ContentStored(content) for content in contents[:2]]
    assert pool.longest_prefix(content.key for content in contents) == 2
    assert pool.content(slots[2]) is None


def test_a_sequence_uses_the_block_that_another_one_stored_while_it_was_loading() -> None:
    pool = BlockPool(4)
    contents = chain(1, 2)
    slots, _ = pool.begin_load(2)
    others = fill(pool, contents[:1])
    used, stored = pool.end_loads(slots, contents)
    assert used == [others[0], slots[1]]
    assert stored == [ContentStored(contents[1])]
    assert pool.state(slots[0]) == "free"
    pool.validate()


def test_a_failed_copy_leaves_a_blank_block_to_be_computed() -> None:
    pool = BlockPool(1)
    (content,) = chain(1)
    (slot,), _ = pool.begin_load(1)
    assert pool.end_loads([slot], []) == ([slot], [])
    assert pool.store(slot, content) == (slot, [ContentStored(content)])


def test_the_longest_prefix_ends_at_the_first_gap() -> None:
    pool = BlockPool(4)
    contents = chain(1, 2, 3)
    fill(pool, [contents[0], contents[2]])
    assert pool.longest_prefix([content.key for content in contents]) == 1


def test_a_snapshot_tells_parents_first_even_if_they_were_stored_last() -> None:
    pool = BlockPool(4)
    contents = chain(1, 2, 3)
    fill(pool, list(reversed(contents)))
    assert pool.snapshot() == contents


def test_the_newest_are_those_that_were_stored_last_in_that_order() -> None:
    pool = BlockPool(4)
    contents = chain(1, 2, 3)
    fill(pool, contents)
    assert pool.newest(2) == contents[1:]
    assert pool.newest(9) == contents
    assert pool.newest(0) == []


def test_a_forgotten_block_cannot_be_found_and_its_slot_is_free_at_once_where_nothing_holds_it() -> None:
    pool, contents = BlockPool(4), chain(1, 2, 3)
    release(pool, fill(pool, contents))
    assert pool.forget(contents[1].key) == [ContentEvicted(contents[1])]
    pool.validate()
    assert pool.longest_prefix(content.key for content in contents) == 1
    assert pool.free == 2
    assert pool.forget(contents[1].key) == []


def test_the_slot_of_a_forgotten_block_stays_with_those_that_hold_it_until_the_last_lets_go() -> None:
    pool, contents = BlockPool(4), chain(1)
    (slot,) = fill(pool, contents)
    pool.acquire(contents[0].key)
    pool.hold_for_copy(slot)
    pool.forget(contents[0].key)
    for release_once in (pool.release, lambda slot: pool.release_copies([slot]), pool.release):
        pool.validate()
        assert pool.is_forgotten(slot)
        assert (pool.free, pool.state(slot)) == (3, "held")
        release_once(slot)
    pool.validate()
    assert (pool.free, pool.is_forgotten(slot)) == (4, False)


def test_a_forgotten_block_may_be_stored_again_in_another_slot() -> None:
    pool, contents = BlockPool(4), chain(1)
    (first,) = fill(pool, contents)
    pool.forget(contents[0].key)
    (second,) = fill(pool, contents)
    pool.validate()
    assert first != second
    assert pool.find(contents[0].key) == second


def test_a_cleared_pool_finds_nothing_and_gives_its_slots_back_as_they_are_released() -> None:
    pool = BlockPool(4)
    contents = chain(1, 2, 3)
    first, second, third = fill(pool, contents)
    release(pool, [second, third])
    pool.hold_for_copy(second)
    pool.clear()
    assert (pool.digest, pool.snapshot(), pool.free) == (0, [], 2)
    pool.release_copies([second])
    pool.release(first)
    assert pool.free == 4
    pool.validate()
    release(pool, fill(pool, contents))
    assert pool.longest_prefix([content.key for content in contents]) == 3


def test_asking_for_more_than_is_available_is_a_programmers_error() -> None:
    with pytest.raises(AssertionError, match="3 blocks asked for, 2 available"):
        BlockPool(2).allocate(3)


def test_a_pool_has_at_least_one_block() -> None:
    with pytest.raises(ValueError, match="0 blocks"):
        BlockPool(0)


class PoolMachine(RuleBasedStateMachine):
    """Sequences hold whole prefixes and release them last block first; copies come and go."""

    sequences = Bundle("sequences")
    copies = Bundle("copies")
    loads = Bundle("loads")

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6)
        self.reported: dict[ContentKey, Content] = {}
        self.copied = False
        self.orphans = False

    def hear(self, events: list[ContentStored] | list[ContentEvicted]) -> None:
        for event in events:
            one: PoolEvent = event
            if isinstance(one, ContentStored):
                assert one.content.key not in self.reported, "stored twice"
                self.reported[one.content.key] = one.content
            else:
                del self.reported[one.content.key]

    @rule(target=sequences, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def compute(self, tokens: list[int]) -> list[int]:
        contents = chain(*tokens)
        found = self.pool.longest_prefix(content.key for content in contents)
        held = self.pool.held_prefix(content.key for content in contents)
        before = self.pool.available
        slots = self.pool.acquire_prefix([content.key for content in contents])
        assert len(slots) == found
        assert before - self.pool.available == found - held, "what nobody holds was available"
        missing = min(len(contents) - found, self.pool.available)
        blank, evicted = self.pool.allocate(missing)
        self.hear(evicted)
        for slot, content in zip(blank, contents[found:], strict=False):
            kept, events = self.pool.store(slot, content)
            self.hear(events)
            slots.append(kept)
        return slots

    @rule(sequence=consumes(sequences))
    def end(self, sequence: list[int]) -> None:
        release(self.pool, sequence)

    @rule(target=copies, sequence=sequences, index=st.integers(0, 3))
    def copy(self, sequence: list[int], index: int) -> int | None:
        if index >= len(sequence):
            return None
        self.copied = True
        self.pool.hold_for_copy(sequence[index])
        return sequence[index]

    @rule(slot=consumes(copies))
    def copied_out(self, slot: int | None) -> None:
        if slot is not None:
            self.pool.release_copies([slot])

    @precondition(lambda self: self.reported)
    @rule(pick=st.integers(0, 5))
    def forget(self, pick: int) -> None:
        self.orphans = True
        self.hear(self.pool.forget(list(self.reported)[pick % len(self.reported)]))

    @precondition(lambda self: self.pool.available > 0)
    @rule(target=loads, tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3), stays=st.booleans())
    def load(self, tokens: list[int], stays: bool) -> tuple[list[int], list[Content], bool]:
        contents = chain(*tokens)[: self.pool.available]
        slots, evicted = self.pool.begin_load(len(contents))
        self.hear(evicted)
        if not stays:
            release(self.pool, slots)
            self.orphans = True
        return slots, contents, stays

    @rule(load=consumes(loads), good=st.integers(0, 3))
    def loaded(self, load: tuple[list[int], list[Content], bool], good: int) -> None:
        slots, contents, stays = load
        slots, events = self.pool.end_loads(slots, contents[:good])
        self.hear(events)
        if stays:
            release(self.pool, slots)

    @invariant()
    def events_tell_exactly_what_can_be_found(self) -> None:
        self.pool.validate()
        snapshot = self.pool.snapshot()
        assert {content.key for content in snapshot} == self.reported.keys()
        newest = self.pool.newest(self.pool.capacity)
        assert newest == list(self.reported.values())
        if not self.copied and not self.orphans:
            keys = [content.key for content in newest]
            assert all(content.parent in (None, *keys[:place]) for place, content in enumerate(newest))
        digest = 0
        for key in self.reported:
            digest ^= event_hash(key)
        assert digest == self.pool.digest
        counts = self.pool.statistics()
        assert counts.free + counts.loading + counts.held + counts.cached == counts.capacity
        assert counts.keyed == len(self.reported)

    @invariant()
    def a_kept_block_has_its_parent_unless_it_was_forgotten_or_copies_mixed_the_order(self) -> None:
        if not self.copied and not self.orphans:
            for content in self.reported.values():
                assert content.parent is None or content.parent in self.reported


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30)
