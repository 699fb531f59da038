from __future__ import annotations

from shared.tracing.sampler import DoorSampler
from shared.tracing.traceparent import TraceParent

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
