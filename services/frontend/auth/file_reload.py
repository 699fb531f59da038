"""Reloads files that may change while the process runs: keys and certificates.

    load ──▶ in use ──every POLL_S: the bytes differ──▶ parse ──▶ in use
               ▲                                          │
               └── the former value stays in use ◀────────┘ error: logged once a minute, and a metric is 1

The bytes are compared, not the times. That works for files that are replaced, written in place, mounted or linked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from msgspec import Struct, field
from prometheus_client import Gauge

from shared.errors import ConfigError
from shared.rate_limited_log import RateLimitedLog

POLL_S = 2.0
"""Seconds between two looks at the files."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class FileReloader(Struct, Generic[T]):
    """Keeps one value up to date that is parsed from some files."""

    what: str
    """What messages begin with."""
    files: Sequence[Path]
    limit_bytes: int
    parse: Callable[[list[bytes]], T]
    """Turns the files' bytes into the value, in a thread, and raises ConfigError."""
    use: Callable[[T], None]
    """Gets each new value, in the event loop."""
    stale: Gauge
    """A gauge that is 1 while the files cannot be used and the former value is."""
    _seen: list[bytes] = []
    _limited_log: RateLimitedLog = field(default_factory=RateLimitedLog)

    async def start(self, tasks: asyncio.TaskGroup, name: str) -> None:
        """Load the files now, and in a task of that name whenever they change. Raise ConfigError."""
        await self.load()
        tasks.create_task(self.run(), name=name)

    async def load(self) -> None:
        """Read the files and use their value. Raise ConfigError, and then the former value stays in use."""
        try:
            await self._load()
        except ConfigError as wrong:
            raise ConfigError(f"{self.what}: {wrong}") from None

    async def _load(self) -> None:
        changed = await asyncio.to_thread(self._read_if_changed)
        if changed is not None:
            self._seen, value = changed
            self.use(value)
        self.stale.set(0)

    async def run(self) -> None:
        """Load the files every POLL_S until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            seen = self._seen
            try:
                await self._load()
            except ConfigError as wrong:
                self.stale.set(1)
                self._limited_log.error(self.what, f"{wrong}; the former contents stay in use")
            else:
                if self._limited_log.reset(self.what) or self._seen is not seen:  # or they are as before the fault
                    _log.info("%s: reloaded, the new contents are in use", self.what)

    def _read_if_changed(self) -> tuple[list[bytes], T] | None:
        """Return the files' bytes and their value; None if the bytes have not changed."""
        contents = [self._read(file) for file in self.files]
        return None if contents == self._seen else (contents, self.parse(contents))

    def _read(self, file: Path) -> bytes:
        try:
            with file.open("rb") as opened:
                content = opened.read(self.limit_bytes + 1)
        except OSError as wrong:
            raise ConfigError(f"{file}: {wrong.strerror}") from None
        if len(content) > self.limit_bytes:
            raise ConfigError(f"{file}: larger than {self.limit_bytes} bytes")
        return content
