"""services/worker/vllm/connector/own_log.py: lines of Headrace's modules in the log of a program that has its own."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator
from contextlib import contextmanager

from services.worker.vllm.connector.own_log import PACKAGES, log_with


@contextmanager
def engine_log() -> Iterator[io.StringIO]:
    """Yield what the logger `engine` writes, at INFO. The root has no handler, as in a plain `vllm serve`."""
    loggers = [logging.getLogger(name) for name in (None, "engine", *PACKAGES)]
    before = [(logger, logger.handlers, logger.level, logger.propagate) for logger in loggers]
    for logger in loggers:
        logger.handlers = []
    written = io.StringIO()
    output = logging.StreamHandler(written)
    output.setFormatter(logging.Formatter("engine %(levelname)s %(message)s"))
    logging.getLogger("engine").handlers = [output]
    logging.getLogger("engine").setLevel(logging.INFO)
    try:
        yield written
    finally:
        for logger, handlers, level, propagate in before:
            logger.handlers, logger.propagate = handlers, propagate
            logger.setLevel(level)


def test_lines_of_headrace_come_once_into_the_engines_log_from_its_level_on() -> None:
    with engine_log() as written:
        log_with("engine")
        log_with("engine")
        logging.getLogger("services.worker.vllm").info("attached")
        logging.getLogger("services.worker.vllm").debug("a detail")
        logging.getLogger("shared.pool").warning("late")
    assert written.getvalue() == "engine INFO attached\nengine WARNING late\n"


def test_a_program_that_has_set_up_its_log_keeps_it() -> None:
    own = io.StringIO()
    with engine_log() as written:
        logging.getLogger().addHandler(logging.StreamHandler(own))
        log_with("engine")
        logging.getLogger("shared.pool").warning("late")
    assert (written.getvalue(), own.getvalue()) == ("", "late\n")


def test_an_engine_without_handlers_changes_nothing() -> None:
    with engine_log():
        logging.getLogger("engine").handlers = []
        log_with("engine")
        assert [(logger.handlers, logger.propagate) for logger in map(logging.getLogger, PACKAGES)] == [([], True)] * 2
