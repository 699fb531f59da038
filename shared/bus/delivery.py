"""How messages travel inside one process: at once, or as a simulation decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

Delivery = Callable[[str, str, str, Callable[[], None]], None]
"""Called with (sender, receiver, subject, deliver). It calls `deliver` whenever the message arrives: never, once or
more often. Sender and receiver are names of endpoints."""


def deliver_at_once(_sender: str, _receiver: str, _subject: str, deliver: Callable[[], None]) -> None:
    """Deliver every message once and at once."""
    deliver()


def next_turn(callback: Callable[..., None], *arguments: object) -> None:
    """Call back in the next turn of the event loop, as for a descriptor that became readable."""
    asyncio.get_running_loop().call_soon(callback, *arguments)
