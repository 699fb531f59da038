"""Reloads files that may change while the process runs: keys and certificates.

    load ──▶ in use ──every POLL_S: the bytes differ──▶ parse ──▶ in use
               ▲                                          │
               └── the former value stays in use ◀────────┘ error: logged once a minute, and a metric is 1

A file must be a regular one. While a file system hangs, one thread waits for it, and the files count as stale.

The bytes are compared, not the times. That works for files that are replaced, written in place, mounted or linked.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar, cast

from msgspec import Struct, field
from prometheus_client import Gauge

from shared.errors import ConfigError
from shared.rate_limited_log import RateLimitedLog
from shared.regular_file import read_regular_file

POLL_S = 2.0
"""Seconds between two looks at the files."""
READ_S = 10.0
"""Seconds after which files that are still being read count as stale."""

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
    _reading: asyncio.Future[tuple[list[bytes], T] | None] | None = None
    """What the thread that reads the files will return; None if there is no such thread."""
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
        reading = self._reading = self._reading or _start(self._read_if_changed)
        await asyncio.wait((reading,), timeout=READ_S)
        if not reading.done():  # the next call waits for the same thread
            raise ConfigError(f"not read within {READ_S:g} s; is its file system there?")
        self._reading = None
        changed = reading.result()
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
            return read_regular_file(file, self.limit_bytes)
        except OSError as wrong:
            raise ConfigError(f"{file}: {wrong.strerror}") from None


def _start(work: Callable[[], T]) -> asyncio.Future[T]:
    """Begin work in a thread that the end of the process does not wait for, since a file system may hang."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(error: Exception | None, value: T | None) -> None:
        if error is None:
            done.set_result(cast(T, value))
        else:
            done.set_exception(error)

    def run() -> None:
        error, value = None, None
        try:
            value = work()
        except Exception as wrong:  # noqa: BLE001 - raised where the future is awaited
            error = wrong
        with suppress(RuntimeError):  # the event loop has ended
            loop.call_soon_threadsafe(settle, error, value)

    threading.Thread(target=run, name="reload files", daemon=True).start()
    return done
