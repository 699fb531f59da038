from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tracing.traceparent import LIMIT_CHARACTERS, TraceParent, carried, of_client, parse

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"
HEX = st.text("0123456789abcdef", min_size=1)


def test_a_sampled_and_an_unsampled_one_are_read() -> None:
    assert parse([GOOD]) == TraceParent(TRACE, SPAN, sampled=True)
    assert parse([f"00-{TRACE}-{SPAN}-00"]) == TraceParent(TRACE, SPAN, sampled=False)


def test_only_the_last_bit_of_the_flags_says_sampled() -> None:
    assert parse([f"00-{TRACE}-{SPAN}-fe"]) == TraceParent(TRACE, SPAN, sampled=False)
    assert parse([f"00-{TRACE}-{SPAN}-03"]) == TraceParent(TRACE, SPAN, sampled=True)


def test_a_later_version_may_append_fields() -> None:
    assert parse([f"cc-{TRACE}-{SPAN}-01-what-the-future-brings"]) == TraceParent(TRACE, SPAN)
    assert parse([f"cc-{TRACE}-{SPAN}-01"]) == TraceParent(TRACE, SPAN)
    assert parse([f"cc-{TRACE}-{SPAN}-01.what"]) is None


@pytest.mark.parametrize(
    "wrong",
    [
        "",
        GOOD[:-1],
        f"{GOOD}0",
        f"{GOOD}-",
        f" {GOOD}",
        f"{GOOD}\n",
        GOOD.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00-{TRACE[:-1]}٣-{SPAN}-01",
        f"0-{TRACE}-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * LIMIT_CHARACTERS,
        "0" * 10_000,
    ],
)
def test_a_malformed_one_is_refused(wrong: str) -> None:
    assert parse([wrong]) is None


def test_several_are_refused_even_if_they_agree() -> None:
    assert parse([GOOD, GOOD]) is None
    assert parse([]) is None


@given(st.text(max_size=300))
def test_nothing_but_hex_digits_goes_on(text: str) -> None:
    found = parse([text])
    if found is not None:
        assert set(found.trace + found.span) <= set("0123456789abcdef")
        assert (len(found.trace), len(found.span)) == (32, 16)


@given(HEX, HEX, st.booleans())
def test_what_is_written_is_read_again(trace: str, span: str, sampled: bool) -> None:
    place = TraceParent(trace[:32].rjust(32, "1"), span[:16].rjust(16, "1"), sampled)
    if int(place.trace, 16) and int(place.span, 16):
        assert parse([place.header]) == place
        assert carried(place.headers) == place


def test_a_message_without_the_header_carries_nothing() -> None:
    assert carried({}) is None
    assert carried({"traceparent": "nonsense"}) is None


def test_a_nats_client_may_write_it_in_two_ways_but_not_in_both() -> None:
    assert of_client({"Traceparent": GOOD}) == of_client({"traceparent": GOOD}) == [GOOD]
    assert parse(of_client({"Traceparent": GOOD, "traceparent": GOOD})) is None
