"""Every eviction policy is tested for what all promise, and each for what it is good at."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.kvbm.tiers.policies import (
    BUILT_IN,
    DEFAULT,
    EvictionPolicy,
    GuardedPolicy,
    LruPolicy,
    make_policy,
)
from services.kvbm.tiers.reuse import ReusePolicy
from shared.errors import ConfigError
from shared.hashing import ContentKey

CAPACITY = 12
PLUGINS = "tests.kvbm.eviction_plugins"
WORKING = [*BUILT_IN, f"{PLUGINS}:YoungestPolicy"]


def key(number: int) -> ContentKey:
    return number.to_bytes(16)


class Cache:
    """One tier of `capacity` blocks, and nothing else. `asked` finds a block or stores it."""

    def __init__(self, policy: EvictionPolicy, capacity: int = CAPACITY) -> None:
        self.policy = policy
        self.capacity = capacity
        self.there: set[ContentKey] = set()

    def asked(self, number: int, pinned: frozenset[ContentKey] = frozenset()) -> bool:
        each = key(number)
        if each in self.there:
            self.policy.used(each)
            return True
        if len(self.there) == self.capacity and not self.evict(pinned):
            return False
        self.there.add(each)
        self.policy.stored(each)
        return False

    def evict(self, pinned: frozenset[ContentKey] = frozenset()) -> bool:
        victim = self.policy.victim(lambda each: each not in pinned)
        assert (victim is None) == (self.there <= pinned)
        if victim is None:
            return False
        assert victim in self.there - pinned
        self.lose(victim)
        return True

    def lose(self, each: ContentKey) -> None:
        self.there.remove(each)
        self.policy.gone(each)

    def hits(self, numbers: range) -> int:
        return sum(self.asked(number) for number in numbers)


KEYS = st.integers(0, 30)
STEPS = st.lists(
    st.tuples(st.sampled_from(["asked", "asked", "lose", "evict", "backed"]), KEYS, st.frozensets(KEYS.map(key)))
)


@pytest.mark.parametrize("name", WORKING)
@given(STEPS)
@settings(max_examples=60)
def test_after_any_history_a_victim_is_there_and_may_go_and_everybody_can_be_named(
    name: str, steps: list[tuple[str, int, frozenset[ContentKey]]]
) -> None:
    cache = Cache(make_policy(name, CAPACITY))
    for step, number, pinned in steps:
        if step == "asked":
            cache.asked(number, pinned)
        elif step == "evict":
            cache.evict(pinned)
        elif step == "backed" and key(number) in cache.there:
            cache.policy.backed(key(number), key(number) not in pinned)
        elif key(number) in cache.there:
            cache.lose(key(number))
        if isinstance(cache.policy, (LruPolicy, ReusePolicy)):
            cache.policy.validate()
    for each in sorted(cache.there):
        assert cache.policy.victim(lambda other, each=each: other == each) == each  # type: ignore[misc]
    while cache.evict():
        pass
    assert not cache.there
    assert getattr(cache.policy, "problem", "") == ""


@pytest.mark.parametrize("name", BUILT_IN)
def test_what_is_remembered_of_those_that_have_gone_is_bounded(name: str) -> None:
    cache = Cache(make_policy(name, CAPACITY))
    for number in range(50 * CAPACITY):
        cache.asked(number)
    assert isinstance(cache.policy, (LruPolicy, ReusePolicy))
    cache.policy.validate()
    assert len(cache.there) == CAPACITY


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_prefix_that_is_stored_last_block_first_leaves_from_its_end(name: str) -> None:
    cache = Cache(make_policy(name, CAPACITY))
    for number in reversed(range(CAPACITY)):
        cache.asked(number)
    for left in reversed(range(CAPACITY)):
        assert cache.policy.victim(lambda _: True) == key(left)
        cache.lose(key(left))


def test_lru_lets_the_longest_unused_go() -> None:
    cache = Cache(LruPolicy(3), 3)
    for number in (1, 2, 3, 1, 4):
        cache.asked(number)
    assert cache.there == {key(1), key(3), key(4)}


def kept(policy: EvictionPolicy, flood: int) -> int:
    """Return how many of 100 blocks that are used in every round are stored after the last round's flood."""
    cache, fresh = Cache(policy, 200), 1000
    for _round in range(60):
        cache.hits(range(100))
        cache.hits(range(100))
        cache.hits(range(fresh, fresh := fresh + flood))
    return cache.hits(range(100))


def test_what_is_used_again_and_again_outlives_a_flood_of_what_is_not() -> None:
    assert kept(make_policy("lru", 200), 400) == 0
    assert kept(make_policy("reuse", 200), 400) >= 80
    assert kept(make_policy("lru", 200), 150) == 0


def test_reuse_is_lru_where_nothing_has_been_learned() -> None:
    reuse, lru = Cache(ReusePolicy(50), 50), Cache(LruPolicy(50), 50)
    for number in (*range(50), *range(0, 50, 3), *range(100, 130)):
        reuse.asked(number)
        lru.asked(number)
    assert len(reuse.there & lru.there) >= 45


def test_reuse_would_rather_lose_what_the_tier_below_has_too() -> None:
    cache = Cache(ReusePolicy(4), 4)
    cache.hits(range(4))
    cache.policy.backed(key(2), True)
    cache.asked(4)
    assert cache.there == {key(0), key(1), key(3), key(4)}
    cache.policy.backed(key(3), True)
    cache.policy.backed(key(3), False)
    cache.asked(5)
    assert cache.there == {key(1), key(3), key(4), key(5)}


def test_a_policy_is_found_by_name_or_by_module_and_attribute() -> None:
    assert isinstance(make_policy(DEFAULT, 5), ReusePolicy)
    own = make_policy(f"{PLUGINS}:YoungestPolicy", 5)
    assert isinstance(own, GuardedPolicy)
    cache = Cache(own, 3)
    cache.hits(range(4))
    assert cache.there == {key(0), key(1), key(3)}
    assert own.problem == ""


@pytest.mark.parametrize(
    "name",
    [
        *(
            "",
            "best",
            "no.such.module:P",
            ":x",
            "services.kvbm.tiers.policies:nothing",
            "services.kvbm.tiers.policies:DEFAULT",
        ),
        *(f"{PLUGINS}:UnmakablePolicy", f"{PLUGINS}:WordlessPolicy", "tests.router.module_that_fails:P"),
    ],
)
def test_what_is_no_policy_is_a_config_error(name: str) -> None:
    with pytest.raises(ConfigError, match="eviction policy"):
        make_policy(name, 5)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("LeavingPolicy", "SystemExit: 3"),
        ("ForgetfulPolicy", "ValueError: ?"),
        ("StubbornPolicy", "it named no block, where one may go"),
        ("RuthlessPolicy", "it named a block that may not go"),
        ("InventivePolicy", "it named a block that may not go"),
        ("NamingPolicy", "it named a block that may not go"),
        ("DeafPolicy", "TypeError: DeafPolicy.backed() takes 1 positional argument but 3 were given"),
    ],
)
def test_a_policy_that_fails_is_off_and_lru_takes_over_with_all_calls_so_far(name: str, problem: str) -> None:
    own = make_policy(f"{PLUGINS}:{name}", 3)
    assert isinstance(own, GuardedPolicy)
    cache = Cache(own, 3)
    cache.hits(range(3))
    cache.asked(0)
    own.backed(key(0), True)
    pinned = frozenset({key(0)})
    cache.asked(5, pinned)
    assert own.problem == problem
    assert cache.there == {key(0), key(2), key(5)}
    cache.hits(range(10, 13))
    assert cache.there == {key(10), key(11), key(12)}


def test_a_policy_that_names_no_block_where_none_may_go_has_not_failed() -> None:
    own = make_policy(f"{PLUGINS}:StubbornPolicy", 3)
    assert isinstance(own, GuardedPolicy)
    cache = Cache(own, 3)
    cache.hits(range(3))
    assert not cache.evict(frozenset(cache.there))
    assert own.problem == ""
