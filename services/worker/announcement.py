"""What discovery shows of a worker: its address book from the first card on, and the card while it takes requests."""

from __future__ import annotations

import asyncio
import logging

from shared import subjects
from shared.discovery import Registration
from shared.errors import DiscoveryDown
from shared.lifecycle import Runtime
from shared.messages import JSON_HEADER, MODEL_CARD, EventSource, ModelCard

OPERATIONS = ("generate", "cancel", "resend", "snapshot", "load", "control")
AGAIN_AFTER_S = 1.0

_log = logging.getLogger(__name__)


class Announcement:
    """Shows what it was told last, as soon as discovery can be reached."""

    def __init__(self, runtime: Runtime, source: EventSource) -> None:
        self._runtime = runtime
        self._source = source
        self._registration: Registration | None = None
        self._changed = asyncio.Event()
        self.card: ModelCard | None = None

    @property
    def epoch(self) -> int:
        """Of the lease; 0 before there was one."""
        return 0 if self._registration is None else self._registration.epoch

    def show(self, card: ModelCard | None) -> None:
        """The card, or None while no request would be taken."""
        self.card = card
        self._changed.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            try:
                if self._registration is not None:
                    await self._registration.publish()
                elif self.card is not None:
                    self._registration = await self._runtime.discovery.register(self._entries)
                if self.card is not None:
                    self._runtime.vitals.ready()  # it can be chosen: who restarts workers in turn waits for that
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
        operations = {name: subjects.worker(runtime.namespace, runtime.instance, name) for name in OPERATIONS}
        entries = runtime.address(epoch, operations, events=self._source)
        if self.card is not None:
            card_key = subjects.model_key(runtime.namespace, self.card.model, runtime.instance)
            entries[card_key] = MODEL_CARD.encode(self.card, JSON_HEADER)
        return entries
