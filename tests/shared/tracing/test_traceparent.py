from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tracing.traceparent import LIMIT_CHARACTERS, DoorSampler, TraceParent, carried, of_client, parse

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


ASKED = TraceParent("1" * 32, "2" * 16, sampled=True)
DECLINED = TraceParent("1" * 32, "2" * 16, sampled=False)


def test_the_share_of_requests_is_drawn() -> None:
    sampler = DoorSampler(0.25, "follow", 10)
    assert [sampler.decide(None, drawn, 0.0) for drawn in (0.0, 0.24, 0.25, 0.99)] == [True, True, False, False]


def test_all_and_none() -> None:
    assert DoorSampler(1.0, "follow", 0).decide(None, 0.999999, 0.0)
    assert not DoorSampler(0.0, "follow", 0).decide(None, 0.0, 0.0)


def test_a_client_decides_for_itself_up_to_a_bound() -> None:
    sampler = DoorSampler(0.0, "follow", 2)
    assert [sampler.decide(ASKED, 0.5, 10.0) for _ in range(4)] == [True, True, False, False]
    assert [sampler.decide(ASKED, 0.5, 10.5) for _ in range(2)] == [True, False]
    assert [sampler.decide(ASKED, 0.5, 99.0) for _ in range(3)] == [True, True, False]


def test_those_beyond_the_bound_are_drawn_as_others_are() -> None:
    sampler = DoorSampler(0.5, "follow", 0)
    assert sampler.decide(ASKED, 0.4, 0.0)
    assert not sampler.decide(ASKED, 0.6, 0.0)


def test_a_bound_below_one_a_second_lets_one_through_now_and_then() -> None:
    sampler = DoorSampler(0.0, "follow", 0.1)
    assert [sampler.decide(ASKED, 0.5, at) for at in (0.0, 5.0, 11.0)] == [True, False, True]


def test_a_clients_refusal_is_followed_unless_clients_are_ignored() -> None:
    assert not DoorSampler(1.0, "follow", 10).decide(DECLINED, 0.0, 0.0)
    assert DoorSampler(1.0, "ignore", 10).decide(DECLINED, 0.0, 0.0)
    assert not DoorSampler(0.0, "ignore", 10).decide(ASKED, 0.0, 0.0)


def test_a_clock_that_stands_still_gives_nothing() -> None:
    sampler = DoorSampler(0.0, "follow", 1)
    assert [sampler.decide(ASKED, 0.5, 7.0) for _ in range(3)] == [True, False, False]
