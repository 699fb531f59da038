"""deploy/local/stack/engine_errors.py: which lines of a worker's log tell of an engine, and that none is read twice."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from deploy.local.stack.engine_errors import READ_LIMIT_BYTES, LogFollower, engine_error
from shared.runtime.logs import JsonLine, LogLine

LOST = 'the engine is lost (RankLost: "rank 1" was killed by signal 9 (SIGKILL)); starting another in 0.25 s'


def line(formatter: logging.Formatter, name: str, level: int, text: str) -> str:
    return formatter.format(logging.LogRecord(name, level, "", 1, text, None, None))


@pytest.mark.parametrize("formatter", [LogLine("worker", "w1", model="tiny"), JsonLine("worker", "w1", model="tiny")])
def test_errors_of_the_engine_are_found_in_both_formats_and_nothing_else_is(formatter: logging.Formatter) -> None:
    ours = "services.worker.engine.supervisor"
    assert engine_error(line(formatter, ours, logging.ERROR, LOST)) == LOST
    assert engine_error(line(formatter, ours, logging.INFO, LOST)) == ""
    assert engine_error(line(formatter, "services.worker.service", logging.ERROR, LOST)) == ""
    alone = "this engine reads its weights by itself: weights.memory, /run/w: no memory service answers"
    native = "services.worker.native.shared_weights"
    assert engine_error(line(formatter, native, logging.WARNING, alone)) == alone
    assert engine_error(line(formatter, native, logging.WARNING, "something else")) == ""
    assert engine_error(line(formatter, "services.worker.service", logging.WARNING, alone)) == ""
    quoted = line(formatter, ours, logging.ERROR, LOST)
    assert engine_error(line(formatter, "services.worker.service", logging.ERROR, quoted)) == "", "a line in a line"


@pytest.mark.parametrize("text", ["", "{", "{}", "[]", "Traceback", '{"logger": "services.worker.engine.x"}'])
def test_any_other_line_says_nothing(text: str) -> None:
    assert engine_error(text) == ""


def test_each_line_is_read_once_when_it_is_whole(tmp_path: Path) -> None:
    log, follower = tmp_path / "worker-0.log", LogFollower()
    assert follower.new_lines(log) == []
    log.write_text("one\ntw")
    assert follower.new_lines(log) == ["one"]
    assert follower.new_lines(log) == []
    with log.open("a") as file:
        file.write("o\n")
    assert follower.new_lines(log) == ["two"]
    log.write_text("new\n")
    assert follower.new_lines(log) == ["new"], "it was emptied"


def test_of_a_log_that_grows_faster_than_it_is_read_the_end_is_read(tmp_path: Path) -> None:
    log, follower = tmp_path / "worker-0.log", LogFollower()
    log.write_text("x" * 100 + "\n" + "y" * READ_LIMIT_BYTES + "\nlast\n")
    assert follower.new_lines(log)[-1] == "last"
    log.write_text("z" * 2 * READ_LIMIT_BYTES)
    assert follower.new_lines(log) == []
