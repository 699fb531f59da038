"""Discovery inside one process. Simulations cause the faults of a back end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from contextvars import copy_context
from functools import partial

from shared.bus.delivery import Delivery, deliver_at_once
from shared.discovery.contract import AskOwner, Change, Entries, Read
from shared.discovery.intake import DEFAULT, Intake, IntakeLimits
from shared.discovery.key_feed import KeyFeed, changes, listed
from shared.errors import DiscoveryDown
from shared.rate_limited_log import RateLimitedLog


class MemoryStore:
    """The back end that several MemoryDiscovery endpoints share. One event loop.

    expire      a lease ends although its owner lives; the owner publishes again under the next epoch
    kill        a lease ends because its owner died
    wipe        the back end restarts empty; owners publish again
    outage      nothing can be read, written or watched until `recover`
    """

    def __init__(self, *, ttl_s: float = 0.05, delivery: Delivery = deliver_at_once) -> None:
        self.ttl_s = ttl_s
        """How long watchers keep a key that is missing after an outage; a lost lease is granted again after half of
        it."""
        self.delivery = delivery
        """The delivery to watches. Watches are streams: it may delay, but must not lose or reorder."""
        self._feeds: dict[KeyFeed, tuple[str, str, Intake]] = {}
        """The prefix, the watcher's name and the intake of each feed."""
        self._keys: dict[str, tuple[bytes, MemoryRegistration]] = {}
        self._registrations: dict[MemoryRegistration, None] = {}
        self._up = asyncio.Event()
        self._up.set()

    @property
    def away(self) -> bool:
        return not self._up.is_set()

    def expire(self, registration: MemoryRegistration) -> None:
        self._drop(registration)
        registration.lost()

    def kill(self, registration: MemoryRegistration) -> None:
        self._registrations.pop(registration, None)
        registration.end()
        self._drop(registration)

    def wipe(self) -> None:
        self._blind()
        self._keys.clear()
        for registration in self._registrations:
            registration.lost()
        self._show()

    def outage(self) -> None:
        self._up.clear()
        self._blind()

    def recover(self) -> None:
        self._up.set()
        self._show()

    async def up(self) -> None:
        """Wait until the back end can be reached."""
        await self._up.wait()

    def found(self, prefix: str) -> dict[str, bytes]:
        return {key: value for key, (value, _) in self._keys.items() if key.startswith(prefix)}

    def put(self, registration: MemoryRegistration, wanted: dict[str, bytes]) -> None:
        """Make `wanted` the only keys under this registration's lease."""
        self._registrations[registration] = None
        for key in [key for key, (_, owner) in self._keys.items() if owner is registration and key not in wanted]:
            del self._keys[key]
        self._keys.update({key: (value, registration) for key, value in wanted.items()})
        self._show()

    def revoke(self, registration: MemoryRegistration) -> None:
        self._registrations.pop(registration, None)
        self._drop(registration)

    def _drop(self, registration: MemoryRegistration) -> None:
        self._keys = {key: entry for key, entry in self._keys.items() if entry[1] is not registration}
        self._show()

    def watch(self, feed: KeyFeed, prefix: str, name: str, intake: Intake) -> None:
        """Show `feed` the keys below `prefix` that `intake` takes in, from now on."""
        self._feeds[feed] = (prefix, name, intake)
        if not self.away:
            _look(feed, intake, self.found(prefix))

    def unwatch(self, feed: KeyFeed) -> None:
        self._feeds.pop(feed, None)

    def _show(self) -> None:
        if not self.away:
            for feed, (prefix, name, intake) in self._feeds.items():
                self.delivery("discovery", name, "watch", partial(_look, feed, intake, self.found(prefix)))

    def _blind(self) -> None:
        for feed, (_, name, _) in self._feeds.items():
            self.delivery("discovery", name, "watch", feed.mark_unreachable)


def _look(feed: KeyFeed, intake: Intake, found: dict[str, bytes]) -> None:
    intake.load(found)
    feed.report_left_out(intake.left_out)
    feed.show(intake.entries)


class MemoryRegistration:
    """One lease of the store. Whatever follows its loss runs in the context in which it was registered."""

    def __init__(self, store: MemoryStore, entries: Entries) -> None:
        self._store = store
        self._context = copy_context()
        self._entries = entries
        self.epoch = 1
        self.wanted: Mapping[str, bytes] = {}
        """The keys and values that `entries` returned last."""
        self._again: asyncio.TimerHandle | None = None
        self._ended = False

    async def publish(self) -> None:
        await self._store.up()
        if not self._ended:
            self._put()

    def _put(self) -> None:
        wanted = self.wanted = dict(self._entries(self.epoch))
        if self._again is None:
            self._store.put(self, wanted)

    def lost(self) -> None:
        """End the lease. A new one follows a little later, as it would from a real back end."""
        if self._again is None and not self._ended:
            loop, delay_s = asyncio.get_running_loop(), self._store.ttl_s / 2
            self._again = loop.call_later(delay_s, self._grant, context=self._context)

    def _grant(self) -> None:
        self._again = None
        if self._store.away:
            self.lost()
            return
        self.epoch += 1
        self._put()

    def end(self) -> None:
        """Stop publishing for good."""
        self._ended = True
        self.wanted = {}
        if self._again is not None:
            self._again.cancel()
            self._again = None

    async def close(self) -> None:
        if not self._ended:
            self.end()
            self._store.revoke(self)


class MemoryDiscovery:
    """One process's endpoint at a shared store. `name` is what a `Delivery` sees."""

    def __init__(self, store: MemoryStore, name: str = "", *, limits: IntakeLimits = DEFAULT) -> None:
        self._store = store
        self._limits = limits
        self._left_out = RateLimitedLog()
        self._name = name
        self.registrations: list[MemoryRegistration] = []
        """Every registration that was made here."""
        self._feeds: set[KeyFeed] = set()

    async def register(self, entries: Entries) -> MemoryRegistration:
        registration = MemoryRegistration(self._store, entries)
        self.registrations.append(registration)
        await registration.publish()
        return registration

    async def watch(
        self, prefix: str, *, ask_owner: AskOwner | None = None, read: Read | None = None
    ) -> AsyncGenerator[Change]:
        feed = KeyFeed()
        self._feeds.add(feed)
        self._store.watch(feed, prefix, self._name, Intake(read, self._limits))
        try:
            async with aclosing(changes(feed, ttl_s=self._store.ttl_s, ask_owner=ask_owner)) as told:
                async for change in told:
                    yield change
        finally:
            self._feeds.discard(feed)
            self._store.unwatch(feed)

    def publishes(self, key: str) -> bool:
        return any(key in registration.wanted for registration in self.registrations)

    async def list(self, prefix: str) -> dict[str, bytes]:
        if self._store.away:
            raise DiscoveryDown("the store is away")
        intake = Intake(limits=self._limits)
        intake.load(self._store.found(prefix))
        return listed(intake, self._left_out)

    async def close(self) -> None:
        for feed in self._feeds:
            feed.close()
