"""Follows one prefix of etcd.

    ┌▶ list at revision r ─▶ watch from r + 1 ─▶ error, restart, compaction ─┐
    └──────────────────────── out of reach, a pause ◀────────────────────────┘

It lists again each time, since a revision means nothing to an etcd that was wiped. On the stream it asks for progress
four times per TTL. A silence longer than half a TTL means that etcd was frozen, or this process was, and leases may
have ended meanwhile. After a silence of a whole TTL the stream is closed, and a new connection is made. gRPC's own
keepalive did not do that: a stream to a stopped etcd stayed open for 25 s with a limit of 9.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from random import SystemRandom
from typing import NoReturn

import grpc
import grpc.aio
from etcd3.utils import prefix_range_end

from shared.discovery.contract import Read
from shared.discovery.etcd_client import EtcdClient, EtcdConnection, rpc
from shared.discovery.intake import DEFAULT, Intake, IntakeLimits
from shared.discovery.key_feed import KeyFeed
from shared.errors import DiscoveryDown

_RETRY_S = (0.1, 1.0)


_FIRST_PAGE = 8
_PAGE_BYTES = 1 << 20
"""A page of this size is not followed by a larger one: the event loop stands still while it reads a page."""


async def list_prefix(etcd: EtcdConnection, prefix: str, intake: Intake, page: int) -> int:
    """Load everything below `prefix` into `intake`, at most `page` keys at a time. Return the revision of the listing.

    Each page has a call's deadline. Raise grpc.RpcError.

    A listing in one message has no bound of size or time: a single key too many, and it could never be read.
    """
    size, revision = min(page, _FIRST_PAGE), 0

    async def pages() -> AsyncIterator[list[tuple[int, str, bytes]]]:
        nonlocal size, revision
        first, more = prefix.encode(), True
        end = prefix_range_end(first)
        while more:
            asked = rpc.RangeRequest(key=first, range_end=end, limit=size, revision=revision)
            try:
                listed = await etcd.ask(etcd.kv.Range, asked)
            except grpc.aio.AioRpcError as wrong:
                if size == 1 or wrong.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED:
                    raise
                size //= 2
                continue
            size = min(page, 2 * size) if listed.ByteSize() < _PAGE_BYTES else max(1, size // 2)
            revision = revision or listed.header.revision
            yield [(entry.create_revision, text(entry.key), entry.value) for entry in listed.kvs]
            more = listed.more
            if more:
                first = listed.kvs[-1].key + b"\0"

    await intake.load_pages(pages())
    return revision


def text(key: bytes) -> str:
    """Decode a key; bytes that are not UTF-8 are escaped."""
    return key.decode(errors="backslashreplace")


class EtcdWatch:
    """Shows the keys below `prefix` to `feed`."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        feed: KeyFeed,
        ttl_s: float,
        read: Read | None = None,
        limits: IntakeLimits = DEFAULT,
    ) -> None:
        self._client = client
        self._intake = Intake(read, limits)
        self._page = limits.page
        self._prefix = prefix
        self._feed = feed
        self._ttl_s = ttl_s

    async def run(self) -> NoReturn:
        """Follow the prefix until cancelled; the connection is closed then."""
        try:
            while True:
                try:
                    revision = await self._client.call(self._list)
                    if await self._client.call(partial(self._follow, revision=revision)):
                        continue
                except DiscoveryDown:
                    pass  # the client has logged it
                self._feed.mark_unreachable()
                await asyncio.sleep(SystemRandom().uniform(*_RETRY_S))
        finally:
            await self._client.close()

    async def _list(self, etcd: EtcdConnection) -> int:
        """Take in a listing. Return its revision."""
        return await list_prefix(etcd, self._prefix, self._intake, self._page)

    async def _follow(self, etcd: EtcdConnection, revision: int) -> bool:
        """Show the listing and every change since, until etcd cancels the watch.

        Return True if nothing is wrong, but a new listing would show more keys.
        """
        intake, feed = self._intake, self._feed
        clock = asyncio.get_running_loop().time
        feed.report_left_out(intake.left_out)
        feed.show(dict(intake.entries))
        heard = clock()
        stream = etcd.watch.Watch(self._requests(revision + 1), metadata=etcd.metadata)
        try:
            while not intake.reload_due:
                async with asyncio.timeout(self._ttl_s):
                    answer = await stream.read()
                if answer is grpc.aio.EOF:  # pyright: ignore[reportAttributeAccessIssue]  grpc names it in no stub
                    return False
                silence_s, heard = clock() - heard, clock()
                if silence_s > self._ttl_s / 2:
                    feed.mark_stale()
                changed = False
                for event in answer.events:
                    key = text(event.kv.key)
                    gone = event.type == event.DELETE
                    changed |= intake.remove(key) if gone else intake.put(key, event.kv.value)
                if intake.left_out != feed.left_out:
                    feed.report_left_out(intake.left_out)
                if changed:
                    feed.show(dict(intake.entries))
                if answer.canceled:
                    return False
            return True
        finally:
            stream.cancel()

    async def _requests(self, revision: int) -> AsyncIterator[object]:
        """Yield the requests of the stream. A task of gRPC's pulls them; it ends with the stream."""
        prefix = self._prefix.encode()
        create = rpc.WatchCreateRequest(key=prefix, range_end=prefix_range_end(prefix), start_revision=revision)
        yield rpc.WatchRequest(create_request=create)
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            yield rpc.WatchRequest(progress_request=rpc.WatchProgressRequest())
