"""worker/kv_connector/link_log.py: the last line is true after a minute at most, and there is no flood."""

from __future__ import annotations

import logging

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from services.worker.contracts.messages import KvbmLink
from services.worker.kv_connector.link_log import LINES_S, LOG_AFTER_S, MOST_LINES, LinkLog, of_another_namespace

CLOSED = KvbmLink("", "", "/pool/socket: the kvbm has closed the connection")
AWAY = KvbmLink("", "", "/pool/socket: no kvbm listens")
FULL = KvbmLink("", "", "attach: no_arena: all 1 are in use")
UP = KvbmLink("k1", "5eed")
LINKS = (UP, KvbmLink("k2", "5eed"), CLOSED, AWAY, FULL, KvbmLink("", "", "attach: not_ready: 3 % are made"))


@pytest.fixture(autouse=True)
def _all_levels(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


class Logged:
    """A LinkLog on a clock of its own, and the lines in the log."""

    def __init__(self, caplog: pytest.LogCaptureFixture, namespace: str = "") -> None:
        self._caplog = caplog
        self._log = LinkLog(namespace)
        self.now_s = 100.0
        self.lines_s: list[float] = []
        caplog.clear()
        self._look()

    @property
    def lines(self) -> list[str]:
        return [record.getMessage() for record in self._caplog.records]

    def take(self, link: KvbmLink) -> None:
        self._log.take(link, self.now_s)
        self._note()

    def wait(self, seconds: int) -> None:
        """Let time pass; LinkLog looks each second."""
        for _ in range(seconds):
            self.now_s += 1.0
            self._look()

    def _look(self) -> None:
        self._log.look(self.now_s)
        self._note()

    def _note(self) -> None:
        self.lines_s += [self.now_s] * (len(self.lines) - len(self.lines_s))


def test_a_second_outage_soon_after_the_first_is_in_the_log_as_long_as_it_lasts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = Logged(caplog)
    log.take(UP)
    for kvbm in ("k2", "k3"):
        log.wait(20)
        log.take(CLOSED)
        log.take(AWAY)
        log.wait(20)
        assert log.lines[-2:] == [f"no blocks are exchanged: {link.reason}" for link in (CLOSED, AWAY)]
        log.take(KvbmLink(kvbm, "5eed"))
        assert log.lines[-1] == f"blocks are exchanged with kvbm {kvbm}, layout 5eed"
    log.take(CLOSED)
    log.take(AWAY)
    log.wait(3600)
    assert log.lines[-1] == f"no blocks are exchanged: {AWAY.reason}"
    assert log.lines.count(log.lines[-1]) == 3, "that none is up is not said twice"


def test_a_reason_that_comes_back_is_the_last_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog)
    for link in (AWAY, FULL, AWAY):
        log.take(link)
        log.wait(10)
    assert log.lines == [f"no blocks are exchanged: {link.reason}" for link in (AWAY, FULL, AWAY)]


def test_services_may_start_in_any_order(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog)
    log.take(AWAY)
    log.wait(int(LOG_AFTER_S) - 1)
    log.take(UP)
    log.wait(100)
    assert log.lines == ["blocks are exchanged with kvbm k1, layout 5eed"]


def test_details_of_a_reason_are_logged_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog)
    for percent in range(100):
        log.take(KvbmLink("", "", f"attach: not_ready: {percent} % are made"))
        log.wait(1)
    shown = [f"no blocks are exchanged: attach: not_ready: {percent} % are made" for percent in (4, 64)]
    assert log.lines == shown


def test_a_link_that_comes_and_goes_makes_no_flood(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog)
    for _ in range(600):
        log.take(UP)
        log.take(CLOSED)
        log.wait(1)
    assert MOST_LINES <= len(log.lines) <= MOST_LINES * 11


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(LINKS), st.integers(0, 40)), min_size=1, max_size=30))
def test_whatever_happens_the_last_line_is_true_after_a_minute_and_there_are_few(
    caplog: pytest.LogCaptureFixture, events: list[tuple[KvbmLink, int]]
) -> None:
    log = Logged(caplog)
    for link, seconds in events:
        log.take(link)
        log.wait(seconds)
    log.wait(int(LINES_S))
    said = log.lines[-1]
    assert (link.reason or f"blocks are exchanged with kvbm {link.kvbm}, layout {link.layout}") in said
    assert said.startswith("no ") == (not link.kvbm)
    for first, last in zip(log.lines_s, log.lines_s[MOST_LINES:], strict=False):
        assert last - first >= LINES_S


def test_a_kvbm_of_another_namespace_is_named_once_for_each_link(caplog: pytest.LogCaptureFixture) -> None:
    log = Logged(caplog, namespace="a")
    other = KvbmLink("k1", "5eed", namespace="b")
    for _ in range(2):
        log.take(other)
        log.wait(100)
        assert log.lines[-1] == of_another_namespace(other, "a")
        assert caplog.records[-1].levelno == logging.WARNING
        log.take(CLOSED)
    assert len(log.lines) == 4
    assert "kvbm k1 of namespace b" in log.lines[0]
    assert "routers of namespace a" in log.lines[0]


@pytest.mark.parametrize(("kvbms", "own"), [("a", "a"), ("", "a"), ("b", ""), ("", "")])
def test_the_same_namespace_and_an_unknown_one_are_not_named(kvbms: str, own: str) -> None:
    assert of_another_namespace(KvbmLink("k1", "5eed", namespace=kvbms), own) == ""
    assert of_another_namespace(KvbmLink("", "", "no kvbm listens", namespace=kvbms), own) == ""
