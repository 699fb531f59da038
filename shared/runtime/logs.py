"""Structured logs: one line of `key=value` for each record on stderr, with the name of the process.

    time=2026-01-31T12:00:00.123Z level=info service=worker instance=0123456789abcdef logger=… message="…" request=…

A record's `extra={"request": id, "trace": id}` adds the request's id, and that of its trace, after the message. A
traceback follows in the same line, with its line breaks escaped, so that each line is one record.
"""

from __future__ import annotations

import json
import logging
import sys
import time

from shared.errors import ConfigError
from shared.messages import ServiceName

LEVELS = ("debug", "info", "warning", "error")


class LogLine(logging.Formatter):
    """Formats a record as one line."""

    def __init__(self, service: ServiceName, instance: str) -> None:
        super().__init__()
        self._process = f"service={service} instance={instance}"

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = (
            f"time={moment}.{int(record.msecs):03d}Z level={record.levelname.lower()} {self._process}"
            f" logger={record.name} message={_quoted(record.getMessage())}"
        )
        for name in ("request", "trace"):
            if given := getattr(record, name, ""):
                line += f" {name}={_quoted(str(given))}"
        if record.exc_info:
            line += f" traceback={_quoted(self.formatException(record.exc_info))}"
        return line


def start(service: ServiceName, instance: str, level: str) -> None:
    """Start the logs of this process. Raise ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"log_level: {level!r} is not one of {', '.join(LEVELS)}")
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter(LogLine(service, instance))
    logging.basicConfig(level=level.upper(), handlers=[output], force=True)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
