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

from prometheus_client import Gauge

from shared.errors import ConfigError
from shared.rate_limited_log import RateLimitedLog

POLL_S = 2.0
"""Seconds between two looks at the files."""

_log = logging.getLogger(__name__)

T = TypeVar("T")


class FileReloader(Generic[T]):
    """Keeps one value up to date that is parsed from some files."""

    def __init__(
        self,
        what: str,
        files: Sequence[Path],
        limit_bytes: int,
        parse: Callable[[list[bytes]], T],
        use: Callable[[T], None],
        stale: Gauge,
    ) -> None:
        """`what` begins messages. `parse` turns the files' bytes into the value, in a thread, and raises ConfigError;
        `use` gets each new value, in the event loop. `stale` is 1 while the files cannot be used and the former value
        is."""
        self._what = what
        self._files = files
        self._limit_bytes = limit_bytes
        self._parse = parse
        self._use = use
        self._stale = stale
        self._seen: list[bytes] = []
        self._limited_log = RateLimitedLog()

    async def load(self) -> None:
        """Read the files and use their value. Raises ConfigError, and then the former value stays in use."""
        try:
            await self._load()
        except ConfigError as wrong:
            raise ConfigError(f"{self._what}: {wrong}") from None

    async def _load(self) -> None:
        changed = await asyncio.to_thread(self._read_if_changed)
        if changed is not None:
            self._seen, value = changed
            self._use(value)
        self._stale.set(0)

    async def run(self) -> None:
        """Load the files every POLL_S until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            seen = self._seen
            try:
                await self._load()
            except ConfigError as wrong:
                self._stale.set(1)
                self._limited_log.error(self._what, f"{wrong}; the former contents stay in use")
            else:
                if self._limited_log.reset(self._what) or self._seen is not seen:  # or they are as before the fault
                    _log.info("%s: reloaded, the new contents are in use", self._what)

    def _read_if_changed(self) -> tuple[list[bytes], T] | None:
        """Return the files' bytes and their value; None if the bytes have not changed."""
        contents = [self._read(file) for file in self._files]
        return None if contents == self._seen else (contents, self._parse(contents))

    def _read(self, file: Path) -> bytes:
        try:
            with file.open("rb") as opened:
                content = opened.read(self._limit_bytes + 1)
        except OSError as wrong:
            raise ConfigError(f"{file}: {wrong.strerror}") from None
        if len(content) > self._limit_bytes:
            raise ConfigError(f"{file}: larger than {self._limit_bytes} bytes")
        return content
