"""What workers log of their engines: one that is lost, a standby that takes over, weights that are not shared. `up`
shows it.

The engine is the worker's child and not `up`'s, so that only the worker's log has it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

READ_LIMIT_BYTES = 1 << 18
"""The most bytes of a log that are read at once; what a longer piece has before them is passed over."""
_TEXT = re.compile(r' level=(error|warning) .*? logger=(services\.worker\.\S+) message=("(?:[^"\\]|\\.)*")')
_ERRORS, _NATIVE = "services.worker.engine.", "services.worker.native."
_UNSHARED = ("this engine reads its weights by itself: ", "this engine has weights of its own: ")
SERVES_ON = ("the standby ", *_UNSHARED)
"""How lines begin after which the worker's engine serves on."""


def engine_error(line: str) -> str:
    """Return what a line of a worker's log, in either format, says of an engine that was lost or has no shared weights.
    Empty if it says nothing of that. *Pure.*"""
    try:
        if found := _TEXT.search(line):
            level, logger, text = found[1], found[2], str(json.loads(found[3]))
        else:
            record = json.loads(line) if line.startswith("{") and "services.worker." in line else {}
            level, logger, text = (str(record.get(name, "")) for name in ("level", "logger", "message"))
    except ValueError:
        return ""
    lost = level == "error" and logger.startswith(_ERRORS)
    unshared = level == "warning" and logger.startswith(_NATIVE) and text.startswith(_UNSHARED)
    return text if lost or unshared else ""


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
