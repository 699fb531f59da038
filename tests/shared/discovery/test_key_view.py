"""shared/discovery/key_view.py: the keys of a watcher through outages."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from shared.discovery.contract import Change, KeyAdded, KeyRemoved, OwnerAnswer, Synced
from shared.discovery.key_view import KeyView

TTL_S = 10.0
KEYS = st.sampled_from(["a", "b", "c"])
VALUES = st.sampled_from([b"1", b"2"])
OWNERS: st.SearchStrategy[OwnerAnswer] = st.sampled_from(["publishes", "answers", "silent", "gone"])


def test_the_first_listing_is_reported_completely_and_then_synced() -> None:
    view = KeyView(TTL_S)
    assert view.update(0.0, {"b": b"1", "a": b"2"}, 0) == [KeyAdded("b", b"1"), KeyAdded("a", b"2"), Synced()]


@pytest.mark.parametrize("owner", ["gone", "answers"])
def test_of_a_key_that_is_seen_to_go_the_owner_is_asked_at_once_and_it_goes_if_the_answer_does_not_name_it(
    owner: OwnerAnswer,
) -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    assert view.update(1.0, {}, 0) == []
    assert view.keys_to_verify(1.0) == {"a": b"1"}
    assert view.apply_owner_answers(1.0, {"a": owner}) == [KeyRemoved("a")]


def test_a_key_that_is_seen_to_go_stays_while_its_owner_says_that_it_publishes_it() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    view.update(1.0, {}, 0)
    assert view.apply_owner_answers(1.0, {"a": "publishes"}) == []
    assert view.next_due == 11.0
    assert view.update(2.0, {"a": b"2"}, 0) == [KeyAdded("a", b"2")]
    assert view.next_due is None
    view.update(3.0, {}, 0)
    assert view.apply_owner_answers(3.0, {"a": "publishes"}) == []
    assert view.apply_owner_answers(13.0, {"a": "gone"}) == [KeyRemoved("a")]


def test_a_silent_owner_has_a_ttl_to_publish_its_key_again() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1", "b": b"1"}, 0)
    view.update(1.0, {}, 0)
    assert view.apply_owner_answers(2.0, {"a": "silent", "b": "silent"}) == []
    assert view.keys_to_verify(11.9) == {}
    assert view.update(3.0, {"a": b"2"}, 0) == [KeyAdded("a", b"2")]
    assert view.keys_to_verify(12.0) == {"b": b"1"}
    assert view.apply_owner_answers(12.0, {"b": "silent"}) == [KeyRemoved("b")]


def test_a_silence_counts_only_after_another_one_of_the_same_absence() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    view.update(1.0, {}, 0)
    assert view.apply_owner_answers(1.0, {"a": "silent"}) == []
    assert view.apply_owner_answers(11.0, {"a": "publishes"}) == []
    assert view.apply_owner_answers(21.0, {"a": "silent"}) == []
    view.update(22.0, {"a": b"2"}, 0)
    view.update(23.0, {}, 0)
    assert view.apply_owner_answers(23.0, {"a": "silent"}) == []
    assert view.apply_owner_answers(33.0, {"a": "silent"}) == [KeyRemoved("a")]


def test_a_key_that_was_seen_to_go_before_an_outage_is_in_doubt_after_it() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    view.update(1.0, {}, 0)
    view.apply_owner_answers(1.0, {"a": "publishes"})
    view.mark_unreachable()
    view.update(5.0, {}, 1)
    assert view.next_due == 15.0
    assert view.apply_owner_answers(15.0, {"a": "silent"}) == []


def test_after_an_outage_a_missing_key_stays_for_one_ttl_and_goes_if_its_owner_is_silent() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    assert view.update(1.0, {}, 1) == []
    assert view.keys_to_verify(10.9) == {}
    assert view.keys_to_verify(11.0) == {"a": b"1"}
    assert view.apply_owner_answers(11.0, {"a": "gone"}) == [KeyRemoved("a")]


def test_a_missing_key_whose_owner_answers_is_asked_again_each_ttl() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    view.update(1.0, {}, 1)
    assert view.apply_owner_answers(11.0, {"a": "silent"}) == []
    assert view.next_due == 21.0
    assert view.apply_owner_answers(21.0, {"a": "gone"}) == [KeyRemoved("a")]


def test_a_missing_key_that_comes_back_unchanged_is_not_reported() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    view.update(1.0, {}, 1)
    assert view.update(2.0, {"a": b"1"}, 1) == []
    assert view.next_due is None


def test_what_goes_within_a_ttl_after_an_outage_is_missing_too() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    view.update(1.0, {"a": b"1"}, 1)
    assert view.update(10.9, {}, 1) == []
    assert view.next_due == 20.9


def test_no_owner_is_asked_while_the_back_end_is_out_of_reach() -> None:
    view = KeyView(TTL_S)
    view.update(0.0, {"a": b"1"}, 0)
    view.update(1.0, {}, 1)
    view.mark_unreachable()
    assert view.next_due is None
    assert view.keys_to_verify(100.0) == {}
    assert view.update(100.0, {}, 2) == []
    assert view.next_due == 110.0


class Watching(RuleBasedStateMachine):
    """A back end that changes, is lost and found: the reported changes must add up, and no live owner's key may be
    removed."""

    def __init__(self) -> None:
        super().__init__()
        self.view = KeyView(TTL_S)
        self.now = 0.0
        self.stored: dict[str, bytes] = {}
        self.away = True
        self.losses = 0
        self.lost_at = float("-inf")
        self.reported: dict[str, bytes] = {}
        self.synced = 0

    def take(self, changes: Iterable[Change]) -> None:
        for change in changes:
            match change:
                case KeyAdded():
                    assert self.reported.get(change.key) != change.value
                    self.reported[change.key] = change.value
                case KeyRemoved():
                    assert change.key not in self.stored
                    del self.reported[change.key]
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
        self.view.mark_unreachable()

    @rule()
    def look(self) -> None:
        if self.away:
            self.lost_at = self.now
        self.away = False
        told_before = dict(self.reported)
        self.take(self.view.update(self.now, dict(self.stored), self.losses))
        assert self.synced == 1
        assert {key: self.reported[key] for key in self.stored} == self.stored
        assert self.reported.keys() - self.stored.keys() == self.view.missing.keys()
        if self.losses and self.now < self.lost_at + TTL_S:
            assert told_before.keys() <= self.reported.keys()

    @rule(owners=st.fixed_dictionaries(dict.fromkeys("abc", OWNERS)))
    def ask(self, owners: dict[str, OwnerAnswer]) -> None:
        due = self.view.keys_to_verify(self.now)
        assert not (due and self.away)
        # In truth nobody is asked of whom the view does not know that the key is gone.
        asked = [key for key in due if key not in self.stored]
        seen_to_go, silent_before = set(self.view.deleted_in_sight), set(self.view.silent)
        self.take(self.view.apply_owner_answers(self.now, {key: owners[key] for key in asked}))
        for key in asked:
            kept = {
                "publishes": True,
                "answers": key not in seen_to_go,
                "silent": key not in silent_before,
                "gone": False,
            }[owners[key]]
            assert (key in self.reported) == kept

    @invariant()
    def holds(self) -> None:
        self.view.validate()
        assert self.reported == self.view.entries


TestWatching = Watching.TestCase
TestWatching.settings = settings(max_examples=60, stateful_step_count=30)
