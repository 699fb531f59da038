from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from services.frontend.requests.fair_share import GREED, may_have

KEYS = st.integers(0, 5000)


@given(held=KEYS, other=KEYS, more=st.integers(1, 100), taken=st.integers(0, 10_000), limit=st.integers(1, 10_000))
def test_who_holds_less_is_never_refused_what_who_holds_more_may_have(
    held: int, other: int, more: int, taken: int, limit: int
) -> None:
    less, most = sorted((held, other))
    if most and may_have(most, more, taken, limit):
        assert may_have(less, more, taken, limit)


@given(st.integers(1, 10_000), st.lists(st.integers(1, 50), min_size=1, max_size=100))
def test_one_key_that_takes_all_it_can_get_leaves_a_part_to_others(limit: int, wanted: list[int]) -> None:
    held = 0
    for more in wanted * 20:
        if held + more <= limit and may_have(held, more, held, limit):
            held += more
    first = next((more for more in wanted if more <= limit), 0)
    assert held <= max(first, limit * GREED / (GREED + 1))


@settings(max_examples=20)
@given(st.integers(2, 20), st.integers(0, 1 << 30))
def test_keys_that_want_all_they_can_get_come_to_the_same(keys: int, seed: int) -> None:
    """The first has all it could get before the others came; requests end in any order."""
    limit, draw = 400, random.Random(seed)
    held = [0] * keys

    def ask(key: int) -> bool:
        taken = sum(held)
        allowed = taken < limit and may_have(held[key], 1, taken, limit)
        held[key] += allowed
        return allowed

    while ask(0):
        pass
    for _ in range(10 * limit):
        taken = sum(held)
        ends = draw.choices(range(keys), held)[0]  # every request is as likely to end
        held[ends] -= 1
        for key in draw.sample(range(keys), keys):
            ask(key)
        assert sum(held) <= max(taken, limit)
    assert max(held) - min(held) <= GREED + 1, "one that ends makes room for so many of one key"
