"""A flood of bad input is one line in the log."""

from __future__ import annotations

import logging

import pytest

from services.router.rate_limited_log import Seldom


def test_a_subject_is_warned_of_once_and_another_is_not_silenced_by_it(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    seldom = Seldom(lambda: now_s)
    with caplog.at_level(logging.WARNING):
        for _ in range(100):
            seldom.warn("events of a", "torn")
            seldom.warn("events of b", "torn")
        assert [record.getMessage().split(":")[0] for record in caplog.records] == ["events of a", "events of b"]
        now_s = 60.0
        seldom.warn("events of a", "torn again")
    assert "torn again" in caplog.records[-1].getMessage()
