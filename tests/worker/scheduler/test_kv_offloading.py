"""Through the scheduler, which it is a part of."""

from __future__ import annotations

from shared.messages.generate import Sampling
from tests.worker.manual_engine import Engine
from tests.worker.manual_kvbm import Kvbm

PROMPT = [1, 2, 3, 4, 1, 2, 3]


def test_a_full_block_is_offered_once_parents_first() -> None:
    kvbm = Kvbm(Engine())
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.know_nothing()
    kvbm.engine.run()
    offers = kvbm.take_offers()
    assert [content.parent for content in offers] == [None, offers[0].key, offers[1].key]
    assert kvbm.take_offers() == []
    assert kvbm.engine.scheduler.load().offered_blocks == 3


def test_a_prompt_that_is_handed_over_is_offered_again_where_it_was_cached() -> None:
    engine = Engine()
    offloading = engine.scheduler.kv_cache.offloading
    offloading.set_enabled(True)
    for name, prefill_only, offered in (("a", False, 3), ("b", False, 0), ("c", True, 3)):
        engine.submit(name, PROMPT, max_tokens=1, prefill_only=prefill_only)
        engine.run()
        assert len(offloading.offers(64)) == offered


def test_at_most_the_given_number_is_offered_at_a_time() -> None:
    kvbm = Kvbm(Engine())
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.know_nothing()
    kvbm.engine.run()
    assert [len(kvbm.take_offers(2)) for _ in range(3)] == [2, 1, 0]


def test_blocks_that_came_from_the_kvbm_are_not_offered_to_it() -> None:
    for offload in ("filled", "evicted"):
        first = Kvbm(Engine())
        first.up()
        first.engine.submit("a", PROMPT, max_tokens=1)
        first.run()
        kvbm = Kvbm(Engine(capacity_blocks=6, offload=offload))
        kvbm.kept = first.kept
        kvbm.up()
        kvbm.engine.submit("a", PROMPT, max_tokens=1)
        kvbm.run()
        assert kvbm.loaded_blocks == 3
        assert kvbm.engine.scheduler.load().offered_blocks == 0


def test_blocks_that_were_shared_are_offered_once_their_sharer_has_gone_parents_first() -> None:
    first = Kvbm(Engine())
    first.up()
    first.engine.submit("a", PROMPT, max_tokens=1)
    first.run()
    kvbm = Kvbm(Engine())
    kvbm.kept, kvbm.sharer = first.kept, "prefill"
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.run()
    assert kvbm.loaded_blocks == 3
    kvbm.engine.scheduler.kv_cache.offer_shared("another")
    assert kvbm.engine.scheduler.load().offered_blocks == 0
    kvbm.engine.scheduler.kv_cache.offer_shared("prefill")
    offers = kvbm.take_offers()
    assert [content.parent for content in offers] == [None, offers[0].key, offers[1].key]
    kvbm.engine.scheduler.kv_cache.offer_shared("prefill")
    assert kvbm.take_offers() == [], "once"


def test_a_shared_block_that_was_evicted_is_not_offered_and_neither_is_what_came_to_its_slot() -> None:
    first = Kvbm(Engine())
    first.up()
    first.engine.submit("a", PROMPT, max_tokens=1)
    first.run()
    kvbm = Kvbm(Engine(capacity_blocks=4))
    kvbm.kept, kvbm.sharer = dict(first.kept), "prefill"
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.run()
    assert kvbm.loaded_blocks == 3
    cache = kvbm.engine.scheduler.kv_cache
    shared = {content.key for content in cache.snapshot()}
    kvbm.engine.submit("b", [7] * 4, max_tokens=1)
    kvbm.run()
    left = [content.key for content in cache.snapshot() if content.key in shared]
    assert 0 < len(left) < 3
    assert len(cache.snapshot()) > len(left)
    cache.offer_shared("prefill")
    assert [content.key for content in kvbm.take_offers()] == left


def test_blocks_that_were_shared_are_offered_before_they_are_evicted() -> None:
    first = Kvbm(Engine())
    first.up()
    first.engine.submit("a", PROMPT, max_tokens=1)
    first.run()
    for sharer, offered in (("", 0), ("prefill", 1)):
        kvbm = Kvbm(Engine(capacity_blocks=4, offload="evicted"))
        kvbm.kept, kvbm.sharer = dict(first.kept), sharer
        kvbm.up()
        kvbm.engine.submit("a", PROMPT, max_tokens=1)
        kvbm.run()
        assert kvbm.loaded_blocks == 3
        kvbm.engine.submit("b", [7, 7], max_tokens=1)
        kvbm.run()
        assert kvbm.engine.scheduler.load().offered_blocks == offered


def test_beyond_the_limit_the_oldest_is_left_out_and_counted() -> None:
    kvbm = Kvbm(Engine(offers_limit=2))
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.know_nothing()
    kvbm.engine.run()
    offers = kvbm.take_offers()
    assert len(offers) == 2
    assert offers[0].parent is not None
    assert kvbm.engine.scheduler.load().dropped_offers == 1


def test_what_was_evicted_in_the_meantime_is_not_offered_and_not_held() -> None:
    engine = Engine(capacity_blocks=4)
    kvbm = Kvbm(engine)
    kvbm.up()
    engine.submit("a", PROMPT, max_tokens=1)
    kvbm.know_nothing()
    engine.run()
    offers = engine.scheduler.kv_cache.offloading.offers(1)
    engine.submit("b", [4, 4, 4, 4, 4, 4, 4], max_tokens=1)
    kvbm.know_nothing()
    engine.run()
    assert engine.scheduler.kv_cache.pin([offers[0].key]) == [None]
    assert {content.parent for content in engine.scheduler.kv_cache.offloading.offers(64)}.isdisjoint({offers[0].key})


def test_a_kvbm_that_comes_is_offered_what_is_there() -> None:
    kvbm = Kvbm(Engine())
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.engine.run()
    assert kvbm.take_offers() == []
    kvbm.up()
    assert len(kvbm.take_offers()) == 3
    kvbm.end()


def test_without_a_kvbm_or_where_it_is_off_nothing_is_offered() -> None:
    kvbm = Kvbm(Engine())
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.know_nothing()
    kvbm.engine.run()
    kvbm.down()
    assert kvbm.take_offers() == []
    kvbm = Kvbm(Engine(offload="off"))
    kvbm.up()
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.run()
    assert kvbm.engine.scheduler.load().offered_blocks == 0


def test_blocks_that_would_leave_next_are_offered_once_while_they_are_there() -> None:
    kvbm = Kvbm(Engine(capacity_blocks=80, step_tokens=64, offload="evicted"))
    kvbm.up()
    for first in (1, 2, 3):
        kvbm.engine.submit(f"r{first}", [first, *[1, 2] * 20], sampling=Sampling(max_tokens=1))
        kvbm.know_nothing()
        kvbm.engine.run()
        assert kvbm.take_offers() == [], "there is room"
    oldest = kvbm.engine.scheduler.kv_cache.snapshot()[:20]
    kvbm.engine.submit("r4", [4, *[1, 2] * 16], sampling=Sampling(max_tokens=1))
    kvbm.know_nothing()
    kvbm.engine.run()
    assert kvbm.take_offers(2) == oldest[-2:]
    assert kvbm.take_offers() == oldest[-8:-2], "the two that are copied do not leave now"
    assert kvbm.take_offers() == []
    kvbm.end_saves()
    assert kvbm.take_offers() == []
    kvbm.engine.submit("r5", [4, *[4, 2] * 8], sampling=Sampling(max_tokens=1))
    kvbm.know_nothing()
    kvbm.engine.run()
    left = set(oldest) - set(kvbm.engine.scheduler.kv_cache.snapshot())
    assert left
    assert {content.key for content in left} <= kvbm.kept.keys(), "they were copied before they left"
    kvbm.end()


def test_no_block_is_held_whose_room_a_running_sequence_may_need() -> None:
    kvbm = Kvbm(Engine(capacity_blocks=5))
    kvbm.engine.submit("a", PROMPT, max_tokens=1)
    kvbm.engine.run()
    kvbm.up()
    keys = [content.key for content in kvbm.engine.scheduler.kv_cache.snapshot()]
    kvbm.engine.submit("b", [4, 4, 4], sampling=Sampling(max_tokens=6, ignore_eos=True))
    kvbm.know_nothing()
    kvbm.engine.step()
    *held, refused = kvbm.engine.scheduler.kv_cache.pin(keys)
    assert refused is None
    assert len(set(held) - {None}) == 2
    kvbm.engine.scheduler.kv_cache.unpin([slot for slot in held if slot is not None])
    kvbm.engine.run()
