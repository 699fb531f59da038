"""Waits for a turn at places that all API keys share: the shell of turns.py."""

from __future__ import annotations

import asyncio

from services.frontend.auth.turns import Turns


class Turnstile:
    """Some places and those that wait for one, in one event loop."""

    def __init__(self, places: int, own: int) -> None:
        """Create it with this many places, of which one key may hold `own`."""
        self._turns: Turns[asyncio.Future[None]] = Turns(places, own)

    async def enter(self, key: str) -> None:
        """Wait for a place; `leave` gives it back. A cancelled call takes none."""
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._turns.join(key, turn)
        self._call()
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # it was called just before
                self.leave(key)
            else:
                self._turns.leave(key, turn)
            raise

    def is_slow(self, key: str) -> bool:
        """Return whether what the key used its last place for took too much."""
        return self._turns.is_slow(key)

    def leave(self, key: str, *, too_much: bool = False) -> None:
        """Give a place of this key back; `too_much`: what it was used for took too much."""
        self._turns.end(key, too_much=too_much)
        self._call()

    def _call(self) -> None:
        for turn in self._turns.pop():
            turn.set_result(None)
