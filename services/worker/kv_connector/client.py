"""KvbmClient: the shell's side of the machine's kvbm. It finds the kvbm, and carries messages between it and the engine
without decoding them.

    the pool's directory: which name is in the lock?  ──▶  discovery: is that kvbm there?

    none ──it is──▶ up: KvbmUp is sent, and again to each engine that starts
      ▲              │
      └──────────────┘ KvbmDown: it left discovery, or the lock names another one

    KvbmAsk ──▶ a request to that kvbm ──▶ KvbmReply: one, or several for a fetch; exactly one of them is the last

No failure of a kvbm stops the worker: it is logged, and the engine computes the blocks that it does not get.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter

from services.worker.contracts.messages import KvbmAsk, KvbmDown, KvbmLink, KvbmReply, KvbmUp
from services.worker.kv_connector.metrics import KvbmMetrics
from shared import subjects
from shared.bus.contract import LAST_HEADER
from shared.discovery.directory import DirectoryChange, InstanceDown, InstanceUp
from shared.errors import BusDown, NoResponders, ProtocolError, RequestTimeout, Unavailable
from shared.pool.format import PoolUnfit
from shared.pool.lock import check_directory, kvbm_of
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime
from shared.tracing.spans import finished
from shared.tracing.traceparent import TraceParent

LOOK_INTERVAL_S = 1.0
"""Seconds between two looks at the lock in the pool's directory."""
LOG_AFTER_S = 5.0
"""Seconds that a kvbm must be missing before that is logged, since services may start in any order."""
LINGER_S = 2.0
"""Seconds that a link must be broken before routers see it, since an engine that attaches again soon has one."""
ASKS_LIMIT = 256
"""Most requests under way at once; an engine has fewer. Further requests fail at once."""

_log = logging.getLogger(__name__)


class KvbmClient:
    """One worker's client. With an empty `pool` it never finds a kvbm."""

    def __init__(
        self,
        runtime: Runtime,
        pool: str,
        metrics: KvbmMetrics,
        *,
        send: Callable[[KvbmUp | KvbmDown | KvbmReply], None],
        link_changed: Callable[[], None],
        place_of: Callable[[int], TraceParent | None] = lambda _number: None,
    ) -> None:
        """`send` sends a message to the engine, if one runs; `link_changed` is called when `shown_link` has changed.
        `place_of` returns the parent of spans of the attempt with a number, None if it is not traced."""
        self._runtime = runtime
        self._pool = Path(pool) if pool else None
        self._metrics = metrics
        self._send = send
        self._link_changed = link_changed
        self._place_of = place_of
        self._kvbm = ""
        """Instance id of the kvbm that is up. Empty if none is."""
        self._trouble = ""
        """Why no kvbm is up."""
        self._trouble_s = 0.0
        """When that began."""
        self._trouble_logged = False
        self._link = KvbmLink(kvbm="")
        """The link as the engine reported it last."""
        self._unlinked_s = 0.0
        """When the engine lost its link."""
        self._limited_log = RateLimitedLog()
        self._tasks: asyncio.TaskGroup | None = None
        self._asks: set[asyncio.Task[None]] = set()
        """Requests of the engine that runs."""
        self.shown_link = self._link
        """The link that the model card names."""

    async def run(self) -> None:
        """Look for the kvbm, and carry requests to it, until cancelled."""
        if self._pool is None:
            return
        self._runtime.directory.subscribe(self._directory_changed)
        async with asyncio.TaskGroup() as self._tasks:
            try:
                while True:
                    self._look_for_kvbm()
                    await asyncio.sleep(LOOK_INTERVAL_S)
            finally:
                self._tasks = None

    def engine_ready(self) -> None:
        """An engine has started: name the kvbm to it."""
        if self._kvbm:
            self._send(KvbmUp(self._kvbm))

    def engine_lost(self) -> None:
        """The engine was lost: no one awaits the answers to its requests, and the next engine numbers its own from
        1."""
        for ask in self._asks:
            ask.cancel()
        self._asks.clear()
        if self._link.kvbm:
            self._link = KvbmLink(kvbm="", reason="the engine was lost")
            self._metrics.attached.set(0)
        self._show(self._link)

    def handle_engine_message(self, report: KvbmAsk | KvbmLink) -> None:
        """Carry a message of the engine: a request to the kvbm, or news of its link."""
        if isinstance(report, KvbmLink):
            self._take_link(report)
        elif self._tasks is None or not self._kvbm:
            self._fail(report, "away", "there is no kvbm")
        elif len(self._asks) >= ASKS_LIMIT:
            self._fail(report, "too_many", f"{ASKS_LIMIT} requests are under way")
        else:
            ask = self._tasks.create_task(self._request(report, self._kvbm))
            self._asks.add(ask)
            ask.add_done_callback(self._asks.discard)

    @property
    def missing(self) -> str:
        """Why no blocks are exchanged. Empty if they are, or are not to be."""
        if self._pool is None or self._link.kvbm:
            return ""
        return self._trouble or self._link.reason or "the engine has not attached yet"

    # --- which kvbm

    def _directory_changed(self, change: DirectoryChange) -> None:
        if isinstance(change, InstanceUp | InstanceDown) and change.instance.service == "kvbm":
            self._look_for_kvbm()

    def _look_for_kvbm(self) -> None:
        found, trouble = self._find()
        if found != self._kvbm:
            if self._kvbm:
                self._send(KvbmDown(trouble or f"kvbm {found} has replaced it"))
            if found:
                _log.info("kvbm %s serves %s", found, self._pool)
                self._send(KvbmUp(found))
            self._kvbm = found
        now_s = asyncio.get_running_loop().time()
        if trouble != self._trouble:
            self._trouble, self._trouble_s, self._trouble_logged = trouble, now_s, False
        if trouble and not self._trouble_logged and now_s - self._trouble_s >= LOG_AFTER_S:
            self._trouble_logged = True
            _log.warning("no blocks are exchanged: %s", trouble)
        if not self._link.kvbm and now_s - self._unlinked_s >= LINGER_S:
            self._show(self._link)

    def _find(self) -> tuple[str, str]:
        """Return the kvbm that is up, or why none is. A lock that cannot be read this time does not change which one
        is."""
        assert self._pool is not None
        holder = kvbm_of(self._pool) or self._kvbm
        if not holder:
            return "", _why_no_name(self._pool)
        known = self._runtime.directory.instances.get(holder)
        if known is None or known.service != "kvbm":
            return "", (
                f"kvbm {holder}, the last one in {self._pool}, is not in namespace {self._runtime.namespace}: "
                "it has ended, has not registered yet, or serves another namespace"
            )
        return holder, ""

    # --- the link

    def _take_link(self, link: KvbmLink) -> None:
        was, self._link = self._link, link
        self._metrics.attached.set(1 if link.kvbm else 0)
        if link.kvbm:
            if link != was:
                _log.info("blocks are exchanged with kvbm %s, layout %s", link.kvbm, link.layout)
            self._show(link)
        else:
            if was.kvbm:
                self._unlinked_s = asyncio.get_running_loop().time()
            if link.reason and self._kvbm:  # without a kvbm the reason only repeats why there is none
                # Each kind has its line: a kvbm that is not ready yet may be one that has no room for this layout.
                *kind, why = link.reason.split(": ", 2)
                self._limited_log.warn(": ".join(("no blocks are exchanged", *kind)), why)

    def _show(self, link: KvbmLink) -> None:
        before, self.shown_link = self.shown_link, link
        if (before.kvbm, before.layout) != (link.kvbm, link.layout):
            self._link_changed()

    # --- requests

    async def _request(self, ask: KvbmAsk, kvbm: str) -> None:
        subject = subjects.kvbm(self._runtime.namespace, kvbm, ask.operation)
        began_s = perf_counter()
        try:
            if ask.operation == "fetch":
                await self._fetch(ask, subject)
            else:
                answer = await self._runtime.bus.request(subject, ask.payload, timeout_s=ask.timeout_s)
                self._send(KvbmReply(ask.number, answer.payload))
        except (Unavailable, ProtocolError) as wrong:
            self._fail(ask, _outcome(wrong), str(wrong))
        else:
            self._metrics.count_answered(ask.operation, perf_counter() - began_s)

    async def _fetch(self, ask: KvbmAsk, subject: str) -> None:
        parent = self._place_of(ask.attempt) if ask.attempt else None
        if parent is None or self._runtime.tracer is None:
            await self._carry_answers(ask, subject, None)
            return
        tracer = self._runtime.tracer
        place, start_ns, error = tracer.ids.child(parent), tracer.now_ns(), ""
        try:
            await self._carry_answers(ask, subject, place.headers)
        except BaseException as wrong:
            error = str(wrong) or type(wrong).__name__
            raise
        finally:
            ended = finished("fetch", place, parent.span, start_ns, tracer.now_ns(), kind="client", error=error)
            tracer.record((ended,))

    async def _carry_answers(self, ask: KvbmAsk, subject: str, headers: Mapping[str, str] | None) -> None:
        stream = self._runtime.bus.stream(subject, ask.payload, idle_timeout_s=ask.timeout_s, headers=headers)
        async with stream as answers:
            async for answer in answers:
                last = answer.headers.get(LAST_HEADER) == "true"
                self._send(KvbmReply(ask.number, answer.payload, last=last))

    def _fail(self, ask: KvbmAsk, outcome: str, why: str) -> None:
        self._metrics.count_failed(ask.operation, outcome)
        self._send(KvbmReply(ask.number, b"", failed=why))


def _why_no_name(pool: Path) -> str:
    """Return why nothing in the pool's directory names a kvbm."""
    try:
        check_directory(pool)
    except PoolUnfit as wrong:
        return str(wrong)
    except FileNotFoundError:
        return f"there is no {pool}: start a kvbm with that pool.directory, or correct kvbm.pool"
    except OSError as wrong:
        return f"{pool}: {wrong.strerror}"
    return f"no kvbm has run in {pool} yet, or this user may not read the name of the one that does"


def _outcome(wrong: Unavailable | ProtocolError) -> str:
    match wrong:
        case NoResponders() | BusDown():
            return "away"
        case RequestTimeout():
            return "late"
        case _:
            return "failed"
