from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.kvbm.tiers.eviction_queue import EvictionQueue
from shared.hashing import ContentKey

KEYS = st.integers(0, 7).map(lambda number: number.to_bytes(16))


def key(number: int) -> ContentKey:
    return number.to_bytes(16)


def line(length: int) -> EvictionQueue:
    made = EvictionQueue()
    for number in range(length):
        made.push(key(number))
    return made


def test_the_first_in_line_is_named_until_it_is_dropped() -> None:
    three = line(3)
    assert three.first(lambda _: True, every=False) == key(0)
    assert three.first(lambda _: True, every=False) == key(0)
    three.remove(key(0))
    three.push(key(1))
    assert three.first(lambda _: True, every=False) == key(2)
    assert (len(three), key(0) in three, key(1) in three) == (2, False, True)


def test_a_refused_key_is_asked_for_again_before_those_after_it() -> None:
    three = line(3)
    assert three.first(lambda each: each != key(0), every=False) == key(1)
    assert three.first(lambda _: True, every=False) == key(0)


def test_thousands_that_were_refused_are_not_asked_again_for_each_victim() -> None:
    long, asked = line(2000), 0

    def may_go(each: ContentKey) -> bool:
        nonlocal asked
        asked += 1
        return each >= key(1000)

    for _ in range(1000):
        victim = long.first(may_go, every=False)
        assert victim is not None
        long.remove(victim)
    assert asked <= 1000 + 3 * 1000


@given(st.lists(st.tuples(st.sampled_from(["push", "drop", "first"]), KEYS, st.sets(KEYS))))
def test_a_queue_agrees_with_a_list_of_keys_that_may_go(
    steps: list[tuple[str, ContentKey, set[ContentKey]]],
) -> None:
    made, model = EvictionQueue(), set[ContentKey]()
    for step, each, may in steps:
        if step == "push":
            made.push(each)
            model.add(each)
        elif step == "drop" and each in model:
            made.remove(each)
            model.remove(each)
        else:
            found = made.first(may.__contains__, every=True)
            assert (found is None) == model.isdisjoint(may)
            assert found is None or found in model & may
        made.validate()
        assert len(made) == len(model)
        assert all(each in made for each in model)
