"""A watch as a test sees it: all that was told, and waiting until it says what it should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.discovery.contract import Added, Alive, Change, Discovery, LeftOut, Read, Removed, Synced

LIMIT_S = 60.0


class Watched:
    """Changes told so far, and what they add up to."""

    def __init__(self) -> None:
        self.told: list[Change] = []
        self.entries: dict[str, bytes] = {}
        self.synced = False
        self.left_out = 0
        self._changed = asyncio.Condition()

    async def follow(
        self, discovery: Discovery, prefix: str, alive: Alive | None = None, read: Read | None = None
    ) -> None:
        async for change in discovery.watch(prefix, alive=alive, read=read):
            async with self._changed:
                self._take(change)
                self._changed.notify_all()

    def _take(self, change: Change) -> None:
        self.told.append(change)
        match change:
            case Added():
                assert self.entries.get(change.key) != change.value, "told twice"
                self.entries[change.key] = change.value
            case Removed():
                del self.entries[change.key]
            case Synced():
                assert not self.synced
                self.synced = True
            case LeftOut():
                self.left_out += change.count

    async def until(self, true: Callable[[Watched], bool]) -> None:
        async with asyncio.timeout(LIMIT_S), self._changed:
            await self._changed.wait_for(lambda: true(self))

    async def until_entries(self, expected: dict[str, bytes]) -> None:
        await self.until(lambda watched: watched.synced and watched.entries == expected)

    def removed(self, key: str) -> bool:
        return Removed(key) in self.told


@asynccontextmanager
async def watching(
    discovery: Discovery, prefix: str, alive: Alive | None = None, read: Read | None = None
) -> AsyncIterator[Watched]:
    """Watch until the block ends."""
    watched = Watched()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watched.follow(discovery, prefix, alive, read))
        await watched.until(lambda watched: watched.synced)
        yield watched
        task.cancel()
