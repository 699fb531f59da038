"""Each log record is one line."""

from __future__ import annotations

import asyncio
import json
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


def test_a_process_that_becomes_another_instance_logs_as_that_one() -> None:
    line = logs.LogLine("worker", "0a")
    line.change_instance("0b", "0c")  # a process of several services logs as its first one
    assert " instance=0a " in line.format(record("said"))
    line.change_instance("0a", "0c")
    assert " instance=0c " in line.format(record("said"))


def test_line_breaks_do_not_forge_a_second_line() -> None:
    assert "\n" not in logs.LogLine("router", "0a").format(record("one\ntime=forged", request="a\nb"))


def test_a_traceback_stays_in_its_line() -> None:
    try:
        raise ValueError("a bug")
    except ValueError:
        line = logs.LogLine("router", "0a").format(record("failed", exc_info=sys.exc_info()))
    assert "\n" not in line
    assert "ValueError: a bug" in line


def test_a_record_may_be_one_json_object_with_the_same_in_it() -> None:
    fields = {"status": 503, "key": 'a"b', "level": "forged"}
    told = record("one\ntwo", request="r-1", trace="t-1", fields=fields)
    line = logs.JsonLine("worker", "0a", model="smollm").format(told)
    assert "\n" not in line
    found = json.loads(line)
    assert found.pop("time").startswith("20")
    assert found == {
        "level": "warning",
        "service": "worker",
        "instance": "0a",
        "model": "smollm",
        "logger": "some.module",
        "message": "one\ntwo",
        "request": "r-1",
        "trace": "t-1",
        "fields": fields,
    }
    text = logs.LogLine("worker", "0a", model="smollm").format(told)
    assert text.endswith('message="one\\ntwo" request="r-1" trace="t-1" status=503 key="a\\"b" level="forged"')


def test_long_texts_are_cut() -> None:
    for form in (logs.LogLine, logs.JsonLine):
        for told in (record("x" * 1_000_000), record("x", fields={"model": "x" * 1_000_000})):
            assert len(form("router", "0a").format(told)) < 2 * logs.TEXT_LIMIT_CHARACTERS


@pytest.mark.parametrize("form", [logs.LogLine, logs.JsonLine])
@pytest.mark.parametrize("wild", ["\x85", "\u2028", "\x9b31m", "\x1b[31m", "\ud800", "\r", "\x7f"])
def test_what_ends_a_line_or_controls_a_terminal_is_escaped(form: type[logs.LogLine], wild: str) -> None:
    line = form("router", "0a").format(record(f"a{wild}b", request=wild, fields={"model": f"é{wild}"}))
    assert len(line.splitlines()) == 1
    assert line.isprintable()
    assert line.encode().decode() == line
    assert "é" in line
    if form is logs.JsonLine:
        assert json.loads(line)["fields"]["model"] == f"é{wild}"


async def test_the_level_changes_and_falls_back() -> None:
    root = logging.getLogger()
    before, level = root.level, logs.LogLevel()
    try:
        root.setLevel(logging.WARNING)
        assert level.change("debug", 0.05) == ""
        assert level.change("info", 0.05) == "", "the later one counts, and falls back to what was before both"
        assert root.level == logging.INFO
        for _ in range(6000):
            if root.level != logging.WARNING:
                await asyncio.sleep(0.01)
        assert root.level == logging.WARNING
        assert level.change("error") == ""
        assert root.level == logging.ERROR
        assert "'loud' is not one of debug, info" in level.change("loud")
        assert level.change("info", -1) == "for_s: 0 to 86400 seconds"
        assert root.level == logging.ERROR
    finally:
        root.setLevel(before)


def test_an_unknown_level_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="chatty"):
        logs.start("router", "0a", "chatty")
