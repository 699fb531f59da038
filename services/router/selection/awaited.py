"""Which blocks of a prompt that waits for others the other routers hear of. Pure.

    router A chose worker 1 for a document, which waits ──Reserved with `awaited`──▶ router B expects its blocks there
    a question about it comes to router B ──▶ worker 1, instead of another one that computes the document again

Without a wait the worker's events tell all routers soon enough.
"""

from __future__ import annotations

from msgspec.structs import replace

from services.router.selection.candidates import CandidateState, predicted_start_s
from shared.errors import ProtocolError
from shared.messages.select import Reserved, Select

AWAITED_BLOCKS = 2048
"""Most blocks of which they hear, the first ones of those that are computed: 16 KiB."""
AWAITED_S = 1.0
"""Predicted seconds of waiting from which on they hear of them."""


def awaited(select: Select, reserved: Reserved, chosen: CandidateState) -> Reserved | None:
    """Return the reservation with the blocks that its prompt will leave; None if it does not wait."""
    if (predicted_start_s(chosen) or 0.0) < AWAITED_S:
        return None
    known = 8 * chosen.overlap.here
    return replace(reserved, awaited=select.hashes[known : known + 8 * AWAITED_BLOCKS])


def check_awaited(event: Reserved) -> None:
    """Raise ProtocolError if another router's message is malformed."""
    if len(event.awaited) % 8 or len(event.awaited) > 8 * AWAITED_BLOCKS:
        raise ProtocolError(f"Reserved: awaited has {len(event.awaited)} bytes")
