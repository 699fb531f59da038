"""Discovery through etcd, over a few connections.

    calls       grants, puts, deletes, listings, one after another
    renewals    renews leases and does nothing else
    a watch     follows a prefix; each watch has its own

Every call has a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from functools import partial
from weakref import WeakSet

from prometheus_client import CollectorRegistry

from shared.config import DiscoveryConfig
from shared.discovery.contract import AskOwner, Change, Entries, Read
from shared.discovery.etcd_client import EtcdClient
from shared.discovery.etcd_lease import EtcdRegistration
from shared.discovery.etcd_watch import EtcdWatch, list_prefix
from shared.discovery.intake import DEFAULT, Intake, IntakeLimits
from shared.discovery.key_feed import KeyFeed, changes, listed
from shared.errors import ConfigError, DiscoveryDown
from shared.metrics import counter, register_metrics, register_scraped
from shared.rate_limited_log import RateLimitedLog

_log = logging.getLogger(__name__)

LEAST_TTL_S = 2.0
"""The shortest lease in seconds that etcd grants with its default election timeout."""
# fmt: off
_LEASES_LOST = counter("headrace_leases_lost", "",
    "Leases that ended before they were renewed. Others took this process for dead until it had a new one.",
    "The process stood still for longer than `discovery.lease_ttl_s`, or etcd did.")
# fmt: on


class EtcdDiscovery:
    """One process's endpoint at etcd, made and used in one event loop. Raise ConfigError."""

    # fmt: off
    _failures = counter("headrace_discovery_failures", "",
        "Calls that etcd did not answer. The last known view stays in use.", "etcd is slow or away.")
    # fmt: on

    def __init__(
        self,
        config: DiscoveryConfig,
        *,
        registry: CollectorRegistry | None = None,
        limits: IntakeLimits = DEFAULT,
    ) -> None:
        ttl_s = config.lease_ttl_s
        if ttl_s < LEAST_TTL_S:
            raise ConfigError(f"discovery.lease_ttl_s: {ttl_s} is too short; etcd needs at least {LEAST_TTL_S}")
        registry = CollectorRegistry() if registry is None else registry
        register_metrics(self, registry)
        self._connect = partial(EtcdClient, config, self._failures.inc)
        self._ttl_s = ttl_s
        self._endpoints = len(config.endpoints)
        self._limits = limits
        self._left_out = RateLimitedLog()
        self._calls = self._connect()
        self._renewals = self._connect()
        self._watches: dict[asyncio.Task[None], KeyFeed] = {}
        self._registrations: WeakSet[EtcdRegistration] = WeakSet()
        register_scraped(_LEASES_LOST, registry, lambda: sum(each.epoch - 1 for each in self._registrations))

    async def register(self, entries: Entries) -> EtcdRegistration:
        registration = EtcdRegistration(self._calls, self._renewals, entries, self._ttl_s)
        self._registrations.add(registration)
        async with AsyncExitStack() as unpublished:
            unpublished.push_async_callback(registration.close)
            await registration.publish()
            unpublished.pop_all()
        return registration

    async def watch(
        self, prefix: str, *, ask_owner: AskOwner | None = None, read: Read | None = None
    ) -> AsyncGenerator[Change]:
        feed = KeyFeed()
        watch = EtcdWatch(self._connect(), prefix, feed, self._ttl_s, read, self._limits)
        following = asyncio.create_task(watch.run(), name="etcd-watch")
        self._watches[following] = feed
        following.add_done_callback(self._watch_ended)
        try:
            async with aclosing(changes(feed, ttl_s=self._ttl_s, ask_owner=ask_owner)) as told:
                async for change in told:
                    yield change
        finally:
            following.cancel()

    def _watch_ended(self, following: asyncio.Task[None]) -> None:
        del self._watches[following]
        if not following.cancelled() and (fault := following.exception()) is not None:
            _log.error("a watch of discovery has ended, so its view stays as it is", exc_info=fault)

    def publishes(self, key: str) -> bool:
        return any(key in registration.wanted for registration in self._registrations)

    async def list(self, prefix: str) -> dict[str, bytes]:
        tries = self._endpoints
        while True:
            intake = Intake(limits=self._limits)
            tries -= 1
            try:
                await self._calls.call(partial(list_prefix, prefix=prefix, intake=intake, page=self._limits.page))
            except DiscoveryDown:  # a command lists once, so each endpoint is asked
                if not tries:
                    raise
            else:
                return listed(intake, self._left_out)

    async def close(self) -> None:
        """End the watches and stop the registrations. It does not wait for etcd."""
        watches = dict(self._watches)
        for following, feed in watches.items():
            feed.close()
            following.cancel()
        if watches:
            await asyncio.wait(watches)
        for registration in list(self._registrations):
            await registration.stop()
        await self._calls.close()
        await self._renewals.close()
