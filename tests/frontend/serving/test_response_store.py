"""The responses that one frontend stores are limited, shared fairly, and private to their account."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from services.frontend.serving.response_store import Dropped, ResponseStore, StoredResponse


def kept(name: str, account: str = "", size: int = 10) -> StoredResponse:
    return StoredResponse(name, account, b"c" * (size // 2), b"r" * (size - size // 2))


def test_the_one_used_least_recently_makes_room() -> None:
    dropped: list[Dropped] = []
    store = ResponseStore(2, 100, 60.0, dropped.append)
    store.keep(kept("a"), 0.0)
    store.keep(kept("b"), 1.0)
    assert store.find("a", "", 2.0) == kept("a")
    store.keep(kept("c"), 3.0)
    assert store.find("b", "", 4.0) is None
    assert store.find("a", "", 4.0) is not None
    assert dropped == ["count"]


def test_bytes_are_bounded_and_what_alone_is_too_large_is_not_kept() -> None:
    dropped: list[Dropped] = []
    store = ResponseStore(10, 100, 60.0, dropped.append)
    store.keep(kept("a", size=60), 0.0)
    store.keep(kept("b", size=60), 0.0)
    assert (len(store), store.size_bytes, dropped) == (1, 60, ["bytes"])
    store.keep(kept("c", size=101), 0.0)
    assert (len(store), dropped) == (0, ["bytes"] * 3)


def test_an_account_with_its_equal_share_or_less_loses_nothing_to_one_that_wants_it_all() -> None:
    store = ResponseStore(4, 1000, 60.0)
    store.keep(kept("quiet 1", "quiet"), 0.0)
    store.keep(kept("quiet 2", "quiet"), 0.0)
    for number in range(100):
        store.keep(kept(f"greedy {number}", "greedy"), 1.0)
        store.validate()
    assert store.find("quiet 1", "quiet", 2.0) is not None
    assert store.find("quiet 2", "quiet", 2.0) is not None
    assert store.find("greedy 99", "greedy", 2.0) is not None


def test_another_accounts_response_is_unknown() -> None:
    store = ResponseStore(4, 1000, 60.0)
    store.keep(kept("a", "alice"), 0.0)
    assert store.find("a", "bob", 0.0) is None
    assert store.find("a", "", 0.0) is None
    assert not store.forget("a", "bob", 0.0)
    assert store.find("a", "alice", 0.0) is not None
    assert store.forget("a", "alice", 0.0)
    assert not store.forget("a", "alice", 0.0)


def test_a_response_that_was_not_used_for_too_long_is_removed() -> None:
    dropped: list[Dropped] = []
    store = ResponseStore(4, 1000, 60.0, dropped.append)
    store.keep(kept("a"), 0.0)
    store.keep(kept("b"), 0.0)
    assert store.find("a", "", 59.0) is not None
    assert store.find("b", "", 60.0) is None
    assert store.find("a", "", 118.0) is not None
    store.expire(178.0)
    assert (len(store), store.size_bytes, dropped) == (0, 0, ["age", "age"])


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.store = ResponseStore(5, 200, 10.0)
        self.now = 0.0
        self.made: dict[str, StoredResponse] = {}

    @rule(account=st.sampled_from(["a", "b", "c"]), size=st.integers(0, 220))
    def keep(self, account: str, size: int) -> None:
        one = kept(f"r{len(self.made)}", account, size)
        self.made[one.id] = one
        self.store.keep(one, self.now)

    @rule(number=st.integers(0, 20), account=st.sampled_from(["a", "b", "c"]))
    def find(self, number: int, account: str) -> None:
        found = self.store.find(f"r{number}", account, self.now)
        assert found is None or (found == self.made[f"r{number}"] and found.account == account)

    @rule(number=st.integers(0, 20), account=st.sampled_from(["a", "b", "c"]))
    def forget(self, number: int, account: str) -> None:
        had = self.store.find(f"r{number}", account, self.now)
        assert self.store.forget(f"r{number}", account, self.now) == (had is not None)
        assert self.store.find(f"r{number}", account, self.now) is None

    @rule(for_s=st.floats(0, 12))
    def wait(self, for_s: float) -> None:
        self.now += for_s

    @invariant()
    def valid(self) -> None:
        self.store.validate()


TestStore = StoreMachine.TestCase
TestStore.settings = settings(max_examples=50, stateful_step_count=30)
