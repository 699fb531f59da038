from __future__ import annotations

from prometheus_client import CollectorRegistry, Histogram

from services.frontend.requests.cancel_latency import LIMIT, CancelLatency
from services.frontend.requests.session import ClientGone, Session
from shared.messages import Accepted, Overlap, Selected


def measured() -> tuple[CancelLatency, CollectorRegistry]:
    registry = CollectorRegistry()
    return CancelLatency(Histogram("seconds", "", registry=registry)), registry


def offered(request: str) -> Session:
    session = Session(request, 8)
    session.start()
    session.on(Selected(request, 1, "w1", 0, "r1", Overlap(), "first"))
    return session


def test_a_cancellation_lasts_until_the_worker_tells_the_attempts_end() -> None:
    withdrawals, registry = measured()
    session = offered("a")
    session.on(Accepted("a", 1))
    withdrawals.client_gone(session, 10.0)
    session.on(ClientGone())
    withdrawals.attempt_ended("a", 2, 10.1)
    withdrawals.attempt_ended("b", 1, 10.1)
    assert registry.get_sample_value("seconds_count") == 0
    withdrawals.attempt_ended("a", 1, 10.25)
    withdrawals.attempt_ended("a", 1, 11.0)
    assert registry.get_sample_value("seconds_count") == 1
    assert registry.get_sample_value("seconds_sum") == 0.25
    withdrawals.validate()


def test_what_no_worker_has_and_what_has_ended_is_not_measured() -> None:
    withdrawals, registry = measured()
    choosing = Session("a", 8)
    choosing.start()
    withdrawals.client_gone(choosing, 1.0)
    ended = offered("b")
    ended.on(ClientGone())
    withdrawals.client_gone(ended, 1.0)
    for request in "ab":
        withdrawals.attempt_ended(request, 1, 2.0)
    assert registry.get_sample_value("seconds_count") == 0


def test_attempts_whose_workers_never_tell_are_forgotten_at_the_bound() -> None:
    withdrawals, registry = measured()
    for number in range(LIMIT + 1):
        withdrawals.client_gone(offered(str(number)), 1.0)
        withdrawals.validate()
    withdrawals.attempt_ended("0", 1, 2.0)
    assert registry.get_sample_value("seconds_count") == 0
    withdrawals.attempt_ended("1", 1, 2.0)
    assert registry.get_sample_value("seconds_count") == 1
