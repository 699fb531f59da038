"""What discovery shows of a kvbm: its address book, with a source of events for each layout."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from shared import subjects
from shared.discovery import Registration
from shared.errors import DiscoveryDown
from shared.lifecycle import Runtime
from shared.messages import EventSource

OPERATIONS = ("attach", "store", "commit", "abort", "fetch", "release", "snapshot", "load", "stat", "control")
AGAIN_AFTER_S = 1.0

_log = logging.getLogger(__name__)


class Announcement:
    """`layouts` are the sources to show, by digest."""

    def __init__(self, runtime: Runtime, layouts: Callable[[], dict[str, EventSource]]) -> None:
        self._runtime = runtime
        self._layouts = layouts
        self._registration: Registration | None = None
        self._changed = asyncio.Event()
        self._changed.set()
        self.shown = False
        """Whether workers can find this kvbm."""

    def change(self) -> None:
        """A layout has come or gone."""
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                if self._registration is None:
                    self._registration = await self._runtime.discovery.register(self._entries)
                    self.shown = True
                else:
                    await self._registration.publish()
            except DiscoveryDown as wrong:
                _log.warning("not registered: %s", wrong)
                self._changed.set()
                await asyncio.sleep(AGAIN_AFTER_S)

    async def close(self) -> None:
        """Nothing is shown any more."""
        if self._registration is not None:
            await self._registration.close()

    def _entries(self, epoch: int) -> dict[str, bytes]:
        runtime = self._runtime
        operations = {name: subjects.kvbm(runtime.namespace, runtime.instance, name) for name in OPERATIONS}
        return runtime.address(epoch, operations, layouts=self._layouts())
