"""deploy/local/route/reflector.py: lists, watches, and what is not understood."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from deploy.local.route import reflector
from deploy.local.route.pool import Pod
from deploy.local.route.reflector import EXPIRED, FIRST_DELAY_S, LAST_DELAY_S, Reflector, delay_s
from shared.errors import Unavailable

NAMES = st.sampled_from("abcdef")


def listed(*names: str, version: str = "1", more: str = "") -> bytes:
    items = [{"metadata": {"name": name}} for name in names]
    return json.dumps({"metadata": {"resourceVersion": version, "continue": more}, "items": items}).encode()


def event(kind: str, name: str, version: str) -> bytes:
    return json.dumps({"type": kind, "object": {"metadata": {"name": name, "resourceVersion": version}}}).encode()


def test_a_list_and_the_events_after_it_are_the_objects() -> None:
    pods = Reflector(Pod)
    pods.listed(listed("a", "b", version="5"))
    assert (sorted(pods.objects), pods.version, pods.synced) == (["a", "b"], "5", True)
    for line in (event("ADDED", "c", "6"), event("MODIFIED", "b", "7"), event("DELETED", "a", "8")):
        assert pods.watched(line)
    assert (sorted(pods.objects), pods.version) == (["b", "c"], "8")
    assert pods.watched(b'{"type":"BOOKMARK","object":{"kind":"Pod","metadata":{"resourceVersion":"20"},"spec":null}}')
    assert (sorted(pods.objects), pods.version) == (["b", "c"], "20")


def test_a_version_that_is_too_old_is_followed_by_a_list_and_the_objects_stay() -> None:
    pods = Reflector(Pod)
    pods.listed(listed("a"))
    assert not pods.watched(EXPIRED)
    assert (pods.version, list(pods.objects), pods.fault) == ("", ["a"], "")
    pods.listed(listed("b", version="9"))
    assert (pods.version, list(pods.objects)) == ("9", ["b"])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"{", "its watch of Pods is not understood: Input data was truncated"),
        (b'{"type":"ADDED","object":{"metadata":7}}', "its watch of Pods is not understood: Expected `object`"),
        (
            b'{"type":"ERROR","object":{"code":500,"message":"etcd is away"}}',
            "its watch of Pods ended: 500 etcd is away",
        ),
    ],
)
def test_an_event_that_is_not_understood_is_named_and_followed_by_a_list(line: bytes, said: str) -> None:
    pods = Reflector(Pod)
    pods.listed(listed("a"))
    with pytest.raises(Unavailable) as wrong:
        pods.watched(line)
    assert str(wrong.value).startswith(said)
    assert (pods.version, list(pods.objects)) == ("", ["a"])


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"<html>", "its list of Pods is none: JSON is malformed"),
        (b'{"items": [{"metadata": {"name": "\xff"}}]}', "its list of Pods is none: "),
        (b'{"items": ' + b"[" * 200_000, "its list of Pods is none: "),
        (listed("a", version=""), "its list of Pods has no resourceVersion"),
        (listed("a", more="b"), "more than 500 Pods are selected"),
    ],
)
def test_a_list_that_cannot_be_used_is_named_and_changes_nothing(answer: bytes, said: str) -> None:
    pods = Reflector(Pod)
    with pytest.raises(Unavailable, match=said):
        pods.listed(answer)
    assert not pods.synced


def test_more_objects_than_the_most_are_refused_in_lists_and_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "MOST_OBJECTS", 2)
    pods = Reflector(Pod)
    with pytest.raises(Unavailable, match="more than 2 Pods are selected"):
        pods.listed(listed("a", "b", "c"))
    pods.listed(listed("a", "b"))
    with pytest.raises(Unavailable, match="more than 2 Pods are selected"):
        pods.watched(event("ADDED", "c", "2"))
    assert (list(pods.objects), pods.version) == (["a", "b"], "")
    pods.validate()


@given(st.integers(0, 1000), st.floats(0, 1))
def test_the_time_between_questions_grows_with_failures_and_never_beyond_its_most(failures: int, draw: float) -> None:
    delay = delay_s(failures, draw)
    assert FIRST_DELAY_S / 2 <= delay <= LAST_DELAY_S
    assert delay <= FIRST_DELAY_S * 2**failures


class Machine(RuleBasedStateMachine):
    """A reflector has what the server has, as soon as it has followed."""

    def __init__(self) -> None:
        super().__init__()
        self.pods = Reflector(Pod)
        self.there: set[str] = set()
        self.version = 1
        self.missed: list[bytes] = []
        self.forgotten = False

    def change(self, kind: str, name: str) -> None:
        self.version += 1
        self.missed.append(event(kind, name, str(self.version)))

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        self.change("MODIFIED" if name in self.there else "ADDED", name)
        self.there.add(name)

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        if name in self.there:
            self.there.remove(name)
            self.change("DELETED", name)

    @rule()
    def forget(self) -> None:
        self.forgotten = True

    @rule(why=st.text(max_size=5))
    def fail(self, why: str) -> None:
        self.pods.failed(why)

    @rule()
    def follow(self) -> None:
        if self.pods.version and self.forgotten:
            assert not self.pods.watched(EXPIRED)
        if not self.pods.version:
            self.pods.listed(listed(*self.there, version=str(self.version)))
        else:
            assert all(self.pods.watched(line) for line in self.missed)
        self.pods.watching()
        self.missed, self.forgotten = [], False
        assert set(self.pods.objects) == self.there
        assert (self.pods.version, self.pods.fault) == (str(self.version), "")

    @invariant()
    def holds(self) -> None:
        self.pods.validate()


TestMachine = Machine.TestCase
