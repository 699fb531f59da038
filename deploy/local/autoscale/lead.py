"""Which of several `headrace autoscale` of a fleet acts.

    list, and register with the next rank ─▶ list at each look ─▶ the lowest rank acts, the others watch

The entry is under a lease, so one that ends or is cut off from discovery makes way for the next.
"""

from __future__ import annotations

import asyncio
import os
import platform
import secrets

import msgspec
from msgspec import Struct

from deploy.local.show.status import DISCOVERY_LIMIT_S
from shared import subjects
from shared.config import ServiceConfig
from shared.discovery.backends import open_discovery
from shared.discovery.contract import Registration
from shared.errors import MALFORMED, DiscoveryDown


class AutoscalerEntry(Struct, frozen=True, order=True):
    """One autoscaler, as the others see it; the least one acts."""

    rank: int
    key: str
    host: str
    pid: int


class Lead:
    """The place of this process among the autoscalers of a fleet, from the first question on."""

    def __init__(self, config: ServiceConfig) -> None:
        """Open discovery, in a running event loop."""
        self._discovery = open_discovery(config.discovery)
        self._prefix = subjects.autoscalers_prefix(config.namespace)
        self._key = f"{self._prefix}{secrets.token_hex(8)}"
        self._registration: Registration | None = None

    async def other(self) -> str:
        """Return which autoscaler acts in place of this one. Empty if this one does. Raise DiscoveryDown."""
        try:
            async with asyncio.timeout(DISCOVERY_LIMIT_S):
                found = await self._found()
                if self._registration is None:
                    rank = max((each.rank for each in found), default=0) + 1
                    entry = AutoscalerEntry(rank, self._key, platform.node(), os.getpid())
                    value = msgspec.json.encode(entry)
                    self._registration = await self._discovery.register(lambda _epoch: {self._key: value})
                    found = await self._found()
        except TimeoutError:
            raise DiscoveryDown(f"discovery did not answer within {DISCOVERY_LIMIT_S:g} s") from None
        if all(each.key != self._key for each in found):
            raise DiscoveryDown("discovery has lost the entry of this autoscaler, which is made again")
        first = min(found)
        return "" if first.key == self._key else f"process {first.pid} on {first.host}"

    async def close(self) -> None:
        """Make way for the next one."""
        if self._registration is not None:
            await self._registration.close()
        await self._discovery.close()

    async def _found(self) -> list[AutoscalerEntry]:
        """Return the autoscalers of the fleet."""
        entries = await self._discovery.list(self._prefix)
        try:
            return [msgspec.json.decode(value, type=AutoscalerEntry) for value in entries.values()]
        except MALFORMED as wrong:
            raise DiscoveryDown(f"an entry below {self._prefix} is no autoscaler's: {wrong}") from None
