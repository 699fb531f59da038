"""WorkerHalf: the connector's half in each of vLLM's worker processes: it copies one rank's part of each block.

    orders of a step ──▶ TransferMover ──copies, in threads──▶ pool          start_load_kv: after the forward pass began
    finished, invalid ◀── ends of loads; reports ◀── ends of batches          after the forward pass

    a slot of the pool   | rank 0's part | rank 1's part | …      each padded to whole pages if there are several

A save reads blocks whose step vLLM has processed, and a load writes to blocks that no step uses, so copies need not be
ordered among the forward passes.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import assert_never

from services.worker.contracts.mover import Copied, Copy
from services.worker.kv_connector.pool_attachment import MappedPool, OwnerName
from services.worker.transfer.mover import TransferMover
from services.worker.vllm.connector.orders import (
    RANK_REPORT,
    STEP_ORDERS,
    AttachPool,
    AwaitLoads,
    CancelOrder,
    DetachPool,
    EndLoad,
    LoadBlocks,
    Order,
    RankFacts,
    RankReport,
    SaveBlocks,
)
from services.worker.vllm.connector.readable import readable
from shared.pool.format import Arena, PoolUnfit
from shared.pool.map import ArenaMap

END_S = 0.003
"""Most seconds that a step which computes nothing waits for loads that are about to end."""
FEW_BATCHES = 2
"""Most batches of loads under way that are about to end: they take 2.5 ms on an H200, and each 1.2."""
_log = logging.getLogger(__name__)


class RankSlots:
    """The parts of one rank in all slots, as a mover's `Slots`."""

    def __init__(self, slots: ArenaMap, offset: int) -> None:
        self._slots = slots
        self.bytes = slots.bytes[offset:]

    @property
    def arena(self) -> Arena:
        return self._slots.arena

    def generation(self, slot: int) -> int:
        """Return the slot's generation. Raise PoolUnfit if there is no such slot."""
        return self._slots.generation(slot)

    def close(self) -> None:
        self.bytes.release()


class WorkerHalf:
    """The worker half of one rank."""

    def __init__(self, mover: TransferMover, facts: RankFacts, rank: int, name: OwnerName, pool: MappedPool) -> None:
        """`name` and `pool` are those of the pool's directory."""
        self._mover = mover
        self._facts: RankFacts | None = facts
        self._block_bytes = facts.block_bytes
        self._rank = rank
        self._name = name
        self._pool = pool
        self._slots: RankSlots | None = None
        self._trouble = ""
        """Why nothing can be copied. Empty if it can."""
        self._loads: dict[int, list[int]] = {}
        """Batch under way → the device blocks that it writes."""
        self._bad: set[int] = set()
        """Device blocks whose copy ended badly, of loads that have not ended."""
        self._waiting: list[EndLoad] = []
        """Ends of loads whose copies are under way."""
        self._ended: list[Copied] = []
        self._invalid: set[int] = set()
        self._awaits = False
        """Whether this step waits for loads that are about to end."""

    # --- around each step

    def take_orders(self, packed: bytes) -> None:
        """Carry out the orders of this step, as far as they do not wait."""
        for order in STEP_ORDERS.decode(packed) if packed else ():
            self._do(order)

    def finished_loads(self) -> set[str]:
        """Return the requests whose loads have ended, each once. `take_invalid` has what they did not get."""
        self._poll()
        awaits, self._awaits = self._awaits, False
        over = self._over()
        if awaits and self._waiting and not over and len(self._loads) <= FEW_BATCHES:
            over = self._await_end()
        for end in over:
            self._waiting.remove(end)
            self._invalid.update(end.missing, self._bad.intersection(end.blocks))
            self._bad.difference_update(end.blocks)
        return {end.request for end in over}

    def take_invalid(self) -> set[int]:
        """Return the device blocks that got no good bytes, of loads that `finished_loads` has returned."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def take_report(self) -> bytes:
        """Return what the scheduler half must know, as `RANK_REPORT`. Empty if there is nothing."""
        self._poll()
        if not self._ended and self._facts is None:
            return b""
        report = RankReport(self._rank, self._facts, self._ended)
        self._facts, self._ended = None, []
        return RANK_REPORT.encode(report)

    def close(self) -> None:
        """Leave the pool alone when this returns, then release the lock."""
        self._mover.close()
        if self._slots is not None:
            self._slots.close()
            self._slots = None
        self._pool.close()
        self._name.release()

    # --- inside

    def _do(self, order: Order) -> None:
        match order:
            case AttachPool():
                self._detach()
                try:
                    self._attach(order)
                    self._trouble = ""
                except PoolUnfit as wrong:
                    self._trouble = f"rank {self._rank}: {wrong}"
                    _log.warning("the pool cannot be used: %s", self._trouble)
            case DetachPool():
                self._detach()
            case SaveBlocks(batch, copies, until_s):
                if self._usable(batch, copies):
                    self._mover.save(batch, copies, until_s)
            case LoadBlocks(batch, copies):
                slots = [copy.device_slot for copy in copies]
                if self._usable(batch, copies):
                    self._loads[batch] = slots
                    self._mover.load(batch, copies)
                else:
                    self._bad.update(slots)
            case CancelOrder(batch):
                self._mover.cancel(batch)
            case EndLoad():
                self._waiting.append(order)
            case AwaitLoads():
                self._awaits = True
            case _:
                assert_never(order)

    def _over(self) -> list[EndLoad]:
        """Return the ends of loads of which no copy is under way."""
        if not self._waiting:
            return []
        loading = {slot for slots in self._loads.values() for slot in slots}
        return [end for end in self._waiting if loading.isdisjoint(end.blocks)]

    def _await_end(self) -> list[EndLoad]:
        """Return what `_over` does, as soon as it is anything, or END_S later."""
        until_s = time.monotonic() + END_S
        over: list[EndLoad] = []
        while not over and (left_s := until_s - time.monotonic()) > 0:
            if readable(self._mover, left_s):
                self._poll()
                over = self._over()
        return over

    def _usable(self, batch: int, copies: Sequence[Copy]) -> bool:
        """Whether copies can be made; else the batch ends at once."""
        if self._slots is None:
            failed = self._trouble or "no pool is attached"
            self._ended.append(Copied(batch, [False] * len(copies), 0, 0.0, failed))
        return self._slots is not None

    def _poll(self) -> None:
        for copied in self._mover.ended():
            self._ended.append(copied)
            slots = self._loads.pop(copied.batch, None)
            if slots is not None:
                self._bad.update(slot for slot, good in zip(slots, copied.good, strict=True) if not good)

    def _attach(self, order: AttachPool) -> None:
        """Join the lock, and map the slots. Raise PoolUnfit."""
        offset, slot_bytes = order.offsets[self._rank], order.arena.slot_bytes
        if offset + self._block_bytes > slot_bytes:
            raise PoolUnfit(
                f"the pool's slots of {slot_bytes} bytes are too small for {self._block_bytes} bytes from {offset} on"
            )
        self._name.join(order.owner)
        self._slots = RankSlots(self._pool.map(order.arena, order.pool_bytes), offset)
        try:
            self._mover.attach(self._slots)
        except PoolUnfit:
            self._slots.close()
            self._slots = None
            raise

    def _detach(self) -> None:
        if self._slots is not None:
            self._mover.detach()
            self._slots.close()
            self._slots = None
