"""RankMover: the scheduler half's Mover. It copies nothing: it orders copies of the ranks, and puts together what they
report. Pure.

    save, load, cancel ──▶ orders of the next step ──▶ every rank ──▶ its Copied ──▶ all ranks have ended ──▶ `ended`
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from services.worker.contracts.mover import Copied, Copy, Slots
from services.worker.vllm.connector.orders import (
    CancelOrder,
    DetachPool,
    LoadBlocks,
    Order,
    SaveBlocks,
    merge_copied,
)


class _Batch(Struct):
    ranks: set[int]
    """Ranks that have not reported its end."""
    copied: Copied | None = None
    """What the others have reported."""


class RankMover:
    """A `services.worker.contracts.mover.Mover` for `ranks` worker halves."""

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._orders: list[Order] = []
        self._batches: dict[int, _Batch] = {}
        self._ended: list[Copied] = []

    # --- what the connector calls

    def attach(self, slots: Slots) -> None:
        """The order to attach is the attachment's."""

    def detach(self) -> None:
        self._orders.append(DetachPool())

    def save(self, batch: int, copies: Sequence[Copy], until_s: float) -> None:
        self._begin(batch)
        self._orders.append(SaveBlocks(batch, list(copies), until_s))

    def load(self, batch: int, copies: Sequence[Copy]) -> None:
        self._begin(batch)
        self._orders.append(LoadBlocks(batch, list(copies)))

    def cancel(self, batch: int) -> None:
        if batch in self._batches:
            self._orders.append(CancelOrder(batch))

    def ended(self) -> list[Copied]:
        ended, self._ended = self._ended, []
        return ended

    def fileno(self) -> int:
        return -1

    @property
    def ends_s(self) -> float | None:
        return None

    def close(self) -> None:
        self._ended.clear()

    def _begin(self, batch: int) -> None:
        assert batch not in self._batches
        self._batches[batch] = _Batch(set(range(self._ranks)))

    # --- what the scheduler half calls

    def order(self, order: Order) -> None:
        """Have all ranks do this, after what was ordered before."""
        self._orders.append(order)

    def take_orders(self) -> list[Order]:
        """Return the orders of the next step."""
        orders, self._orders = self._orders, []
        return orders

    def report(self, rank: int, ended: Sequence[Copied]) -> None:
        """A rank has ended these batches."""
        for copied in ended:
            batch = self._batches[copied.batch]
            batch.ranks.remove(rank)
            batch.copied = copied if batch.copied is None else merge_copied(batch.copied, copied)
            if not batch.ranks:
                del self._batches[copied.batch]
                self._ended.append(batch.copied)
