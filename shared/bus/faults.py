"""How what is sent travels between the in-process twins: at once, or as a simulation wants it."""

from __future__ import annotations

from collections.abc import Callable

Weather = Callable[[str, str, str, Callable[[], None]], None]
"""(sender, receiver, subject, deliver): calls `deliver` as often, and when, the message arrives. Sender and receiver
are the names of endpoints."""


def calm(_sender: str, _receiver: str, _subject: str, deliver: Callable[[], None]) -> None:
    """Everything arrives, once and at once."""
    deliver()
