"""services/worker/vllm/connector/blocks.py: which blocks are offered, and when; its bounds."""

from __future__ import annotations

from typing import cast

import pytest

from services.worker.vllm.connector import blocks as bounds
from services.worker.vllm.connector.blocks import (
    HOLD_S,
    LOAD_S,
    MOST_QUESTIONS,
    MOST_UNPLACED,
    NEVER,
    VllmBlocks,
)
from services.worker.vllm.connector.chain import TokenChain
from services.worker.vllm.connector.orders import EndLoad
from services.worker.vllm.connector.pool import VllmPool
from shared.hashing import ContentKey
from tests.worker.vllm.connector.vllm_shaped import Pool

BLOCK = 2
TOKENS = list(range(12))


def made() -> tuple[VllmBlocks, Pool]:
    pool = Pool(40)
    blocks = VllmBlocks(cast(VllmPool, pool), BLOCK, lambda: 0.0, wait_s=1.0)
    blocks.set_connected(True)
    blocks.track("r", TokenChain(TOKENS, BLOCK, "m"))
    return blocks, pool


def test_a_cached_prefix_is_offered_only_after_the_requests_own_first_step() -> None:
    """Another request may compute that prefix in the same step: vLLM caches blocks before they are computed."""
    blocks, pool = made()
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", index))
    blocks.offer_computed("r", 4, lambda: held)
    assert blocks.offers(10) == []
    blocks.offer_computed("r", 4, lambda: held)
    assert blocks.offers(10) == []
    blocks.offer_computed("r", 7, lambda: held)
    assert [content.tokens for content in blocks.offers(10)] == [
        TokenChain(TOKENS, BLOCK, "m").content(index).tokens for index in range(3)
    ]


def test_after_a_preemption_the_same_holds_again() -> None:
    blocks, pool = made()
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", index))
    blocks.offer_computed("r", 0, lambda: held)
    blocks.offer_computed("r", 4, lambda: held)
    assert len(blocks.offers(10)) == 2
    blocks.offer_computed("r", 2, lambda: held)  # scheduled again, with a cached prefix
    blocks.offer_computed("r", 2, lambda: held)
    assert blocks.offers(10) == []
    blocks.offer_computed("r", 8, lambda: held)
    assert len(blocks.offers(10)) == 2


def test_the_answer_to_an_offer_says_from_which_token_on_there_is_more(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, pool = made()
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", index))
    assert blocks.offer_computed("unknown", 5, lambda: held) == NEVER
    assert blocks.offer_computed("r", 4, lambda: held) == 5, "its own first step is not processed"
    assert blocks.offer_computed("r", 5, lambda: held) == 6
    assert len(blocks.offers(10)) == 2
    assert blocks.offer_computed("r", 6, lambda: held) == 8
    monkeypatch.setattr(bounds, "MOST_LOOKED_AT", 1)
    assert blocks.offer_computed("r", 10, lambda: held) == 10, "it has not looked at all of them"
    assert blocks.offer_computed("r", 10, lambda: held) == 12


def test_after_blocks_were_allocated_again_a_longer_cached_prefix_waits_for_its_own_first_step_too() -> None:
    blocks, pool = made()
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", index))
    blocks.offer_computed("r", 0, lambda: held)
    blocks.offer_computed("r", 4, lambda: held)
    assert len(blocks.offers(10)) == 2
    blocks.place("r", (), 0)  # preempted, and scheduled with what another request may compute in the same step
    blocks.offer_computed("r", 8, lambda: held)
    assert blocks.offers(10) == []
    blocks.offer_computed("r", 9, lambda: held)
    assert len(blocks.offers(10)) == 2


def test_a_block_that_was_cached_again_is_not_the_one_that_was_offered() -> None:
    blocks, pool = made()
    held = pool.allocate(6)
    pool.cache(held[0], ("name", 0))
    blocks.offer_computed("r", 0, lambda: held)
    blocks.offer_computed("r", 2, lambda: held)
    [content] = blocks.offers(10)
    pool.uncache(held[0])
    pool.cache(held[0], ("name", int("0")))
    assert blocks.pin([content.key]) == [None]


def test_a_block_that_came_too_late_can_be_pinned_once_more() -> None:
    blocks, _ = offering(Pool(40))
    blocks.forget("r0")
    keys = [content.key for content in blocks.offers(100)]
    slots = blocks.pin(keys)
    assert None not in slots
    blocks.unpin([slot for slot in slots if slot is not None])
    blocks.asked_again(keys)
    assert blocks.pin(keys) == slots


def offered_again(blocks: VllmBlocks) -> list[ContentKey]:
    """End the link, and begin one. Return what is offered to it."""
    blocks.set_connected(False)
    assert not blocks.waiting
    blocks.set_connected(True)
    blocks.validate()
    return [content.key for content in blocks.offers(100)]


def test_a_new_link_is_offered_what_was_offered_before_and_is_still_there() -> None:
    pool = Pool(40)
    blocks, _ = offering(pool)
    keys = [content.key for content in blocks.offers(100)]
    blocks.pin(keys[:3])  # these were being stored
    blocks.forget("r0")
    held = {block.block_hash: block for block in pool.blocks if block.block_hash is not None}
    pool.uncache(held["name", 0, 1])  # evicted
    pool.uncache(changed := held["name", 0, 4])
    pool.cache(changed, ("name", 0, int("4")))  # and computed again, for another request
    assert offered_again(blocks) == [keys[0], keys[2], keys[3], keys[5]]
    assert offered_again(blocks) == [keys[0], keys[2], keys[3], keys[5]], "whatever became of them"
    assert not blocks.waiting
    slots = blocks.pin(keys)
    assert [slot is not None for slot in slots] == [True, False, True, True, False, True]


def test_a_new_link_is_offered_the_newest_blocks_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, [one, other] = offering(Pool(40), requests=2)
    monkeypatch.setattr(bounds, "MOST_OFFERS", 8)
    for name in ("r0", "r1"):
        blocks.forget(name)
    assert offered_again(blocks) == [*one.keys(6)[4:], *other.keys(6)]
    assert blocks.dropped == 0


def test_a_block_that_a_request_offers_to_the_new_link_is_not_offered_twice() -> None:
    blocks, [chain] = offering(Pool(40))
    held = [block for block in blocks._pool.blocks if block.ref_cnt]
    blocks.set_connected(False)
    blocks.set_connected(True)
    blocks.offer_computed("r0", 4, lambda: held)
    assert sorted(content.key for content in blocks.offers(100)) == sorted(chain.keys(6))


def test_blocks_that_have_another_name_now_are_not_offered_again() -> None:
    blocks, _ = offering(Pool(40))
    blocks.forget_offered()
    blocks.forget("r0")
    blocks.set_connected(False)
    blocks.set_connected(True)
    assert not blocks.waiting


# --- bounds


class Time:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def offering(pool: Pool, requests: int = 1, tokens: int = 12) -> tuple[VllmBlocks, list[TokenChain]]:
    """Make blocks, and requests whose tokens are computed and whose blocks are cached."""
    blocks = VllmBlocks(cast(VllmPool, pool), BLOCK, lambda: 0.0, wait_s=1.0)
    blocks.set_connected(True)
    chains = [TokenChain([each] * tokens, BLOCK, "m") for each in range(requests)]
    for each, chain in enumerate(chains):
        held = pool.allocate(tokens // BLOCK)
        for index, block in enumerate(held):
            pool.cache(block, ("name", each, index))
        blocks.track(f"r{each}", chain)
        blocks.offer_computed(f"r{each}", 0, lambda held=held: held)  # type: ignore[misc]
        blocks.offer_computed(f"r{each}", tokens, lambda held=held: held)  # type: ignore[misc]
        blocks.validate()
    return blocks, chains


def test_over_the_bound_the_oldest_offer_is_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_OFFERS", 4)
    blocks, [chain] = offering(Pool(40))
    assert blocks.dropped == 2
    offered = blocks.offers(100)
    assert [content.key for content in offered] == chain.keys(6)[2:]
    assert not blocks.waiting
    assert all(slot is not None for slot in blocks.pin([content.key for content in offered]))


def test_a_dropped_block_is_offered_when_another_request_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_OFFERS", 4)
    pool = Pool(40)
    blocks, [chain] = offering(pool)
    blocks.offers(100)
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", 0, index))
    blocks.track("again", chain)
    blocks.offer_computed("again", 0, lambda: held)
    blocks.offer_computed("again", 12, lambda: held)
    assert [content.key for content in blocks.offers(100)] == chain.keys(2), "the others are known"


def test_offers_that_were_taken_and_not_pinned_are_bounded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kvbm need not want what it was offered, so nothing takes their places away."""
    monkeypatch.setattr(bounds, "MOST_OFFERS", 3)
    pool = Pool(40)
    blocks = VllmBlocks(cast(VllmPool, pool), BLOCK, lambda: 0.0, wait_s=1.0)
    blocks.set_connected(True)
    chain = TokenChain(list(range(24)), BLOCK, "m")
    blocks.track("r", chain)
    held = pool.allocate(12)
    for index, block in enumerate(held):
        pool.cache(block, ("name", index))
    for tokens in range(0, 25, 2):
        blocks.offer_computed("r", tokens, lambda: held)
        blocks.offers(100)
        blocks.validate()
    pinned = blocks.pin(chain.keys(12))
    assert pinned == [None] * 6 + [block.block_id for block in held[6:]]


def test_a_block_that_was_stored_and_is_offered_again_is_there_when_it_is_to_be_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bounds, "MOST_OFFERS", 2)
    pool = Pool(40)
    blocks = VllmBlocks(cast(VllmPool, pool), BLOCK, lambda: 0.0, wait_s=1.0)
    blocks.set_connected(True)
    chain = TokenChain(TOKENS, BLOCK, "m")
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", index))
    blocks.track("r", chain)
    for tokens in (0, 2, 4, 6, 8):
        blocks.offer_computed("r", tokens, lambda: held)
        slots = blocks.pin([content.key for content in blocks.offers(100)])
        blocks.unpin([slot for slot in slots if slot is not None])
    blocks.discard(chain.keys(1))  # the kvbm has lost it
    blocks.track("again", chain)
    blocks.offer_computed("again", 0, lambda: held)
    blocks.offer_computed("again", 2, lambda: held)
    blocks.offer_computed("r", 10, lambda: held)
    keys = [content.key for content in blocks.offers(100)]
    assert keys == [*chain.keys(1), *chain.keys(5)[4:]]
    assert blocks.pin(keys) == [held[0].block_id, held[4].block_id]


def test_over_the_bound_of_known_keys_the_oldest_is_offered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_KNOWN", 4)
    pool = Pool(40)
    blocks, [chain] = offering(pool)
    blocks.offers(100)
    held = pool.allocate(6)
    for index, block in enumerate(held):
        pool.cache(block, ("name", 0, index))
    blocks.track("again", chain)
    blocks.offer_computed("again", 0, lambda: held)
    blocks.offer_computed("again", 12, lambda: held)
    blocks.validate()
    assert [content.key for content in blocks.offers(100)] == chain.keys(2)


def test_a_long_prompt_is_looked_at_over_several_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "MOST_LOOKED_AT", 4)
    pool = Pool(40)
    blocks, [chain] = offering(pool)
    assert len(blocks.offers(100)) == 4
    held = [block for block in pool.blocks if block.ref_cnt]
    blocks.offer_computed("r0", 12, lambda: held)
    assert [content.key for content in blocks.offers(100)] == chain.keys(6)[4:]
    blocks.offer_computed("r0", 12, lambda: held)
    assert not blocks.waiting


def test_no_more_requests_ask_than_the_bound_and_the_next_one_asks_when_one_has_its_answer() -> None:
    blocks = VllmBlocks(cast(VllmPool, Pool(40)), BLOCK, lambda: 0.0, wait_s=9.0)
    blocks.set_connected(True)
    names = [f"r{each}" for each in range(MOST_UNPLACED + 1)]
    for each, name in enumerate(names):
        blocks.track(name, TokenChain([each] * 5, BLOCK, "m"))
        assert blocks.find(name, 5, 0) is None
    asked, _ = blocks.fetch_changes()
    assert len(asked) == MOST_UNPLACED
    assert blocks.find(names[-1], 5, 0) is None
    assert blocks.fetch_changes() == ([], [])
    blocks.end_fetch(asked[0].number, 0.0)  # the kvbm has nothing
    assert blocks.find(names[0], 5, 0) == 0
    assert blocks.find(names[-1], 5, 0) is None
    [last], _ = blocks.fetch_changes()
    assert last.keys == TokenChain([MOST_UNPLACED] * 5, BLOCK, "m").keys(2)
    blocks.validate()


def test_a_request_asks_no_more_often_than_the_bound() -> None:
    blocks = VllmBlocks(cast(VllmPool, Pool(40)), BLOCK, lambda: 0.0, wait_s=9.0)
    blocks.set_connected(True)
    tokens = 2 * (MOST_QUESTIONS + 4)
    blocks.track("r", TokenChain(list(range(tokens)), BLOCK, "m"))
    for each in range(MOST_QUESTIONS):  # its cached prefix on the device changes each time
        assert blocks.find("r", tokens, each * BLOCK) is None
        assert len(blocks.fetch_changes()[0]) == 1
    assert blocks.find("r", tokens, MOST_QUESTIONS * BLOCK) == 0
    blocks.validate()


def test_a_question_without_an_answer_in_time_is_given_up_and_counted() -> None:
    clock = Time()
    blocks = VllmBlocks(cast(VllmPool, Pool(40)), BLOCK, clock, wait_s=1.0)
    blocks.set_connected(True)
    blocks.track("r", TokenChain(TOKENS, BLOCK, "m"))
    assert blocks.find("r", 12, 0) is None
    [asked], _ = blocks.fetch_changes()
    clock.now_s = 1.0
    assert blocks.find("r", 12, 0) == 0
    assert blocks.late == 1
    assert blocks.fetch_changes() == ([], [asked.number])
    assert blocks.begin_load(asked.number, 0, 2, 2) == [], "its answer comes too late"
    blocks.end_fetch(asked.number, 0.0)
    assert not blocks.waiting
    blocks.validate()


def test_an_answer_that_finds_no_room_counts_for_a_while_and_is_then_asked_again_without_limit() -> None:
    clock = Time()
    blocks = VllmBlocks(cast(VllmPool, Pool(40)), BLOCK, clock, wait_s=1.0)
    blocks.set_connected(True)
    blocks.track("r", TokenChain(TOKENS, BLOCK, "m"))
    for _ in range(2 * MOST_QUESTIONS):
        assert blocks.find("r", 12, 0) is None
        [asked], _ = blocks.fetch_changes()
        assert blocks.begin_load(asked.number, 0, 3, 3) is None
        assert blocks.find("r", 12, 0) == 3 * BLOCK
        clock.now_s += HOLD_S
        assert blocks.fetch_changes() == ([], [asked.number])
        blocks.end_fetch(asked.number, 0.0)
        blocks.validate()


def test_a_load_that_takes_too_long_ends_with_what_it_has() -> None:
    clock = Time()
    blocks = VllmBlocks(cast(VllmPool, Pool(40)), BLOCK, clock, wait_s=1.0)
    blocks.set_connected(True)
    blocks.track("r", TokenChain(TOKENS, BLOCK, "m"))
    assert blocks.find("r", 12, 0) is None
    [asked], _ = blocks.fetch_changes()
    assert blocks.begin_load(asked.number, 0, 3, 3) is None
    assert blocks.find("r", 12, 0) == 3 * BLOCK
    blocks.place("r", [11, 12, 13, 14], 3 * BLOCK)
    assert blocks.begin_load(asked.number, 0, 1, 3) == [11]
    clock.now_s = LOAD_S
    assert blocks.fetch_changes() == ([], [asked.number])
    assert blocks.begin_load(asked.number, 1, 2, 3) == []
    blocks.end_loads(asked.number, 0, [True], False)
    blocks.end_fetch(asked.number, 0.0)
    assert blocks.take_ends() == [EndLoad("r", [11, 12, 13], [12, 13])]
    assert not blocks.waiting
    blocks.validate()


def test_no_free_block_of_the_reserve_is_held_for_a_copy() -> None:
    pool = Pool(33)  # a sixteenth of them: two stay free
    blocks, [chain] = offering(pool)
    keys = [content.key for content in blocks.offers(100)]
    pool.free_blocks([block for block in pool.blocks if block.ref_cnt])
    free = pool.get_num_free_blocks()
    pool.allocate(free - 6)  # the offered ones are left
    slots = blocks.pin(keys)
    assert [slot is not None for slot in slots] == [True] * 4 + [False] * 2
    assert pool.get_num_free_blocks() == 2
    blocks.unpin([slot for slot in slots if slot is not None])
    assert pool.get_num_free_blocks() == 6
    assert chain.keys(6) == keys


def test_a_hand_over_is_stored_once_nothing_of_it_is_on_its_way() -> None:
    blocks, [chain, other] = offering(Pool(40), requests=2)
    blocks.hand_over("r0", "1", 11)
    blocks.hand_over("r1", "2", 11)
    blocks.hand_over("unknown", "3", 11)
    assert blocks.take_stored() == ["3"]
    keys = [content.key for content in blocks.offers(5)]
    assert keys == chain.keys(5), "the sixth block is not full without the last token"
    blocks.declined(keys[:1])
    slots = [slot for slot in blocks.pin(keys[1:]) if slot is not None]
    assert len(slots) == 4
    assert blocks.take_stored() == []
    blocks.unpin(slots[:2])
    assert blocks.take_stored() == []
    blocks.unpin(slots[2:])
    blocks.asked_again(keys[1:2])
    assert blocks.take_stored() == [], "one came too late, and is stored again"
    blocks.unpin([slot for slot in blocks.pin(keys[1:2]) if slot is not None])
    assert blocks.take_stored() == ["1"]
    assert blocks.take_stored() == []
    blocks.offers(100)
    assert blocks.take_stored() == [], "an offer is no answer"
    blocks.declined([*chain.keys(6)[5:], *other.keys(6)])
    assert blocks.take_stored() == ["2"]
    blocks.validate()


def test_a_block_that_will_never_be_stored_holds_no_hand_over_up(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = Pool(14)
    blocks, [chain] = offering(pool)
    blocks.hand_over("r0", "evicted", 12)
    blocks.offers(100)
    pool.free_blocks(reversed(pool.blocks[1:7]))
    pool.allocate(13)
    assert blocks.pin(chain.keys(6)) == [None] * 6
    assert blocks.take_stored() == ["evicted"]
    monkeypatch.setattr(bounds, "MOST_OFFERS", 4)
    blocks, [chain] = offering(Pool(40))
    blocks.hand_over("r0", "dropped", 4)
    assert blocks.take_stored() == ["dropped"]
    blocks.hand_over("r0", "no kvbm", 12)
    assert blocks.take_stored() == []
    blocks.set_connected(False)
    assert blocks.take_stored() == ["no kvbm"]
    blocks.validate()
