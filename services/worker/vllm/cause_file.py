"""The first exception that any of vLLM's processes logs while it starts, in a file that its parent reads.

Core and workers log what ends them. Their own handlers write it to standard error, among hundreds of lines; a factory
of log records sees the exception itself, whatever handlers and formats are configured.
"""

from __future__ import annotations

import logging
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from services.worker.vllm.start_failure import Cause

VARIABLE = "HEADRACE_VLLM_CAUSE"
"""The environment variable with the file's path; vLLM's processes inherit it."""


def note_exceptions() -> None:
    """From now on write the first exception that is logged as an error, of all processes with this VARIABLE."""
    path = os.environ.get(VARIABLE)
    if path is None:
        return
    make = logging.getLogRecordFactory()

    def noting(*arguments: object, **named: object) -> logging.LogRecord:
        record = make(*arguments, **named)
        wrong = record.exc_info[1] if record.exc_info else None
        if record.levelno >= logging.ERROR and wrong is not None:
            whole = Path(f"{path}.{os.getpid()}")
            with suppress(OSError):  # another one was first, or the parent has gone
                whole.write_bytes(msgspec.json.encode(Cause.of(wrong)))
                try:
                    os.link(whole, path)
                finally:
                    whole.unlink()
        return record

    logging.setLogRecordFactory(noting)


def read_cause(path: Path) -> Cause | None:
    """Return what was noted. None if there is nothing."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Cause)
    except FileNotFoundError:
        return None
