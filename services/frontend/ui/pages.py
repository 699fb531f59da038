"""The open pages: one snapshot a second for all of them, made only while there is one.

    no page ──the first opens──▶ hearing ──a snapshot a second──▶ every open page takes the latest one
       ▲                            │
       └──── the last one closes ───┘

A page that reads slowly misses snapshots; none waits for it. One that does not read at all is cut off by
server/sse.py.

A snapshot is the whole view: a page that missed some, or opens late, needs no others. Nothing publishes for the page;
the frontend asks while one is open.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator

from services.frontend.ui.collector import Collector
from shared.errors import BusDown, Unavailable

INTERVAL_S = 1.0
"""Seconds between two snapshots."""
RETRY_S = 5.0
"""Seconds after which a page that found no place may ask again."""

_log = logging.getLogger(__name__)


class Pages:
    """The pages of one frontend, at most `limit`, of which an API key has half at most."""

    def __init__(self, collector: Collector, tasks: asyncio.TaskGroup, limit: int) -> None:
        self._collector = collector
        self._tasks = tasks
        self._limit = limit
        self._waiting: dict[asyncio.Event, str] = {}
        """For each page an event, set when there is a snapshot that it has not taken → the name of its key."""
        self._latest = b""
        self._making: asyncio.Task[None] | None = None
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def close(self) -> None:
        """End all pages, and let in none from now on."""
        self._closed = True
        self._wake()

    async def snapshots(self, key: str = "") -> AsyncGenerator[bytes, None]:
        """Yield snapshots as JSON, each time the latest one, until `close`. Close the iterator to leave. `key` is the
        name of the API key; empty without one. Raise Unavailable if there are too many pages, or no more."""
        if self._closed:
            raise Unavailable("this frontend is about to end", retry_after_s=RETRY_S)
        if len(self._waiting) >= self._limit:
            why = f"{self._limit} pages are open at this frontend, and ui.pages allows no more"
            raise Unavailable(why, retry_after_s=RETRY_S)
        most = max(1, self._limit // 2)
        if key and list(self._waiting.values()).count(key) >= most:
            why = f"{most} pages of the key {key} are open at this frontend, half of what ui.pages allows"
            raise Unavailable(why, retry_after_s=RETRY_S)
        woken = asyncio.Event()
        self._waiting[woken] = key
        if self._making is None:
            self._making = self._tasks.create_task(self._make(), name="snapshots for /ui")
        elif self._latest:
            woken.set()
        try:
            while True:
                await woken.wait()
                woken.clear()
                if self._closed or self._making is None:
                    return
                yield self._latest
        finally:
            self._waiting.pop(woken, None)
            if not self._waiting:
                self._stop()

    def _stop(self) -> None:
        making, self._making = self._making, None
        self._latest = b""
        if making is not None:
            making.cancel()

    def _wake(self) -> None:
        for woken in self._waiting:
            woken.set()

    async def _make(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            async with self._collector.listening():
                due = loop.time()
                while True:
                    self._latest = await self._collector.snapshot()
                    self._wake()
                    due = max(due + INTERVAL_S, loop.time())
                    await asyncio.sleep(due - loop.time())
        except BusDown as wrong:
            _log.warning("the pages at /ui are closed: %s", wrong)
        except Exception:  # noqa: BLE001  the page must not take the service with it
            _log.exception("the pages at /ui are closed")
        if self._making is asyncio.current_task():
            self._making = None
            self._wake()
