"""What discovery shows of a worker: its address book from the first card on, and the card while it takes requests."""

from __future__ import annotations

from shared import subjects
from shared.discovery.announcement import Announcement
from shared.messages import JSON_HEADER, MODEL_CARD, EventSource, ModelCard
from shared.runtime.lifecycle import Runtime

OPERATIONS = ("generate", "cancel", "resend", "snapshot", "load", "control")


class CardAnnouncement:
    """Shows the card that it was told last, as soon as discovery can be reached."""

    def __init__(self, runtime: Runtime, source: EventSource) -> None:
        self._runtime = runtime
        self._source = source
        self._announcement = Announcement(
            runtime.discovery, self._entries, due=lambda: self.card is not None, shown=self._shown
        )
        self.card: ModelCard | None = None

    @property
    def epoch(self) -> int:
        """Of the lease; 0 before there was one."""
        return self._announcement.epoch

    def show(self, card: ModelCard | None) -> None:
        """The card, or None while no request would be taken."""
        self.card = card
        self._announcement.change()

    async def run(self) -> None:
        """Until cancelled."""
        await self._announcement.run()

    async def close(self) -> None:
        """Nothing is shown any more."""
        await self._announcement.close()

    def _shown(self) -> None:
        if self.card is not None:
            self._runtime.vitals.ready()  # it can be chosen: who restarts workers in turn waits for that

    def _entries(self, epoch: int) -> dict[str, bytes]:
        runtime = self._runtime
        operations = {name: subjects.worker(runtime.namespace, runtime.instance, name) for name in OPERATIONS}
        entries = runtime.address(epoch, operations, events=self._source)
        if self.card is not None:
            card_key = subjects.model_key(runtime.namespace, self.card.model, runtime.instance)
            entries[card_key] = MODEL_CARD.encode(self.card, JSON_HEADER)
        return entries
