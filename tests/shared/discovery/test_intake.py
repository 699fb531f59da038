"""shared/discovery/intake.py: the limits of what a watcher takes in."""

from __future__ import annotations

from collections.abc import AsyncIterator

from hypothesis import given
from hypothesis import strategies as st

from shared.discovery.intake import Intake, IntakeLimits
from shared.errors import ProtocolError

KEYS = st.sampled_from("abcdef")
VALUES = st.sampled_from([b"1", b"2", b"junk", b"123456"])


def read(key: str, value: bytes) -> None:
    if value == b"junk":
        raise ProtocolError("junk")


def intake() -> Intake:
    return Intake(read, IntakeLimits(entries=2, value_bytes=4))


def test_a_key_is_left_out_for_its_size_for_what_it_says_and_for_want_of_a_place() -> None:
    one = intake()
    one.load({"a": b"123456", "b": b"junk", "c": b"1", "d": b"1", "e": b"1"})
    assert one.entries == {"c": b"1", "d": b"1"}
    assert (one.left_out.count, one.left_out.key) == (3, "e")
    assert one.left_out.why == "there are 2 older keys, which is the limit"
    one.put("a", b"123456")
    assert one.left_out.why == "its value has 6 bytes, more than 4"
    one.put("b", b"junk")
    assert one.left_out.why == "junk"


async def pages(*pages: list[tuple[int, str, bytes]]) -> AsyncIterator[list[tuple[int, str, bytes]]]:
    for page in pages:
        yield page


async def test_pages_in_any_order_give_the_oldest_keys() -> None:
    one = intake()
    await one.load_pages(pages([(5, "a", b"5"), (6, "b", b"6")], [(7, "c", b"7"), (1, "d", b"1")], [(2, "e", b"2")]))
    assert list(one.entries.items()) == [("d", b"1"), ("e", b"2")]
    assert one.left_out.count == 3


def test_a_look_is_due_once_a_place_is_free_and_something_waits_for_one() -> None:
    one = intake()
    one.load({"a": b"1", "b": b"1"})
    assert not one.put("c", b"1")
    assert not one.reload_due
    assert one.remove("a")
    assert one.reload_due
    one.load({"b": b"1", "c": b"1"})
    assert not one.reload_due
    one.remove("b")
    assert not one.reload_due


def test_what_is_left_out_again_unchanged_is_not_counted_again() -> None:
    one = intake()
    one.load({"a": b"junk"})
    one.load({"a": b"junk", "b": b"1"})
    assert one.left_out.count == 1
    one.load({"a": b"123456", "b": b"1"})
    assert one.left_out.count == 2


@given(st.lists(st.tuples(KEYS, VALUES | st.none())))
def test_changes_and_looks_at_everything_come_to_the_same(steps: list[tuple[str, bytes | None]]) -> None:
    stored: dict[str, bytes] = {}
    one = intake()
    for key, value in steps:
        before = dict(one.entries)
        if value is None:
            stored.pop(key, None)
            changed = one.remove(key)
        else:
            stored[key] = value
            changed = one.put(key, value)
        assert changed or one.entries == before
        if one.reload_due:
            one.load(dict(stored))
        one.validate()
        assert one.entries.items() <= stored.items()
        readable = [value for value in stored.values() if value in (b"1", b"2")]
        assert len(one.entries) == min(2, len(readable))
