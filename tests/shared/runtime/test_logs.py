"""Each log record is one line."""

from __future__ import annotations

import logging
import sys

import pytest

from shared.errors import ConfigError
from shared.runtime import logs


def record(message: str, **more: object) -> logging.LogRecord:
    made = logging.LogRecord("some.module", logging.WARNING, __file__, 1, message, None, None)
    made.__dict__.update(more)
    return made


def test_a_line_names_the_process_and_the_request() -> None:
    line = logs.LogLine("router", "0a").format(record('said "no"', request="r-1"))
    assert line.endswith(
        'level=warning service=router instance=0a logger=some.module message="said \\"no\\"" request="r-1"'
    )
    assert line.startswith("time=20")


def test_a_line_about_a_traced_request_names_the_trace_last() -> None:
    line = logs.LogLine("router", "0a").format(record("said", request="r-1", trace="4bf9"))
    assert line.endswith('message="said" request="r-1" trace="4bf9"')
    assert logs.LogLine("router", "0a").format(record("said", trace="4bf9")).endswith('message="said" trace="4bf9"')


def test_line_breaks_do_not_forge_a_second_line() -> None:
    assert "\n" not in logs.LogLine("router", "0a").format(record("one\ntime=forged", request="a\nb"))


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise ValueError("a bug")
    except ValueError:
        line = logs.LogLine("router", "0a").format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: a bug" in line


def test_an_unknown_level_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="chatty"):
        logs.start("router", "0a", "chatty")
