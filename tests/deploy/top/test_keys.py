"""deploy/local/top/keys.py: bytes → keys → what the view shows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deploy.local.top.keys import FILTER_LIMIT, ORDERS, SEQUENCE_LIMIT, Controls, KeyReader, press

PIECES = st.sampled_from(
    [b"\x1b", b"[", b"O", b"A", b"B", b"5~", b"1;5", b"q", b"\xc3\xa9", b"\xe2\x82", b"\xff", b"\r"]
)
TYPED = st.lists(PIECES | st.binary(max_size=3), max_size=20).map(b"".join)


def keys_of(data: bytes) -> list[str]:
    reader = KeyReader()
    return [*reader.feed(data), *reader.flush()]


def after(text: str, page: int = 5, last: int = 20) -> Controls:
    controls = Controls()
    for key in keys_of(text.encode()):
        controls = press(controls, key, page, last)
    return controls


@given(TYPED, st.lists(st.integers(0, 80), max_size=6))
def test_any_splitting_of_the_bytes_gives_the_same_keys(data: bytes, cuts: list[int]) -> None:
    reader = KeyReader()
    ends = [*sorted(min(cut, len(data)) for cut in cuts), len(data)]
    split = [data[begin:end] for begin, end in zip([0, *ends], ends, strict=False)]
    assert [key for piece in split for key in reader.feed(piece)] + reader.flush() == keys_of(data)


@pytest.mark.parametrize(
    ("data", "keys"),
    [
        (b"qs/", ["q", "s", "/"]),
        (b"\x1b[A\x1bOA\x1b[B\x1bOB", ["up", "up", "down", "down"]),
        (b"\x1b[5~\x1b[6~\x1b[H\x1b[F", ["page up", "page down", "home", "end"]),
        (b"\r\n\x7f\x08\x03", ["enter", "enter", "backspace", "backspace", "interrupt"]),
        (b"\x1b", ["escape"]),
        (b"\x1b\x1b[A", ["escape", "up"]),
        (b"\x1bq", ["escape", "q"]),
        ("é漢".encode(), ["é", "漢"]),
        (b"\x00\x01\xff\xfeq\x9f", ["q"]),
        (b"\x1b[200~\x1b[1;5Cq", ["q"]),
        (b"\x1b[" + b"1" * 3 * SEQUENCE_LIMIT + b"Aq", ["q"]),
        (b"\x1b[5", []),
    ],
)
def test_keys(data: bytes, keys: list[str]) -> None:
    assert keys_of(data) == keys


def test_a_half_sequence_waits_for_its_rest() -> None:
    reader = KeyReader()
    assert reader.feed(b"\x1b") == []
    assert reader.pending
    assert reader.feed(b"[") == []
    assert reader.feed(b"6~") == ["page down"]
    assert not reader.pending


def test_q_and_ctrl_c_end_it_and_ctrl_c_also_in_a_filter() -> None:
    assert after("q").ended
    assert after("\x03").ended
    assert after("/\x03").ended
    assert not after("/q").ended


def test_orders_follow_each_other_and_are_turned_round() -> None:
    assert [after("s" * count).order for count in range(len(ORDERS) + 1)] == [*range(len(ORDERS)), 0]
    assert after("r") == Controls(reversed=True)
    assert after("rr") == Controls()
    assert after("rs") == Controls(order=1), "each order begins unturned"


def test_a_filter_is_typed_kept_mended_and_cleared() -> None:
    assert after("/ab") == Controls(filter="ab", typing=True)
    assert after("/abx\x7f\r") == Controls(filter="ab")
    assert after("/ab\r\x1b") == Controls()
    assert after("/ab\x1b") == Controls()
    assert after("/\x7f") == Controls(typing=True)
    assert after("/" + "x" * 100).filter == "x" * FILTER_LIMIT
    assert after("/sr?q\r").filter == "sr?q"


def test_help_comes_and_goes_and_leaves_the_filter() -> None:
    assert after("/a\r?") == Controls(filter="a", help=True)
    assert after("/a\rh\x1b") == Controls(filter="a")
    assert after("??") == Controls()


def test_scrolling_stays_within_the_workers() -> None:
    assert after("\x1b[A").offset == 0
    assert after("\x1b[B\x1b[B").offset == 2
    assert after("\x1b[6~").offset == 5
    assert after("\x1b[6~" * 9).offset == 20
    assert after("\x1b[F\x1b[5~").offset == 15
    assert after("\x1b[F\x1b[H").offset == 0
    assert after("\x1b[B", last=0).offset == 0
    assert after("\x1b[6~s").offset == 0, "another order begins at the top"


@given(st.lists(st.sampled_from(["up", "down", "page up", "end", "q", "s", "r", "/", "?", "x", "enter", "escape"])))
def test_controls_stay_within_their_limits(keys: list[str]) -> None:
    controls = Controls()
    for key in keys:
        controls = press(controls, key, 3, 7)
        assert 0 <= controls.order < len(ORDERS)
        assert 0 <= controls.offset <= 7
        assert len(controls.filter) <= FILTER_LIMIT
