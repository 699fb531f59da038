"""What the connector's scheduler half orders of its worker halves, and what they report. Pure.

    scheduler half ──StepOrders, with each step──▶ each rank's worker half
    scheduler half ◀──RankReport, one a rank────── with the step's output

Both travel as msgpack inside vLLM's own messages. A rank carries out the orders of a step one after the other.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from services.worker.contracts.mover import Copied, Copy
from shared.messages.codec import Codec
from shared.pool.format import PAGE_BYTES, Arena

# --- orders


class AttachPool(Struct, frozen=True, tag="attach", array_like=True):
    """Map these slots of the pool. Copies before this one have ended."""

    owner: str
    """The owner's name, whose lock this rank must hold, too."""
    pool_bytes: int
    arena: Arena
    offsets: list[int]
    """Where the part of each rank begins in a slot."""


class DetachPool(Struct, frozen=True, tag="detach", array_like=True):
    """Let go of the pool: no copy is under way."""


class SaveBlocks(Struct, frozen=True, tag="save", array_like=True):
    """Copy blocks to the pool; no copy begins at or after `until_s` (CLOCK_MONOTONIC, one clock for all processes)."""

    batch: int
    copies: list[Copy]
    until_s: float


class LoadBlocks(Struct, frozen=True, tag="load", array_like=True):
    """Copy blocks from the pool."""

    batch: int
    copies: list[Copy]


class CancelOrder(Struct, frozen=True, tag="cancel", array_like=True):
    """Make no copy of the batch that has not begun."""

    batch: int


class EndLoad(Struct, frozen=True, tag="end", array_like=True):
    """No further copies are ordered into these device blocks of a request: once those under way have ended, tell vLLM
    that the request has what it gets."""

    request: str
    blocks: list[int]
    """All device blocks that vLLM has allocated for it to load into."""
    missing: list[int]
    """The blocks among them for which no copy was ordered."""


class AwaitLoads(Struct, frozen=True, tag="await", array_like=True):
    """Nothing is computed: wait in this step, a moment, for a load that is about to end."""


Order = AttachPool | DetachPool | SaveBlocks | LoadBlocks | CancelOrder | EndLoad | AwaitLoads
STEP_ORDERS: Codec[list[Order]] = Codec(list[Order], "step orders")

# --- reports


def part_bytes(block_bytes: int, ranks: int) -> int:
    """Return how many bytes of a slot one rank's part takes: whole pages if there are several."""
    return block_bytes if ranks == 1 else -(-block_bytes // PAGE_BYTES) * PAGE_BYTES


class RankFacts(Struct, frozen=True):
    """How one rank's part of each block lies in its memory."""

    block_bytes: int
    blocks: int
    """Number of blocks that its tensors have."""
    form: str
    """The arrangement of the bytes; equal texts mean equal arrangements."""


class RankReport(Struct, frozen=True):
    """What a rank says after a step."""

    rank: int
    facts: RankFacts | None = None
    """Said once, with the first report."""
    ended: list[Copied] = []


RANK_REPORT: Codec[RankReport] = Codec(RankReport, "rank report")


def merge_copied(one: Copied, other: Copied) -> Copied:
    """Return the result of a batch that two ranks have copied, each its part of each block."""
    assert one.batch == other.batch
    return msgspec.structs.replace(
        one,
        good=[here and there for here, there in zip(one.good, other.good, strict=True)],
        moved_bytes=one.moved_bytes + other.moved_bytes,
        took_s=max(one.took_s, other.took_s),
        failed=one.failed or other.failed,
        paths={path: max(one.paths.get(path, 0), other.paths.get(path, 0)) for path in {**one.paths, **other.paths}},
        fallbacks={
            name: max(one.fallbacks.get(name, 0), other.fallbacks.get(name, 0))
            for name in {**one.fallbacks, **other.fallbacks}
        },
        differing=max(one.differing, other.differing),
        damaged=sorted({*one.damaged, *other.damaged}),
        checksums=[],
    )
