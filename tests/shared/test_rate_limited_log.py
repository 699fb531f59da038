"""A flood of bad input is one line in the log."""

from __future__ import annotations

import asyncio
import logging

import pytest

from shared import rate_limited_log
from shared.rate_limited_log import INTERVAL_S, RateLimitedLog


async def test_a_key_is_logged_once_and_another_is_not_silenced_by_it(caplog: pytest.LogCaptureFixture) -> None:
    limited_log = RateLimitedLog()
    for _ in range(100):
        limited_log.warn("events of a", "torn")
        limited_log.error("events of b", "torn")
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["events of a", "events of b"]
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.ERROR]
    assert limited_log.count == 200


async def test_a_key_is_logged_again_in_the_next_interval_with_all_that_were_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = 0.0
    monkeypatch.setattr(asyncio.get_running_loop(), "time", lambda: now_s)
    limited_log = RateLimitedLog()
    limited_log.warn("events", "torn", 3)
    limited_log.warn("events", "torn")
    now_s = INTERVAL_S
    limited_log.warn("events", "torn again")
    assert [record.getMessage() for record in caplog.records] == [
        "events: torn (seen 3 times; logged every 60 s at most)",
        "events: torn again (seen 5 times; logged every 60 s at most)",
    ]


async def test_a_key_that_is_reset_is_logged_at_once(caplog: pytest.LogCaptureFixture) -> None:
    limited_log = RateLimitedLog()
    assert not limited_log.reset("file")
    for _ in range(2):
        limited_log.warn("file", "cannot be read")
        assert limited_log.reset("file")
    assert len(caplog.records) == 2


async def test_beyond_the_limit_the_key_that_was_logged_longest_ago_is_forgotten(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rate_limited_log, "KEYS_LIMIT", 2)
    limited_log = RateLimitedLog()
    for key in ("a", "b", "c", "c", "b", "a"):
        limited_log.warn(key, "torn")
    assert [record.getMessage()[0] for record in caplog.records] == ["a", "b", "c", "a"]
