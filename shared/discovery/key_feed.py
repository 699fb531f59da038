"""From a back end's thread or task to one watcher: the latest state, and the changes it makes.

A watcher that is slow skips states, so what waits for it is never more than one state.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from shared.discovery.contract import Alive, Change, LeftOut, Owner
from shared.discovery.intake import Intake
from shared.discovery.key_view import KeyView
from shared.rate_limited_log import RateLimitedLog


class KeyFeed:
    """What a back end shows of a prefix now. Set from one thread, awaited in the event loop that made it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._state: tuple[Mapping[str, bytes] | None, int] = (None, 0)
        self.closed = False
        self._left_out = LeftOut(0)

    @property
    def left_out(self) -> LeftOut:
        """All that was left out of what is shown so far, and the latest one."""
        return self._left_out

    @property
    def state(self) -> tuple[Mapping[str, bytes] | None, int]:
        """(keys and values in order of creation, or None: out of sight; how often sight was lost so far)."""
        return self._state

    def set(self, found: Mapping[str, bytes]) -> None:
        """Any thread. `found` must not be changed afterwards."""
        self._set(found, self._state[1])

    def leave_out(self, left_out: LeftOut) -> None:
        """Any thread. Called before what it was left out of is shown."""
        self._left_out = left_out
        self._wake()

    def mark_stale(self) -> None:
        """Any thread. Leases may have ended unseen: what is gone from the next state on may come back."""
        self._set(self._state[0], self._state[1] + 1)

    def lost(self) -> None:
        """Any thread. The back end is away. Before anything was shown this says nothing new."""
        found, losses = self._state
        self._set(None, losses if found is None else losses + 1)

    def close(self) -> None:
        """Any thread. Ends the watch."""
        self.closed = True
        self._wake()

    def _set(self, found: Mapping[str, bytes] | None, losses: int) -> None:
        self._state = (found, losses)
        self._wake()

    def _wake(self) -> None:
        try:
            self._loop.call_soon_threadsafe(self._changed.set)
        except RuntimeError:
            self.closed = True  # the loop has ended, and with it the watcher

    async def wait(self, timeout_s: float | None) -> None:
        """Returns when something was set since the last call, or after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()


async def changes(sight: KeyFeed, *, ttl_s: float, alive: Alive | None) -> AsyncGenerator[Change]:
    """What `Discovery.watch` yields, until the sight is closed."""
    view = KeyView(ttl_s)
    clock = asyncio.get_running_loop().time
    counted = 0
    while True:
        due_at = view.next_due
        await sight.wait(None if due_at is None else max(0.0, due_at - clock()))
        if sight.closed:
            return
        left_out = sight.left_out
        if left_out.count > counted:
            yield LeftOut(left_out.count - counted, left_out.key, left_out.why)
            counted = left_out.count
        found, losses = sight.state
        if found is None:
            view.lost()
        else:
            for change in view.update(clock(), found, losses):
                yield change
        owners = await _asked(view.suspects(clock()), alive)
        shown = sight.state[0]  # meanwhile a key may have come back, or all be out of sight
        if shown is not None:
            for change in view.verdicts(clock(), {key: owners[key] for key in owners.keys() - shown.keys()}):
                yield change


def listed(intake: Intake, limited_log: RateLimitedLog) -> dict[str, bytes]:
    """What `Discovery.list` returns of what was taken in."""
    left_out = intake.left_out
    if left_out.count:
        limited_log.warn("discovery: a key is left out of a listing", f"{left_out.key}: {left_out.why}", left_out.count)
    return intake.entries


async def _asked(due: Mapping[str, bytes], alive: Alive | None) -> dict[str, Owner]:
    if alive is None:
        return dict.fromkeys(due, "gone")
    async with asyncio.TaskGroup() as tasks:
        asked = {key: tasks.create_task(_ask(alive, key, value)) for key, value in due.items()}
    return {key: answer.result() for key, answer in asked.items()}


async def _ask(alive: Alive, key: str, value: bytes) -> Owner:
    return await alive(key, value)
