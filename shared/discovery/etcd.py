"""Discovery through etcd. The client is synchronous, so it runs in threads.

    etcd-calls       grants, puts, deletes, listings, one after another
    etcd-keepalive   renews leases and does nothing else
    etcd-watch       follows a prefix; one thread for each watch

Each thread has its own connection, and every call has a deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from typing import TypeVar
from weakref import WeakSet

from etcd3 import MultiEndpointEtcd3Client
from prometheus_client import CollectorRegistry

from shared.discovery.contract import AskOwner, Change, Entries, Read
from shared.discovery.etcd_client import CALL_TIMEOUT_S, EtcdClient
from shared.discovery.etcd_lease import EtcdRegistration, KeepAlive
from shared.discovery.etcd_listing import list_prefix
from shared.discovery.etcd_watch import EtcdWatch
from shared.discovery.intake import DEFAULT, Intake, IntakeLimits
from shared.discovery.key_feed import KeyFeed, changes, listed
from shared.errors import ConfigError, DiscoveryDown
from shared.metrics import counter
from shared.rate_limited_log import RateLimitedLog

T = TypeVar("T")

LEAST_TTL_S = 2.0
"""The shortest lease in seconds that etcd grants with its default election timeout."""


class EtcdDiscovery:
    """One process's endpoint at etcd, made and used in one event loop. `endpoints` are host:port or unix:PATH."""

    def __init__(
        self,
        endpoints: Sequence[str],
        ttl_s: float = 10.0,
        user: str = "",
        password: str = "",
        *,
        registry: CollectorRegistry | None = None,
        limits: IntakeLimits = DEFAULT,
    ) -> None:
        if ttl_s < LEAST_TTL_S:
            raise ConfigError(f"discovery.lease_ttl_s: {ttl_s} is too short; etcd needs at least {LEAST_TTL_S}")
        failures = counter(
            CollectorRegistry() if registry is None else registry,
            "headrace_discovery_failures",
            "Calls that etcd did not answer. The last known view stays in use.",
        )
        self._connect: Callable[[], EtcdClient] = lambda: EtcdClient(endpoints, user, password, failures.inc)
        self._ttl_s = ttl_s
        self._limits = limits
        self._left_out = RateLimitedLog()
        self._client = self._connect()
        self._calls = ThreadPoolExecutor(1, thread_name_prefix="etcd-calls")
        self._keep_alive: KeepAlive | None = None
        self._watches: dict[EtcdWatch, KeyFeed] = {}
        self._registrations: WeakSet[EtcdRegistration] = WeakSet()

    async def register(self, entries: Entries) -> EtcdRegistration:
        if self._keep_alive is None:
            self._keep_alive = KeepAlive(self._connect(), self._ttl_s)
        registration = EtcdRegistration(self._call, self._keep_alive, entries, self._ttl_s)
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
        self._watches[watch] = feed
        try:
            async with aclosing(changes(feed, ttl_s=self._ttl_s, ask_owner=ask_owner)) as told:
                async for change in told:
                    yield change
        finally:
            self._watches.pop(watch, None)
            watch.stop()

    def publishes(self, key: str) -> bool:
        return any(key in registration.wanted for registration in self._registrations)

    async def list(self, prefix: str) -> dict[str, bytes]:
        intake = Intake(limits=self._limits)
        await self._call(lambda etcd: list_prefix(etcd, prefix, intake, self._limits.page))
        return listed(intake, self._left_out)

    async def close(self) -> None:
        """Close within about twice a call's deadline, whatever etcd does."""
        threads: list[EtcdWatch | KeepAlive] = list(self._watches)
        for feed in self._watches.values():
            feed.close()
        if self._keep_alive is not None:
            threads.append(self._keep_alive)
        for thread in threads:
            thread.stop()
        self._calls.shutdown(wait=False, cancel_futures=True)
        for thread in threads:
            await asyncio.to_thread(thread.join, 2 * CALL_TIMEOUT_S)
        await asyncio.to_thread(self._calls.shutdown)
        self._client.close()

    async def _call(self, operation: Callable[[MultiEndpointEtcd3Client], T]) -> T:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._calls, self._client.call, operation)
        except DiscoveryDown as wrong:
            self._client.report(wrong)
            raise
