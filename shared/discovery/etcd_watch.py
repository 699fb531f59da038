"""The thread that follows one prefix of etcd.

    ┌▶ list at revision r ─▶ watch from r + 1 ─▶ error, restart, compaction ─┐
    └──────────────────────── out of reach, a pause ◀────────────────────────┘

It lists again each time, since a revision means nothing to an etcd that was wiped. On the stream it asks for progress
four times per TTL. A silence longer than half a TTL means that etcd was frozen, or this process was, and leases may
have ended meanwhile. After a silence of a whole TTL the stream is closed, and a new connection is made. gRPC's own
keepalive did not do that: a stream to a stopped etcd stayed open for 25 s with a limit of 9.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from functools import partial
from random import SystemRandom
from typing import Any

import grpc
from etcd3 import MultiEndpointEtcd3Client, etcdrpc
from etcd3.utils import prefix_range_end

from shared.discovery.contract import Read
from shared.discovery.etcd_client import EtcdClient
from shared.discovery.etcd_listing import list_prefix, text
from shared.discovery.intake import DEFAULT, Intake, IntakeLimits
from shared.discovery.key_feed import KeyFeed
from shared.errors import DiscoveryDown

_RETRY_S = (0.1, 1.0)
_RPC: Any = etcdrpc  # generated code; its types are not written down


class EtcdWatch:
    """Shows the keys below `prefix` to `feed`, until stopped."""

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
        self._stopping = threading.Event()
        self._call: grpc.Call | None = None
        self._heard = 0.0
        """When the last message came on the stream."""
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting: it ends within a call's deadline."""
        self._stopping.set()
        if self._call is not None:
            self._call.cancel()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                revision = self._client.call(self._list)
                if self._client.call(partial(self._follow, revision=revision)):
                    continue
            except DiscoveryDown as wrong:
                if not self._stopping.is_set():
                    self._client.report(wrong)
            self._feed.mark_unreachable()
            self._stopping.wait(SystemRandom().uniform(*_RETRY_S))
        self._client.close()

    def _list(self, etcd: MultiEndpointEtcd3Client) -> int:
        """Take in a listing. Return its revision."""
        return list_prefix(etcd, self._prefix, self._intake, self._page)

    def _follow(self, etcd: MultiEndpointEtcd3Client, revision: int) -> bool:
        """Show the listing and every change since, until etcd cancels the watch.

        Return True if nothing is wrong, but a new listing would show more keys.
        """
        intake, feed = self._intake, self._feed
        feed.report_left_out(intake.left_out)
        feed.show(dict(intake.entries))
        self._heard = time.monotonic()
        requests = self._requests(revision + 1)
        call = self._call = _RPC.WatchStub(etcd.channel).Watch(requests, metadata=etcd.metadata)
        for answer in call:
            now = time.monotonic()
            if now - self._heard > self._ttl_s / 2:
                feed.mark_stale()
            self._heard = now
            changed = False
            for event in answer.events:
                key = text(event.kv.key)
                gone = event.type == event.DELETE
                changed |= intake.remove(key) if gone else intake.put(key, event.kv.value)
            if intake.left_out != feed.left_out:
                feed.report_left_out(intake.left_out)
            if changed:
                feed.show(dict(intake.entries))
            if answer.canceled or self._stopping.is_set():
                return False
            if intake.reload_due:
                call.cancel()
                return True
        return False

    def _requests(self, revision: int) -> Iterator[object]:
        """Yield the requests of the stream. A thread of gRPC's pulls them; it ends with the stream."""
        prefix = self._prefix.encode()
        create = _RPC.WatchCreateRequest(key=prefix, range_end=prefix_range_end(prefix), start_revision=revision)
        yield _RPC.WatchRequest(create_request=create)
        while not self._stopping.wait(self._ttl_s / 4):
            if time.monotonic() - self._heard > self._ttl_s and self._call is not None:
                self._call.cancel()
                return
            yield _RPC.WatchRequest(progress_request=_RPC.WatchProgressRequest())
