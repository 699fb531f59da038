"""Onboarding: which waiting sequences wait for blocks that the kvbm may hold, and what they hold for it (pure)."""

from __future__ import annotations

from msgspec import Struct

from shared.hashing import ContentKey


class Wanted(Struct, frozen=True):
    """These blocks are missing on the device; whoever asked waits for them."""

    number: int
    """Names what follows: make_room, loaded, settled. Always ends with one `settled`."""
    keys: list[ContentKey]
    """In order, behind the blocks that are there."""
