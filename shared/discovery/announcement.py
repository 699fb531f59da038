"""Publishes a process in discovery as soon as the back end can be reached, and again at every change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.discovery.contract import Discovery, Entries, Registration
from shared.errors import DiscoveryDown

AGAIN_AFTER_S = 1.0

_log = logging.getLogger(__name__)


class Announcement:
    """One registration. It is made at the first update for which `due` holds, and kept until `close`."""

    def __init__(
        self,
        discovery: Discovery,
        entries: Entries,
        *,
        due: Callable[[], bool] = lambda: True,
        shown: Callable[[], None] = lambda: None,
    ) -> None:
        """`due` says whether there is something to publish; it is called until there is. `shown` is called after each
        publication."""
        self._discovery = discovery
        self._entries = entries
        self._due = due
        self._shown = shown
        self._registration: Registration | None = None
        self._changed = asyncio.Event()

    @property
    def epoch(self) -> int:
        """The epoch of the lease; 0 before the first one."""
        return 0 if self._registration is None else self._registration.epoch

    @property
    def pending(self) -> bool:
        """Whether something has changed since the last publication began."""
        return self._changed.is_set()

    def request_update(self) -> None:
        """Ask `run` to publish what has changed."""
        self._changed.set()

    async def run(self) -> None:
        """Publish until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                if self._registration is not None:
                    await self._registration.publish()
                elif self._due():
                    self._registration = await self._discovery.register(self._entries)
                else:
                    continue
                self._shown()
            except DiscoveryDown as wrong:
                _log.warning("not registered in discovery: %s", wrong)
                self._changed.set()
                await asyncio.sleep(AGAIN_AFTER_S)

    async def close(self) -> None:
        """Remove what was published."""
        if self._registration is not None:
            await self._registration.close()
