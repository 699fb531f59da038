"""EncodeOrders: images that other workers need, and that this engine encodes for the store alone. Pure.

    add ──▶ waiting ──▶ looked up ─┬─ found ─────────────▶ ended
                                   └─ absent ──▶ due ──▶ encoded ──▶ ended           late: ended, with an error

They go in the order in which they came, one between two steps.
"""

from __future__ import annotations

from services.worker.contracts.messages import EncodeImage, ImageEncoded
from services.worker.scheduler.step_images import StepImages

AHEAD = 2
"""How many of the first orders are looked up: while one is encoded, it is known of the next one."""
LATE = "the time for it has passed"


class EncodeOrders:
    """The orders of one engine. The worker bounds how many there are."""

    def __init__(self, images: StepImages) -> None:
        self._images = images
        self._waiting: dict[int, EncodeImage] = {}
        """Ticket → the order, in the order of arrival."""
        self._until_s: dict[int, float] = {}
        self._absent: set[int] = set()
        """Tickets of those that are not in the store."""
        self._ended: list[ImageEncoded] = []

    def add(self, order: EncodeImage, now_s: float) -> None:
        """Take an order."""
        self._waiting[order.ticket] = order
        self._until_s[order.ticket] = now_s + order.time_left_s
        self._look_up()

    def _look_up(self) -> None:
        for ticket, order in list(self._waiting.items())[:AHEAD]:
            if ticket not in self._absent:
                self._images.look_up(order.key)

    def looked_up(self, key: bytes, *, found: bool) -> None:
        """A look-up has ended."""
        for ticket in [ticket for ticket, order in self._waiting.items() if order.key == key]:
            if found:
                self._end(ticket)
            else:
                self._absent.add(ticket)
        self._look_up()

    def due(self, now_s: float) -> EncodeImage | None:
        """Return the order that is to be encoded now. None if there is none; those that are late end."""
        for ticket in [ticket for ticket, until_s in self._until_s.items() if until_s <= now_s]:
            self._end(ticket, LATE)
        self._look_up()
        first = next(iter(self._waiting.values()), None)
        return first if first is not None and first.ticket in self._absent else None

    def encoded(self, order: EncodeImage) -> None:
        """An image was encoded: all orders for it end."""
        for ticket in [ticket for ticket, other in self._waiting.items() if other.key == order.key]:
            self._end(ticket)
        self._look_up()

    def _end(self, ticket: int, failed: str = "") -> None:
        del self._waiting[ticket], self._until_s[ticket]
        self._absent.discard(ticket)
        self._ended.append(ImageEncoded(ticket, failed))

    def take_ended(self) -> list[ImageEncoded]:
        """Return the answers to orders that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    @property
    def busy(self) -> bool:
        """Whether the first order can be encoded, or an answer is to be given."""
        return bool(self._ended) or next(iter(self._waiting), None) in self._absent

    def validate(self) -> None:
        """Raise AssertionError if the state contradicts itself."""
        assert self._waiting.keys() == self._until_s.keys() >= self._absent
