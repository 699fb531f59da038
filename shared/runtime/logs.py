"""Structured logs: one line for each record on stderr, with the name of the process.

    text   time=2026-01-31T12:00:00.123Z level=info service=worker instance=0123456789abcdef logger=… message="…" …
    json   {"time": …, "level": …, "service": …, "instance": …, "model": …, "logger": …, "message": …, "request": …}

A record's `extra` adds `request` and `trace`, their ids, and `fields`, a dict of more names and values. Line breaks are
escaped, a traceback's too, so that each line is one record; long texts are cut.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import sys
import time
from collections.abc import Iterator
from typing import Any, Literal

from shared.errors import ConfigError

LEVELS = ("debug", "info", "warning", "error")
TEXT_LIMIT_CHARACTERS = 16_384
"""Longest text in a record; the rest is left out."""
_PLAIN = frozenset({"time", "level", "service", "instance", "logger"})
"""What is never in quotes, since it has no blank."""
LogFormat = Literal["text", "json"]
_UNSAFE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff]")
"""What JSON does not escape, but ends a line or controls a terminal for some readers, or cannot be written."""


class LogLine(logging.Formatter):
    """Formats a record as one line."""

    def __init__(self, service: str, instance: str, *, model: str = "") -> None:
        """`model` is that of a worker. Empty if the process has none of its own."""
        super().__init__()
        self._process = {"service": service, "instance": instance} | ({"model": model} if model else {})

    def change_instance(self, before: str, after: str) -> None:
        """Show `after` in place of `before`."""
        if self._process["instance"] == before:
            self._process["instance"] = after

    def format(self, record: logging.LogRecord) -> str:
        parts = [f"{name}={value if name in _PLAIN else _quoted(value)}" for name, value in self._parts(record)]
        parts += [f"{name}={_quoted(value)}" for name, value in _fields(record).items()]
        return " ".join(parts)

    def _parts(self, record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        yield "time", f"{moment}.{int(record.msecs):03d}Z"
        yield "level", record.levelname.lower()
        yield from self._process.items()
        yield "logger", record.name
        yield "message", _cut(record.getMessage())
        for name in ("request", "trace"):
            if given := getattr(record, name, ""):
                yield name, _cut(str(given))
        if record.exc_info:
            yield "traceback", _cut(self.formatException(record.exc_info))


class JsonLine(LogLine):
    """Formats a record as one JSON object in one line. What `fields` adds is an object of its own, so that no name of
    it can hide another."""

    def format(self, record: logging.LogRecord) -> str:
        fields = _fields(record)
        return _quoted(dict(self._parts(record)) | ({"fields": fields} if fields else {}))


def start(service: str, instance: str, level: str, form: LogFormat = "text", *, model: str = "") -> None:
    """Start the logs of this process. Raise ConfigError for an unknown level."""
    if level not in LEVELS:
        raise ConfigError(f"log_level: {level!r} is not one of {', '.join(LEVELS)}")
    output = logging.StreamHandler(sys.stderr)
    output.setFormatter((JsonLine if form == "json" else LogLine)(service, instance, model=model))
    logging.basicConfig(level=level.upper(), handlers=[output], force=True)


def change_instance(before: str, after: str) -> None:
    """Log under another instance id from now on, where this process has logged under `before`."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler.formatter, LogLine):
            handler.formatter.change_instance(before, after)


def level() -> str:
    """Return the level from which on this process logs now; info where `start` was not called and it is another one."""
    name: str = logging.getLevelName(logging.getLogger().level).lower()
    return name if name in LEVELS else "info"


class LogLevel:
    """The level of this process's logs, which may change for a time."""

    def __init__(self) -> None:
        self._before = logging.getLogger().level
        self._until: asyncio.TimerHandle | None = None

    def change(self, level: str, for_s: float = 0.0) -> str:
        """Log from this level on, for `for_s` seconds, or for good if they are 0. Return why it was not done. Empty if
        it was."""
        if level not in LEVELS:
            return f"level: {level[:64]!r} is not one of {', '.join(LEVELS)}"
        if not 0 <= for_s <= 86_400:
            return "for_s: 0 to 86400 seconds"
        root = logging.getLogger()
        if self._until is None:
            self._before = root.level
        else:
            self._until.cancel()
            self._until = None
        root.setLevel(level.upper())
        if for_s:
            self._until = asyncio.get_running_loop().call_later(for_s, self._end)
        return ""

    def _end(self) -> None:
        self._until = None
        logging.getLogger().setLevel(self._before)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    given: dict[str, Any] = getattr(record, "fields", {})
    return {name: _cut(value) if isinstance(value, str) else value for name, value in given.items()}


def _cut(text: str) -> str:
    return text if len(text) <= TEXT_LIMIT_CHARACTERS else f"{text[:TEXT_LIMIT_CHARACTERS]}…"


def _quoted(value: Any) -> str:
    """Return a value as JSON, in which what ends a line or controls a terminal is escaped."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), default=str)
    return _UNSAFE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
