"""Hands the latest keys from a back end's task to one watcher, which turns them into changes.

A slow watcher skips states, so at most one state waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping

from shared.discovery.contract import AskOwner, Change, LeftOut, OwnerAnswer
from shared.discovery.intake import Intake
from shared.discovery.key_view import KeyView
from shared.rate_limited_log import RateLimitedLog


class KeyFeed:
    """The keys below a prefix as a back end shows them now."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self.state: tuple[Mapping[str, bytes] | None, int] = (None, 0)
        """The keys and values in order of creation, or None if the back end is out of reach; the number of outages."""
        self.left_out = LeftOut(0)
        """The number of keys left out so far, and the latest one."""
        self.closed = False

    def show(self, found: Mapping[str, bytes]) -> None:
        """Show `found`, which must not be changed afterwards."""
        self._set(found, self.state[1])

    def report_left_out(self, left_out: LeftOut) -> None:
        """Report keys that were left out, before `show` of the others."""
        self.left_out = left_out
        self._changed.set()

    def mark_stale(self) -> None:
        """Count an outage: leases may have ended unseen, so a key that is missing from now on may come back."""
        self._set(self.state[0], self.state[1] + 1)

    def mark_unreachable(self) -> None:
        """Report that the back end is out of reach. This is an outage only if something was shown before."""
        found, losses = self.state
        self._set(None, losses if found is None else losses + 1)

    def close(self) -> None:
        """End the watch."""
        self.closed = True
        self._changed.set()

    def _set(self, found: Mapping[str, bytes] | None, losses: int) -> None:
        self.state = (found, losses)
        self._changed.set()

    async def wait(self, timeout_s: float | None) -> None:
        """Wait until something has changed since the last call, or for `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        self._changed.clear()


async def changes(feed: KeyFeed, *, ttl_s: float, ask_owner: AskOwner | None) -> AsyncGenerator[Change]:
    """Yield what `Discovery.watch` yields, until the feed is closed."""
    view = KeyView(ttl_s)
    clock = asyncio.get_running_loop().time
    counted = 0
    while True:
        due_at = view.next_due
        await feed.wait(None if due_at is None else max(0.0, due_at - clock()))
        if feed.closed:
            return
        left_out = feed.left_out
        if left_out.count > counted:
            yield LeftOut(left_out.count - counted, left_out.key, left_out.why)
            counted = left_out.count
        found, losses = feed.state
        if found is None:
            view.mark_unreachable()
        else:
            for change in view.update(clock(), found, losses):
                yield change
        owners = await _asked(view.keys_to_verify(clock()), ask_owner)
        shown = feed.state[0]  # meanwhile a key may have come back, or the back end may be out of reach
        if shown is not None:
            for change in view.apply_owner_answers(clock(), {key: owners[key] for key in owners.keys() - shown.keys()}):
                yield change


def listed(intake: Intake, limited_log: RateLimitedLog) -> dict[str, bytes]:
    """Return what `Discovery.list` returns, and log the keys that were left out."""
    left_out = intake.left_out
    if left_out.count:
        limited_log.warn("discovery: a key is left out of a listing", f"{left_out.key}: {left_out.why}", left_out.count)
    return intake.entries


async def _asked(due: Mapping[str, bytes], ask_owner: AskOwner | None) -> dict[str, OwnerAnswer]:
    if ask_owner is None:
        return dict.fromkeys(due, "gone")
    async with asyncio.TaskGroup() as tasks:
        asked = {key: tasks.create_task(_ask(ask_owner, key, value)) for key, value in due.items()}
    return {key: answer.result() for key, answer in asked.items()}


async def _ask(ask_owner: AskOwner, key: str, value: bytes) -> OwnerAnswer:
    return await ask_owner(key, value)
