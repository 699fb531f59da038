"""A watch for tests: all reported changes, and a wait for the expected ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from shared.discovery.contract import AskOwner, Change, Discovery, KeyAdded, KeyRemoved, LeftOut, Read, Synced

LIMIT_S = 180.0


class Watched:
    """The changes reported so far, and the entries that follow from them."""

    def __init__(self) -> None:
        self.reported: list[Change] = []
        self.entries: dict[str, bytes] = {}
        self.synced = False
        self.left_out = 0
        self._changed = asyncio.Condition()

    async def follow(
        self, discovery: Discovery, prefix: str, ask_owner: AskOwner | None = None, read: Read | None = None
    ) -> None:
        async for change in discovery.watch(prefix, ask_owner=ask_owner, read=read):
            async with self._changed:
                self._take(change)
                self._changed.notify_all()

    def _take(self, change: Change) -> None:
        self.reported.append(change)
        match change:
            case KeyAdded():
                assert self.entries.get(change.key) != change.value, "reported twice"
                self.entries[change.key] = change.value
            case KeyRemoved():
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
        return KeyRemoved(key) in self.reported


@asynccontextmanager
async def watching(
    discovery: Discovery, prefix: str, ask_owner: AskOwner | None = None, read: Read | None = None
) -> AsyncIterator[Watched]:
    """Watch until the block ends."""
    watched = Watched()
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watched.follow(discovery, prefix, ask_owner, read))
        await watched.until(lambda watched: watched.synced)
        yield watched
        task.cancel()
