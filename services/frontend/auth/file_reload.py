"""Files that may change while the process runs: keys, certificates.

    load ──▶ in force ──every POLL_S: other bytes──▶ made of them ──▶ in force
                 ▲                                        │
                 └── what was, and it is told: an error in the log, once a minute, and a metric ── cannot be read

The bytes are compared, not the times: that holds for files that are replaced, written in place, mounted or linked.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from prometheus_client import Gauge

from shared.errors import ConfigError
from shared.rate_limited_log import RateLimitedLog

POLL_S = 2.0
_STALE = "what was read before stays in force"

_log = logging.getLogger(__name__)

T = TypeVar("T")


class FileReloader(Generic[T]):
    """One thing that is made of some files."""

    def __init__(
        self,
        what: str,
        files: Sequence[Path],
        limit_bytes: int,
        make: Callable[[list[bytes]], T],
        use: Callable[[T], None],
        stale: Gauge,
    ) -> None:
        """`make` runs in a thread, on the files' bytes, and raises ConfigError; `use` on the loop. `stale` is 1 while
        the files cannot be read and what was is in force."""
        self._what = what
        self._files = files
        self._limit_bytes = limit_bytes
        self._make = make
        self._use = use
        self._stale = stale
        self._seen: list[bytes] = []
        self._limited_log = RateLimitedLog()

    async def load(self) -> None:
        """Read them now. Raises ConfigError, and then nothing has changed."""
        try:
            made = await asyncio.to_thread(self._look)
        except ConfigError as wrong:
            raise ConfigError(f"{self._what}: {wrong}") from None
        if made is not None:
            self._seen, new = made
            self._use(new)
        self._stale.set(0)

    async def run(self) -> None:
        """Read them again and again, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            seen = self._seen
            try:
                await self.load()
            except ConfigError as wrong:
                self._stale.set(1)
                self._limited_log.error(_STALE, wrong)
            else:
                if self._limited_log.reset(_STALE) or self._seen is not seen:  # also where they are as before the fault
                    _log.info("%s: read again, and in force", self._what)

    def _look(self) -> tuple[list[bytes], T] | None:
        """None: they are as they were."""
        contents = [self._read(file) for file in self._files]
        return None if contents == self._seen else (contents, self._make(contents))

    def _read(self, file: Path) -> bytes:
        try:
            with file.open("rb") as opened:
                content = opened.read(self._limit_bytes + 1)
        except OSError as wrong:
            raise ConfigError(f"{file}: {wrong.strerror}") from None
        if len(content) > self._limit_bytes:
            raise ConfigError(f"{file}: more than {self._limit_bytes} bytes")
        return content
