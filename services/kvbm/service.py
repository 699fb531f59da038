"""kvbm's shell: passes each engine's request to its layout, learns which engines live, and reports to routers.

    socket  attach, store, commit, abort, fetch, release ──▶ Layouts ──▶ LayoutStore ──▶ reply (`socket_door.py`)
    NATS  the same, of engines of one's own
          one connection or subscription, handled in order: a store sent before an attach must not be handled after it
    NATS  stat, snapshot ──▶ people, routers            load report ──▶ routers, every 250 ms
    ZMQ   KV events of each layout ──▶ routers
    kernel locks: an engine is dead ──▶ all layouts     discovery: a worker's lease is lost ──▶ its engines' tickets

    opening the pool ──▶ registered, memory being made: attach is refused as not ready ──▶ serving ──▶ stopped

No request waits for a disk: blocks that are read from it come in later replies. A request that cannot be decoded or
done is answered with KvbmRefused, and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import TypeVar

from services.kvbm.config import KvbmConfig
from services.kvbm.doors.fetch_span import FetchSpan, fetch_span
from services.kvbm.doors.replies import ReplySender, Request
from services.kvbm.doors.socket_door import SocketDoor
from services.kvbm.layout import describe
from services.kvbm.layout.layout import LayoutStore
from services.kvbm.layout.layouts import Layouts
from services.kvbm.layout.snapshots import send_snapshot
from services.kvbm.metrics import StoreMetrics
from services.kvbm.peers.cache import Bringing, PeerCache
from services.kvbm.peers.peers import KvbmPeers, check_peers
from services.kvbm.pool.host_pool import HostPool
from services.kvbm.pool.owners import MOST_OWNERS
from services.kvbm.pool.prefault import Prefault
from services.kvbm.tickets.engines import AttachedEngine, AttachedEngines
from services.kvbm.tickets.errors import NotReady, Refusal, TooManyOwners, UnknownOwner
from services.kvbm.tickets.packing import unpack_keys
from services.kvbm.tiers import policies
from services.kvbm.tiers.hit_window import LookupCounts
from shared import subjects
from shared.bus.contract import Message, Subscription
from shared.discovery.announcement import Announcement
from shared.discovery.directory import DirectoryChange, InstanceDown
from shared.errors import BusDown, ProtocolError
from shared.hashing import KEY_BYTES, ContentKey
from shared.messages import kvbm as wire
from shared.messages.codec import JSON_HEADER, Codec
from shared.messages.control import Note
from shared.messages.kv_events import SNAPSHOT_REQUEST
from shared.pool.socket_frames import PROTOCOL, Hello
from shared.runtime.lifecycle import settle_memory
from shared.runtime.runtime import Runtime

REPORT_INTERVAL_S = 0.25
"""Seconds between two load reports; also the tick of what is done at intervals."""
_TICKS_PER_POLL = 2
"""Ticks between two checks of the engines' locks."""
_TICKS_PER_GAUGES = 4
"""Ticks between two updates of the gauges, and two looks at whether the socket is there."""
REASON_CHARS = 500
"""The most characters of a refusal's reason: it may repeat the request, and a reply may be smaller than that."""

_log = logging.getLogger(__name__)

_Operation = Callable[[Request], tuple[LayoutStore, bytes | None]]
"""Returns the layout that is to settle, and the reply; None if the replies come later."""


async def serve(runtime: Runtime, config: KvbmConfig) -> None:
    """Serve until `runtime.stopping`. Raise ConfigError if the pool cannot be opened or a policy does not exist."""
    async with kvbm(runtime, config):
        settle_memory()
        await runtime.stopping.wait()


def check_policies(config: KvbmConfig) -> None:
    """Raise ConfigError if a policy cannot be made. Otherwise it would be found only when the first engine
    attaches."""
    for name in (config.tiers.host_policy, config.tiers.disk_policy):
        policies.make_policy(name, 1)


def check_settings(config: KvbmConfig) -> None:
    """Check what the settings need: policies, and for other machines files and an address. Raise ConfigError."""
    check_policies(config)
    check_peers(config.peers)


@asynccontextmanager
async def kvbm(runtime: Runtime, config: KvbmConfig) -> AsyncIterator[KvbmService]:
    """Run a kvbm that answers while the context is open."""
    check_policies(config)
    pool = HostPool.open(
        Path(config.pool.directory), config.pool.size_bytes, config.pool.arenas, instance=runtime.instance
    )
    service = KvbmService(runtime, config, pool)
    try:
        await service.start()
        yield service
    finally:
        await service.stop()


Ask = TypeVar("Ask", wire.Store, wire.Commit, wire.Abort, wire.Release, wire.Discard)
Reply = TypeVar("Reply", wire.Granted, wire.Settled)


class KvbmService:
    """One kvbm process."""

    def __init__(self, runtime: Runtime, config: KvbmConfig, pool: HostPool) -> None:
        self._runtime = runtime
        self._config = config
        self._pool = pool
        self._metrics = StoreMetrics(runtime.registry)
        self._metrics.pool_bytes.set(pool.geometry.file_bytes)
        self._replies = ReplySender(runtime.bus, self._metrics)
        self.engines = AttachedEngines()
        self.layouts = Layouts(runtime, config, pool, self._metrics, self._layouts_changed)
        self.prefault = Prefault(pool, config.pool.prefault_threads)
        self._announcement = Announcement(runtime.discovery, self._address)
        self._announcement.request_update()
        self._former_owners = set(pool.survivors)
        """Engines that a former kvbm may have let write, and that have neither attached again nor died."""
        self._operations: dict[str, _Operation] = {
            "attach": self._attach,
            "store": partial(self._request, wire.STORE, wire.STORE_REPLY, LayoutStore.store),
            "commit": partial(self._request, wire.COMMIT, wire.SETTLED, LayoutStore.commit),
            "abort": partial(self._request, wire.ABORT, wire.SETTLED, LayoutStore.abort),
            "fetch": self._fetch,
            "release": partial(self._request, wire.RELEASE, wire.SETTLED, LayoutStore.release),
            "discard": partial(self._request, wire.DISCARD, wire.SETTLED, LayoutStore.discard),
        }
        self.peers: KvbmPeers | None = None
        if config.peers.listen:
            self.peers = KvbmPeers(runtime, config.peers, pool.descriptor, self.layouts.open, self._metrics)
        self.door = SocketDoor(pool.lock, self._metrics, self._handle, self._hello)
        self._subscriptions: list[Subscription] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Subscribe first, then register."""
        bus = self._runtime.bus
        receivers = {"*": self._receive, "stat": self._answer_stat, "snapshot": self._answer_snapshot}
        for operation, receive in receivers.items():
            self._subscriptions.append(await bus.subscribe(self._subject(operation), receive))
        self.door.listen()
        if self.peers is not None:
            self.peers.open()
        self._runtime.directory.subscribe(self._directory_changed)
        self._runtime.health.delegate(self._unready, dict)
        self._runtime.notes.find_block = self._find_block
        for work in (self._replies.run(), self.prefault.run(), self._announcement.run(), self._tick()):
            self._own(work)

    async def stop(self) -> None:
        """Stop in order. The address book entry goes first, so that no new engine asks; then requests are answered, and
        fetches that wait are refused; then connections are closed, so that no engine waits for what it asks now; then
        the disk ends its requests. The pool's file stays, for the next kvbm."""
        await self._announcement.close()
        await asyncio.gather(*(subscription.unsubscribe() for subscription in self._subscriptions))
        await self.door.stop_reading()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        self.layouts.stop()
        await self._replies.flush()
        await self.door.close()
        unread = self.peers is None or await self.peers.close()
        closed = await self.layouts.close() and unread
        if closed:
            self._pool.close()

    def _layouts_changed(self) -> None:
        if self.peers is not None:
            self.peers.sync()
        self._announcement.request_update()

    def _own(self, work: Coroutine[None, None, None]) -> None:
        task = self._runtime.tasks.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # --- requests

    def _hello(self) -> Hello:
        runtime = self._runtime
        return Hello(PROTOCOL, runtime.instance, ready=self.prefault.complete, namespace=runtime.namespace)

    async def _receive(self, message: Message) -> None:
        """Handle one request over NATS; they come one at a time, in order."""
        operation = message.subject.rpartition(".")[2]
        if operation not in self._operations:
            return  # a subject of another subscription, or of our own report
        if not message.reply:
            raise ProtocolError("no reply subject")

        def answer(payload: bytes, last: bool) -> Awaitable[bool]:
            return self._replies.send(message, payload, last=last and operation == "fetch")

        await self._handle(Request(operation, message.payload, message.headers, answer))

    async def _handle(self, request: Request) -> None:
        """Handle one request, from wherever it came."""
        start_s = perf_counter()
        layout: LayoutStore | None = None
        serve = self._operations.get(request.operation)
        try:
            if serve is None:
                raise ProtocolError(f"there is no operation {request.operation[:64]!r}")
            layout, payload = serve(request)
        except (Refusal, ProtocolError) as wrong:
            code = wrong.code if isinstance(wrong, Refusal) else "bad_request"
            self._metrics.refusals.labels(code).inc()
            payload = wire.SETTLED.encode(wire.KvbmRefused(code, str(wrong)[:REASON_CHARS]), request.headers)
        if payload is not None:
            await request.answer(payload, True)
        if serve is not None:
            self._metrics.request_seconds.labels(request.operation).observe(perf_counter() - start_s)
        if layout is not None:
            layout.settle_soon()

    def _layout_of(self, owner: str, request: Request) -> LayoutStore:
        return self.layouts.open[self.engines.layout_of(owner, request.connection)]

    def _attach(self, request: Request) -> tuple[LayoutStore, bytes]:
        ask = wire.ATTACH.decode(request.payload, request.headers)
        self.engines.check(ask, request.connection)
        if not self.prefault.complete:
            raise NotReady(self.prefault.reason)
        self._check_alive(ask.owner)
        layout = self.layouts.get_or_open(ask.layout, self._former_owners)
        self.engines.add(ask, request.connection)
        layout.attach(ask.owner)
        self._former_owners.discard(ask.owner)
        for other in self.layouts.open.values():  # it writes to nothing that a former kvbm granted, in any layout
            other.tickets.writer_confirmed_idle(ask.owner)
        arena = layout.slots.arena
        attached = wire.Attached(
            kvbm=self._runtime.instance,
            layout=layout.digest,
            pool_bytes=self._pool.geometry.file_bytes,
            offset=arena.offset,
            slot_bytes=arena.slot_bytes,
            slots=arena.slots,
            generations=arena.generations,
            blocks_per_request=self._config.tickets.blocks_per_request,
            takes_discards=True,
        )
        return layout, wire.ATTACH_REPLY.encode(attached, request.headers)

    def _check_alive(self, owner: str) -> None:
        try:
            alive = self._pool.owners.is_alive(owner)
        except OSError as wrong:
            raise NotReady(f"the lock of engine {owner!r} cannot be read: {wrong}") from None
        if not alive:
            if self._pool.owners.full:
                raise TooManyOwners(f"{MOST_OWNERS} engines are attached, and no more may be")
            raise UnknownOwner(owner, "does not hold the lock of its file in the pool's directory")

    def _request(
        self,
        codec: Codec[Ask],
        reply_codec: Codec[Reply | wire.KvbmRefused],
        serve: Callable[[LayoutStore, Ask], Reply],
        request: Request,
    ) -> tuple[LayoutStore, bytes]:
        ask = codec.decode(request.payload, request.headers)
        layout = self._layout_of(ask.owner, request)
        return layout, reply_codec.encode(serve(layout, ask), request.headers)

    def _fetch(self, request: Request) -> tuple[LayoutStore, bytes | None]:
        """Return the one reply if all blocks are in memory; else queue it as the first of several."""
        ask = wire.FETCH.decode(request.payload, request.headers)
        layout = self._layout_of(ask.owner, request)
        missing = [] if ask.awaits else self._missing(layout, ask)
        if missing and self.peers is not None:
            attached = self.engines.get(ask.owner)
            bringing = self.peers.cache.bring(layout, missing, self.engines.reply_s(ask.owner))
            self._own(self._fetch_from_peers(request, ask, layout, attached, self.peers.cache, bringing))
            return layout, None
        return self._fetch_here(request, ask, layout)

    def _missing(self, layout: LayoutStore, ask: wire.Fetch) -> list[ContentKey]:
        """Return the blocks for which peers are asked before the Fetch is answered. Empty if none are."""
        if self.peers is None:
            return []
        layout.tickets.check_block_count(len(ask.keys) // KEY_BYTES)
        keys = unpack_keys(ask.keys)
        missing = list(keys[layout.tiers.known(keys) :])
        return missing if self.peers.cache.is_worth_asking(layout, len(missing)) else []

    async def _fetch_from_peers(
        self,
        request: Request,
        ask: wire.Fetch,
        layout: LayoutStore,
        attached: AttachedEngine | None,
        peers: PeerCache,
        bringing: Bringing,
    ) -> None:
        """Answer a Fetch after its missing blocks have come from a peer, or will not. `attached` is the Attach that its
        engine asked under; it may attach again before this begins."""
        await peers.wait_brought(bringing)
        try:
            if self.engines.get(ask.owner) is not attached:
                raise UnknownOwner(ask.owner, "has attached again, or is dead")
            _, payload = self._fetch_here(request, ask, layout)
        except Refusal as wrong:
            self._metrics.refusals.labels(wrong.code).inc()
            payload = wire.FETCH_REPLY.encode(wire.KvbmRefused(wrong.code, str(wrong)[:REASON_CHARS]), request.headers)
        if payload is not None:
            await request.answer(payload, True)
        layout.settle_soon()

    def _fetch_here(self, request: Request, ask: wire.Fetch, layout: LayoutStore) -> tuple[LayoutStore, bytes | None]:
        span = fetch_span(self._runtime.tracer, request.headers, ask)
        send_later = partial(self._queue_reply, request, span)
        first, complete = layout.fetch(ask, send_later)
        if complete:
            if span is not None:
                span.replied(first, True)
            return layout, wire.FETCH_REPLY.encode(first, request.headers)
        send_later(first, False)
        return layout, None

    def _queue_reply(
        self, request: Request, span: FetchSpan | None, reply: wire.Fetched | wire.KvbmRefused, last: bool
    ) -> None:
        if isinstance(reply, wire.KvbmRefused):
            self._metrics.refusals.labels(reply.code).inc()
        if span is not None:
            span.replied(reply, last)
        self._replies.queue(request.answer, wire.FETCH_REPLY.encode(reply, request.headers), last=last)

    async def _answer_stat(self, message: Message) -> None:
        """Reply with KvbmState in JSON; the payload is ignored."""
        if message.reply:
            state = wire.KvbmState(
                instance=self._runtime.instance,
                pool=str(self._pool.path.parent),
                pool_bytes=self._pool.geometry.file_bytes,
                reserved=self.prefault.share,
                window_s=self._config.statistics.window_s,
                layouts=[describe.state(layout.facts()) for layout in self.layouts.open.values()],
            )
            question = Message(message.subject, b"", message.reply, JSON_HEADER)
            await self._replies.send(question, wire.KVBM_STATE.encode(state, JSON_HEADER))

    async def _answer_snapshot(self, message: Message) -> None:
        """Reply with a snapshot of one layout. A layout that is not here gets no reply: the address book does not name
        it."""
        asked = SNAPSHOT_REQUEST.decode(message.payload, message.headers)
        layout = self.layouts.open.get(asked.layout)
        if layout is None or not message.reply:
            raise ProtocolError(f"a snapshot of layout {asked.layout[:64]!r}, which is not here, or no reply subject")
        await send_snapshot(layout, message, self._replies)

    async def _find_block(self, key_end: bytes) -> tuple[list[str], list[Note]]:
        """Return what all layouts know of a block."""
        places: list[str] = []
        notes: list[Note] = []
        for digest, layout in self.layouts.open.items():
            here, happened = layout.explain_block(key_end)
            places += [f"layout {digest}: {place}" for place in here]
            notes += [Note(each.about, each.age_s, f"layout {digest}: {each.text}") for each in happened]
        return places, sorted(notes, key=lambda note: -note.age_s)

    # --- which engines are alive

    def _poll_owners(self) -> None:
        """Find the engines whose locks are free, which are dead."""
        try:
            dead = self._pool.owners.poll()
        except OSError as wrong:
            _log.warning("the locks of the engines cannot be read: %s", wrong)
            return
        for owner in dead:
            if self.engines.remove(owner):
                _log.info("engine %s has ended", owner)
                self._metrics.dead_owners.inc()
            self._former_owners.discard(owner)
            for layout in self.layouts.open.values():
                layout.owner_dead(owner)

    def _directory_changed(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceDown) and change.instance.service == "worker":
            for owner, digest in self.engines.of_worker(change.instance.instance):
                expired = self.layouts.open[digest].worker_lease_lost(owner)
                if expired:
                    _log.warning("%d tickets of engine %s expired, as its worker's lease was lost", len(expired), owner)

    # --- at intervals

    async def _tick(self) -> None:
        ticks_per_retry = max(1, round(self._config.disk.retry_s / REPORT_INTERVAL_S))
        ticks_per_log = round(self._config.statistics.log_s / REPORT_INTERVAL_S)
        for tick in count():
            for layout in self.layouts.open.values():
                layout.expire()
                if not tick % ticks_per_retry:
                    layout.retry_space()
            if self.peers is not None:
                self.peers.tick()
            if not tick % _TICKS_PER_POLL:
                self._poll_owners()
            if not tick % _TICKS_PER_GAUGES:
                self._set_gauges()
                self.door.listen()
            if ticks_per_log and tick and not tick % ticks_per_log:
                for layout in self.layouts.open.values():
                    _log.info("%s", describe.line(layout.facts(), self._config.statistics.window_s))
            await self._report()
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _report(self) -> None:
        layouts = [layout.report() for layout in self.layouts.open.values()]
        peers = None if self.peers is None else self.peers.rates
        report = wire.KVBM_REPORT.encode(wire.KvbmReport(self._runtime.instance, layouts, peers))
        with suppress(BusDown):  # the next report says all of it again
            await self._runtime.bus.publish(self._subject("load"), report)

    def _unready(self) -> list[str]:
        """Return why engines could not store or fetch now."""
        reasons = [
            "" if self._runtime.bus.connected else "NATS cannot be reached",
            "" if self._announcement.epoch else "registering",
            self.prefault.reason,
            self.door.reason,
        ]
        return [reason for reason in reasons if reason]

    def _set_gauges(self) -> None:
        facts = [layout.facts() for layout in self.layouts.open.values()]
        disks = [each.disk for each in facts if each.disk is not None]
        found = sum((each.found for each in facts), LookupCounts())
        self._metrics.set_gauges([each.tickets for each in facts], disks, found)
        self._metrics.reserved_bytes.set(self.prefault.done_bytes)

    # --- the address book

    def _address(self, epoch: int) -> dict[str, bytes]:
        """Return this kvbm's entry in the address book."""
        operations = {
            operation: self._subject(operation)
            for operation in (*self._operations, "snapshot", "load", "stat", "control")
        }
        sources = {digest: layout.log.source for digest, layout in self.layouts.open.items()}
        peers = "" if self.peers is None else self.peers.address
        return self._runtime.address(epoch, operations, layouts=sources, peers=peers)

    def _subject(self, operation: str) -> str:
        return subjects.kvbm(self._runtime.namespace, self._runtime.instance, operation)

    def validate(self) -> None:
        """Raise AssertionError if anything contradicts itself. O(slots + records)."""
        self.layouts.validate()
        if self.peers is not None:
            self.peers.validate()
        assert self.engines.layouts() <= self.layouts.open.keys(), "an engine is attached to a layout that is not open"
