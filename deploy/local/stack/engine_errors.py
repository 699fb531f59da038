"""What workers log of engines that they have lost: a standby that takes over, a rank that was killed. `up` shows it.

The engine is the worker's child and not `up`'s, so that only the worker's log has it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

READ_LIMIT_BYTES = 1 << 18
"""The most bytes of a log that are read at once; what a longer piece has before them is passed over."""
_TEXT = re.compile(r' level=error .*? logger=services\.worker\.engine\.\S+ message=("(?:[^"\\]|\\.)*")')
_LOGGER = "services.worker.engine."
OF_STANDBY = "the standby "
"""How an error begins that costs the worker nothing: its engine serves on."""


def engine_error(line: str) -> str:
    """Return what a line of a worker's log, in either format, says of an engine that was lost. Empty if it says
    nothing of that. *Pure.*"""
    try:
        if found := _TEXT.search(line):
            return str(json.loads(found[1]))
        record = json.loads(line) if line.startswith("{") and _LOGGER in line else {}
    except ValueError:
        return ""
    ours = record.get("level") == "error" and str(record.get("logger", "")).startswith(_LOGGER)
    return str(record.get("message", "")) if ours else ""


class LogFollower:
    """Reads what logs have got since the last look."""

    def __init__(self) -> None:
        self._read_bytes: dict[Path, int] = {}
        """How much of each log was read. As many as there are logs."""

    def new_lines(self, log: Path) -> list[str]:
        """Return the whole lines that are new; none if there is no such file. A log that is shorter than before was
        emptied, and is read from its beginning."""
        try:
            with log.open("rb") as file:
                size_bytes = log.stat().st_size
                at = self._read_bytes.get(log, 0)
                at = max(at if at <= size_bytes else 0, size_bytes - READ_LIMIT_BYTES)
                file.seek(at)
                text = file.read(READ_LIMIT_BYTES)
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._read_bytes[log] = at + len(whole)
        return whole.decode(errors="replace").splitlines()
