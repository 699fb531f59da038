"""A registration in etcd: keys under a lease, which it keeps alive.

granting ──granted──▶ writing ──written──▶ settled
   ▲                     ▲  │ lost            │ │ lost
   │                     └──┼─────────────────┘ │       publish(); and once per TTL, to repair differences
   └────────────────────────┴───────────────────┘       with jitter, epoch + 1
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping
from functools import partial
from random import SystemRandom

from shared.discovery.contract import Entries
from shared.discovery.etcd_client import CALL_TIMEOUT_S, EtcdClient, EtcdConnection, LeaseGone, rpc
from shared.errors import DiscoveryDown

_RETRY_S = (0.1, 1.0)


class EtcdRegistration:
    """Keys under a lease. Only one task writes them, so that no two writes run at once.

    `renewals` is a connection apart from `writes`, so that no write holds up a renewal.
    """

    def __init__(self, writes: EtcdClient, renewals: EtcdClient, entries: Entries, ttl_s: float) -> None:
        self._writes = writes
        self._renewals = renewals
        self._entries = entries
        self._ttl_s = ttl_s
        self._epoch = 1
        self._lease: int | None = None
        self.wanted: Mapping[str, bytes] = {}
        """The keys and values that `entries` returned last."""
        self._named: set[str] = set()
        """Every key that `entries` ever returned: a delayed put may bring back one that it no longer returns."""
        self._wake = asyncio.Event()
        self._waiting: list[asyncio.Future[None]] = []
        """The calls of publish() for which no write has begun yet."""
        self._task = asyncio.create_task(self._maintain(), name="etcd-registration")
        self._renewing = asyncio.create_task(self._renew(), name="etcd-renewal")

    @property
    def epoch(self) -> int:
        return self._epoch

    async def publish(self) -> None:
        written = asyncio.get_running_loop().create_future()
        self._waiting.append(written)
        self._wake.set()
        await asyncio.wait((written, self._task), return_when=asyncio.FIRST_COMPLETED)
        if not written.done() and not self._task.cancelled():
            self._task.result()  # the task never returns: this raises what `entries` raised

    async def close(self) -> None:
        self.wanted = {}
        await self.stop()
        lease, self._lease = self._lease, None
        if lease is None:
            return
        revoke = rpc.LeaseRevokeRequest(ID=lease)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._writes.call(lambda etcd: etcd.ask(etcd.lease.LeaseRevoke, revoke))
        except (DiscoveryDown, TimeoutError):
            return  # the lease ends by itself

    async def stop(self) -> None:
        """Write and renew no more; the keys stay until the lease ends."""
        tasks = (self._task, self._renewing)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    async def _maintain(self) -> None:
        while True:
            self._wake.clear()
            waiting, self._waiting = self._waiting, []
            try:
                lease = self._lease if self._lease is not None else await self._grant()
                await self._write(lease)
            except DiscoveryDown as wrong:
                self._waiting = waiting + self._waiting
                if isinstance(wrong, LeaseGone):
                    self._lost(self._lease)
                await asyncio.sleep(SystemRandom().uniform(*_RETRY_S))
                continue
            for written in waiting:
                if not written.done():
                    written.set_result(None)
            await self._settled()

    async def _grant(self) -> int:
        asked = rpc.LeaseGrantRequest(TTL=math.ceil(self._ttl_s))
        lease: int = (await self._writes.call(lambda etcd: etcd.ask(etcd.lease.LeaseGrant, asked))).ID
        self._lease = lease
        return lease

    async def _renew(self) -> None:
        """Renew the lease five times per TTL.

        A process whose event loop stands still for most of a TTL is useless: its lease ends.
        """
        while True:
            await asyncio.sleep(self._ttl_s / 5)
            if (lease := self._lease) is None:
                continue
            try:
                alive = await self._renewals.call(partial(_keep_alive, lease=lease))
            except DiscoveryDown as wrong:
                alive = not isinstance(wrong, LeaseGone)
            if not alive:
                self._lost(lease)

    async def _write(self, lease: int) -> None:
        wanted = self.wanted = dict(self._entries(self._epoch))
        self._named |= wanted.keys()
        named = [*wanted, *sorted(self._named - wanted.keys())]
        await self._writes.call(lambda etcd: _put_right(etcd, lease, wanted, named))

    async def _settled(self) -> None:
        """Wait until publish() or a lost lease wakes the task, or a TTL has passed."""
        try:
            async with asyncio.timeout(self._ttl_s):
                await self._wake.wait()
        except TimeoutError:
            return
        if self._lease is None:
            await asyncio.sleep(SystemRandom().uniform(0.0, self._ttl_s / 4))

    def _lost(self, lease: int | None) -> None:
        if lease is not None and lease == self._lease:
            self._lease = None
            self._epoch += 1
            self._wake.set()


async def _keep_alive(etcd: EtcdConnection, lease: int) -> bool:
    """Renew a lease. Return whether it was there."""
    asked = [rpc.LeaseKeepAliveRequest(ID=lease)]
    answers = etcd.lease.LeaseKeepAlive(asked, timeout=CALL_TIMEOUT_S, metadata=etcd.metadata)
    return any([answer.TTL > 0 async for answer in answers])


async def _put_right(etcd: EtcdConnection, lease: int, wanted: Mapping[str, bytes], named: Iterable[str]) -> None:
    """Make etcd hold `wanted` under `lease`, and none of the other `named` keys. Idempotent."""
    for name in named:
        key, value = name.encode(), wanted.get(name)
        ours = {
            found.value
            for found in (await etcd.ask(etcd.kv.Range, rpc.RangeRequest(key=key))).kvs
            if found.lease == lease
        }
        if value is None and ours:
            await etcd.ask(etcd.kv.DeleteRange, rpc.DeleteRangeRequest(key=key))
        if value is not None and value not in ours:
            await etcd.ask(etcd.kv.Put, rpc.PutRequest(key=key, value=value, lease=lease))
