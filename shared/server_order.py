"""The servers of a cluster in the order in which a client tries them: one that failed is tried last. Pure.

a b c ──a fails──▶ b c a ──b fails──▶ c a b ──c fails──▶ a b c: all have failed, so the client waits
                       └──b answers, and is lost later──▶ c a b
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from random import Random


class ServerOrder:
    """The addresses of one cluster, in an order that `draw` shuffles, so that clients spread over its servers."""

    def __init__(self, addresses: Sequence[str], draw: Random) -> None:
        assert addresses
        self._addresses = deque(draw.sample(addresses, len(addresses)))
        self._failures = 0
        """The number of failures since a server answered."""

    @property
    def current(self) -> str:
        """The server to use now."""
        return self._addresses[0]

    @property
    def several(self) -> bool:
        """Whether there is another server to go to."""
        return len(self._addresses) > 1

    def answered(self) -> None:
        """The current server answers."""
        self._failures = 0

    def lost(self) -> None:
        """Go on to the next server, since the current one answered and does so no longer."""
        self._failures = 0
        self._addresses.rotate(-1)

    def failed(self) -> bool:
        """Go on to the next server, since the current one does not answer. Return whether all have failed since one
        answered, or since this returned true."""
        self._addresses.rotate(-1)
        self._failures = (self._failures + 1) % len(self._addresses)
        return not self._failures
