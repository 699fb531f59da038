"""Leases in etcd: the thread that keeps them alive, and a registration that publishes under one.

granting ──granted──▶ writing ──written──▶ settled
   ▲                     ▲  │ lost            │ │ lost
   │                     └──┼─────────────────┘ │       publish(); and once per TTL, to repair differences
   └────────────────────────┴───────────────────┘       with jitter, epoch + 1
"""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from random import SystemRandom
from typing import Protocol, TypeVar

from etcd3 import MultiEndpointEtcd3Client

from shared.discovery.contract import Entries
from shared.discovery.etcd_client import CALL_TIMEOUT_S, EtcdClient, LeaseGone
from shared.errors import DiscoveryDown

_RETRY_S = (0.1, 1.0)

T = TypeVar("T")


class Calls(Protocol):
    """Runs an operation in the thread etcd-calls. Raises what EtcdClient.call raises."""

    def __call__(self, operation: Callable[[MultiEndpointEtcd3Client], T]) -> Awaitable[T]: ...


class KeepAlive:
    """A thread that only renews leases, three times per TTL, as long as the event loop runs.

    A process whose event loop has stood still for a TTL is useless, so its leases are left to end.
    """

    def __init__(self, client: EtcdClient, ttl_s: float) -> None:
        self._client = client
        self._ttl_s = ttl_s
        self._loop = asyncio.get_running_loop()
        self._loop_moved = time.monotonic()
        self._leases: dict[int, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="etcd-keepalive", daemon=True)
        self._thread.start()

    def add(self, lease: int, lost: Callable[[], None]) -> None:
        """Renew `lease` from now on. If it is gone, `lost` is called once, in the event loop."""
        with self._lock:
            self._leases[lease] = lost

    def remove(self, lease: int) -> None:
        with self._lock:
            self._leases.pop(lease, None)

    def stop(self) -> None:
        """Ask the thread to end, without waiting: it ends within a call's deadline."""
        self._stopping.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.wait(self._ttl_s / 3):
            if not self._in_loop(self._mark):
                break
            if time.monotonic() - self._loop_moved > self._ttl_s:
                continue
            with self._lock:
                leases = list(self._leases)
            try:
                for lease in leases:
                    self._renew(lease)
            except DiscoveryDown as wrong:
                self._client.report(wrong)
        self._client.close()

    def _renew(self, lease: int) -> None:
        try:
            answers = self._client.call(lambda etcd: list(etcd.refresh_lease(lease)))
        except LeaseGone:
            answers = []
        if any(answer.TTL > 0 for answer in answers):
            return
        with self._lock:
            lost = self._leases.pop(lease, None)
        if lost is not None:
            self._in_loop(lost)

    def _mark(self) -> None:
        self._loop_moved = time.monotonic()

    def _in_loop(self, action: Callable[[], None]) -> bool:
        """Call `action` in the event loop. Return False if that has ended."""
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:
            return False
        return True


class EtcdRegistration:
    """Keys under a lease. Only one task writes them, so that no two writes run at once."""

    def __init__(self, calls: Calls, keep_alive: KeepAlive, entries: Entries, ttl_s: float) -> None:
        self._calls = calls
        self._keep_alive = keep_alive
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
        self._task.cancel()
        await asyncio.wait((self._task,))
        lease, self._lease = self._lease, None
        if lease is None:
            return
        self._keep_alive.remove(lease)
        try:
            async with asyncio.timeout(CALL_TIMEOUT_S):
                await self._calls(lambda etcd: etcd.revoke_lease(lease))
        except (DiscoveryDown, TimeoutError):
            return  # the lease ends by itself

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
        ttl_s = math.ceil(self._ttl_s)
        lease: int = await self._calls(lambda etcd: etcd.lease(ttl_s).id)
        self._lease = lease
        self._keep_alive.add(lease, lambda: self._lost(lease))
        return lease

    async def _write(self, lease: int) -> None:
        wanted = self.wanted = dict(self._entries(self._epoch))
        self._named |= wanted.keys()
        named = [*wanted, *sorted(self._named - wanted.keys())]
        await self._calls(lambda etcd: _put_right(etcd, lease, wanted, named))

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
            self._keep_alive.remove(lease)
            self._lease = None
            self._epoch += 1
            self._wake.set()


def _put_right(etcd: MultiEndpointEtcd3Client, lease: int, wanted: Mapping[str, bytes], named: Iterable[str]) -> None:
    """Make etcd hold `wanted` under `lease`, and none of the other `named` keys. Idempotent."""
    for key in named:
        value, found = etcd.get(key)
        ours = found is not None and found.lease_id == lease
        if key in wanted:
            if not ours or value != wanted[key]:
                etcd.put(key, wanted[key], lease)
        elif ours:
            etcd.delete(key)
