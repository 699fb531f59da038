"""The first exception that a process logs, in a file: also if its logging is configured afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from services.worker.vllm.cause_file import VARIABLE, read_cause
from services.worker.vllm.start_failure import Cause

PROGRAM = """
import logging, logging.config
from services.worker.vllm.cause_file import note_exceptions
note_exceptions()
logging.config.dictConfig({"version": 1, "handlers": {"none": {"class": "logging.NullHandler"}},
                           "loggers": {"vllm": {"handlers": ["none"], "level": "INFO", "propagate": False}}})
log = logging.getLogger("vllm.core")
log.error("no exception")
for wrong in (ValueError("the first"), KeyError("the second")):
    try:
        raise wrong
    except Exception:
        log.exception("failed to start")
"""


def test_the_first_logged_exception_is_noted(tmp_path: Path) -> None:
    path = tmp_path / "cause"
    assert read_cause(path) is None
    subprocess.run([sys.executable, "-c", PROGRAM], env=os.environ | {VARIABLE: str(path)}, check=True)
    assert read_cause(path) == Cause("ValueError", "the first")
    assert [one.name for one in tmp_path.iterdir()] == ["cause"]


def test_without_the_variable_nothing_is_noted() -> None:
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    subprocess.run([sys.executable, "-c", PROGRAM], env=kept, check=True)
