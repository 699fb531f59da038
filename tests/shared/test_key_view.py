"""shared/key_view.py: what a watcher believes through outages."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.discovery import Added, Change, Removed, Synced
from shared.key_view import KeyView

TTL_S = 10.0
KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from([b"1", b"2"])


def test_the_first_look_is_told_whole_and_then_synced() -> None:
    view = KeyView(TTL_S)
    assert view.seen(0.0, {"b": b"1", "a": b"2"}, 0) == [Added("b", b"1"), Added("a", b"2"), Synced()]


def test_without_an_outage_what_is_gone_is_gone_at_once() -> None:
    view = KeyView(TTL_S)
    view.seen(0.0, {"a": b"1"}, 0)
    assert view.seen(1.0, {}, 0) == [Removed("a")]


def test_after_an_outage_a_missing_key_stays_for_one_ttl_and_goes_if_its_owner_is_silent() -> None:
    view = KeyView(TTL_S)
    view.seen(0.0, {"a": b"1"}, 0)
    assert view.seen(1.0, {}, 1) == []
    assert view.due(10.9) == {}
    assert view.due(11.0) == {"a": b"1"}
    assert view.judged(11.0, {"a"}, {}) == [Removed("a")]


def test_a_missing_key_whose_owner_answers_is_asked_again_each_ttl() -> None:
    view = KeyView(TTL_S)
    view.seen(0.0, {"a": b"1"}, 0)
    view.seen(1.0, {}, 1)
    assert view.judged(11.0, {"a"}, {"a"}) == []
    assert view.next_due == 21.0
    assert view.judged(21.0, {"a"}, {}) == [Removed("a")]


def test_a_missing_key_that_comes_back_unchanged_is_not_told() -> None:
    view = KeyView(TTL_S)
    view.seen(0.0, {"a": b"1"}, 0)
    view.seen(1.0, {}, 1)
    assert view.seen(2.0, {"a": b"1"}, 1) == []
    assert view.next_due is None


def test_what_goes_within_a_ttl_after_an_outage_is_missing_too() -> None:
    view = KeyView(TTL_S)
    view.seen(0.0, {"a": b"1"}, 0)
    view.seen(1.0, {"a": b"1"}, 1)
    assert view.seen(10.9, {}, 1) == []
    assert view.next_due == 20.9


def test_nobody_is_asked_while_the_back_end_is_out_of_sight() -> None:
    view = KeyView(TTL_S)
    view.seen(0.0, {"a": b"1"}, 0)
    view.seen(1.0, {}, 1)
    view.lost()
    assert view.next_due is None
    assert view.due(100.0) == {}
    assert view.seen(100.0, {}, 2) == []
    assert view.next_due == 110.0


class Watching(RuleBasedStateMachine):
    """A back end that changes, is lost and found; what was told must add up, and nobody alive may be buried."""

    def __init__(self) -> None:
        super().__init__()
        self.view = KeyView(TTL_S)
        self.now = 0.0
        self.stored: dict[str, bytes] = {}
        self.away = True
        self.losses = 0
        self.lost_at = float("-inf")
        self.told: dict[str, bytes] = {}
        self.synced = 0

    def take(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case Added():
                    assert self.told.get(change.key) != change.value
                    self.told[change.key] = change.value
                case Removed():
                    assert change.key not in self.stored
                    del self.told[change.key]
                case Synced():
                    self.synced += 1

    @rule(key=KEYS, value=VALUES)
    def put(self, key: str, value: bytes) -> None:
        self.stored[key] = value

    @rule(key=KEYS)
    def delete(self, key: str) -> None:
        self.stored.pop(key, None)

    @rule(seconds=st.floats(0.1, 15.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: not self.away)
    @rule()
    def lose(self) -> None:
        self.away = True
        self.losses += 1
        self.view.lost()

    @rule()
    def look(self) -> None:
        if self.away:
            self.lost_at = self.now
        self.away = False
        told_before = dict(self.told)
        self.take(self.view.seen(self.now, dict(self.stored), self.losses))
        assert self.synced == 1
        assert {key: self.told[key] for key in self.stored} == self.stored
        assert self.told.keys() - self.stored.keys() == self.view.missing.keys()
        if self.losses and self.now < self.lost_at + TTL_S:
            assert told_before.keys() <= self.told.keys()

    @rule(alive=st.sets(KEYS))
    def ask(self, alive: set[str]) -> None:
        due = self.view.due(self.now)
        assert not (due and self.away)
        # In truth nobody is asked of whom the view does not know that the key is gone.
        asked = [key for key in due if key not in self.stored]
        self.take(self.view.judged(self.now, asked, alive))
        assert not (set(asked) - alive) & self.told.keys()
        assert set(asked) & alive <= self.told.keys()

    @invariant()
    def holds(self) -> None:
        self.view.validate()
        assert self.told == self.view.entries


TestWatching = Watching.TestCase
TestWatching.settings = settings(max_examples=60, stateful_step_count=30)
