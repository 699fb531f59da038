"""The thread that follows one prefix of etcd.

    ┌▶ list at revision r ─▶ watch from r + 1 ─▶ error, restart, compaction ─┐
    └───────────────────────── lost from sight, a pause ◀────────────────────┘

It lists anew each time, since a revision means nothing to an etcd that was wiped. On the stream it asks for progress
four times a TTL: a silence longer than half a TTL was a frozen etcd (or a frozen process of ours), and leases may have
ended in it; after a whole one the stream is given up for a new connection. gRPC's own keepalive never did that: a
stream to a stopped etcd stood for 25 s with a limit of 9.
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
from shared.discovery.intake import DEFAULT, Intake, Limits
from shared.discovery.key_feed import KeyFeed
from shared.errors import DiscoveryDown

_RETRY_S = (0.1, 1.0)
_RPC: Any = etcdrpc  # generated code; its types are not written down


class EtcdWatch:
    """Shows `sight` what stands below `prefix`, until stopped."""

    def __init__(
        self,
        client: EtcdClient,
        prefix: str,
        sight: KeyFeed,
        ttl_s: float,
        read: Read | None = None,
        limits: Limits = DEFAULT,
    ) -> None:
        self._client = client
        self._intake = Intake(read, limits)
        self._page = limits.page
        self._prefix = prefix
        self._sight = sight
        self._ttl_s = ttl_s
        self._stopping = threading.Event()
        self._call: grpc.Call | None = None
        self._heard = 0.0
        """When the stream last said anything."""
        self._thread = threading.Thread(target=self._run, name="etcd-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Returns at once; the thread ends soon after, within a call's deadline at worst."""
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
            self._sight.lost()
            self._stopping.wait(SystemRandom().uniform(*_RETRY_S))
        self._client.close()

    def _list(self, etcd: MultiEndpointEtcd3Client) -> int:
        """Take in what is there; returns as of which revision."""
        return list_prefix(etcd, self._prefix, self._intake, self._page)

    def _follow(self, etcd: MultiEndpointEtcd3Client, revision: int) -> bool:
        """Show what was listed and every change since, until etcd cancels the watch. True: nothing is wrong, but a new
        listing would show more."""
        intake, sight = self._intake, self._sight
        sight.leave_out(intake.left_out)
        sight.set(dict(intake.entries))
        self._heard = time.monotonic()
        requests = self._requests(revision + 1)
        call = self._call = _RPC.WatchStub(etcd.channel).Watch(requests, metadata=etcd.metadata)
        for answer in call:
            now = time.monotonic()
            if now - self._heard > self._ttl_s / 2:
                sight.mark_stale()
            self._heard = now
            changed = False
            for event in answer.events:
                key = text(event.kv.key)
                gone = event.type == event.DELETE
                changed |= intake.remove(key) if gone else intake.put(key, event.kv.value)
            if intake.left_out != sight.left_out:
                sight.leave_out(intake.left_out)
            if changed:
                sight.set(dict(intake.entries))
            if answer.canceled or self._stopping.is_set():
                return False
            if intake.look_due:
                call.cancel()
                return True
        return False

    def _requests(self, revision: int) -> Iterator[object]:
        """What the stream sends; pulled by a thread of gRPC's, which ends with the stream."""
        prefix = self._prefix.encode()
        create = _RPC.WatchCreateRequest(key=prefix, range_end=prefix_range_end(prefix), start_revision=revision)
        yield _RPC.WatchRequest(create_request=create)
        while not self._stopping.wait(self._ttl_s / 4):
            if time.monotonic() - self._heard > self._ttl_s and self._call is not None:
                self._call.cancel()
                return
            yield _RPC.WatchRequest(progress_request=_RPC.WatchProgressRequest())
