"""What a process shows in discovery: as soon as it can be reached, and anew at every change."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared.discovery.contract import Discovery, Entries, Registration
from shared.errors import DiscoveryDown

AGAIN_AFTER_S = 1.0

_log = logging.getLogger(__name__)


class Announcement:
    """One registration, made when it is due at a change, and kept from then on until `close`."""

    def __init__(
        self,
        discovery: Discovery,
        entries: Entries,
        *,
        due: Callable[[], bool] = lambda: True,
        shown: Callable[[], None] = lambda: None,
    ) -> None:
        """`due`: whether there is something to show for the first time; `shown` is told each time what there is was
        published."""
        self._discovery = discovery
        self._entries = entries
        self._due = due
        self._shown = shown
        self._registration: Registration | None = None
        self._changed = asyncio.Event()

    @property
    def epoch(self) -> int:
        """Of the lease; 0 before there was one."""
        return 0 if self._registration is None else self._registration.epoch

    def change(self) -> None:
        """There is something else to show."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
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
                _log.warning("not registered: %s", wrong)
                self._changed.set()
                await asyncio.sleep(AGAIN_AFTER_S)

    async def close(self) -> None:
        """Nothing is shown any more."""
        if self._registration is not None:
            await self._registration.close()
