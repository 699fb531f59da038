"""Learns what a snapshot is made from: hears load reports, and asks routers, block stores and the other frontends.

    worker … load    ─▶ the last report of each worker, decoded once a snapshot
    router … state   ─▶ RouterState      one question a snapshot to each, all at once
    kvbm … stat      ─▶ KvbmState
    frontend … recent ─▶ RecentRequests; this frontend's own without a message

Nothing is heard or asked while no page is open. Only the answer to other frontends' questions is always at hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import islice
from typing import TypeVar

import msgspec

from services.frontend.requests.service import RequestService
from services.frontend.ui.snapshot import OTHERS_SHOWN, Decisions, Facts, SeenLoad, merged_decisions, snapshot
from shared import subjects
from shared.bus.contract import Message
from shared.errors import ProtocolError, Unavailable
from shared.messages.cards import ServiceName
from shared.messages.codec import Codec
from shared.messages.frontends import RECENT_REQUESTS
from shared.messages.kvbm import KVBM_STATE
from shared.messages.load import LOAD_REPORT
from shared.messages.people import EXPLANATIONS, ROUTER_STATE, Explanations
from shared.rate_limited_log import RateLimitedLog
from shared.runtime.runtime import Runtime
from shared.token_rates import TokenRates
from shared.version import VERSION

ANSWER_LIMIT_S = 0.8
"""Seconds that a process may take to answer; it is then shown as silent."""
WORKERS_HEARD = 4096
"""Workers whose last report is held."""
FIRST_REPORTS_S = 0.3
"""Seconds to hear load reports before the first snapshot: workers report every 250 ms."""

T = TypeVar("T", bound=msgspec.Struct)


class Collector:
    """Makes snapshots of the fleet, and asks routers for their decisions."""

    def __init__(self, runtime: Runtime, service: RequestService) -> None:
        self._runtime = runtime
        self._service = service
        self._loads: dict[str, tuple[bytes, float]] = {}
        """Worker → its last load report, and when it came."""
        self._rates = TokenRates()
        self._limited_log = RateLimitedLog()

    async def start(self) -> None:
        """Answer other frontends that ask for this one's latest requests."""
        runtime = self._runtime
        await runtime.bus.subscribe(subjects.recent_requests(runtime.namespace, runtime.instance), self._on_question)

    async def _on_question(self, message: Message) -> None:
        if message.reply:
            answer = RECENT_REQUESTS.encode(self._service.recent(), message.headers)
            await self._runtime.bus.publish(message.reply, answer, headers=message.reply_headers())

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        """Hear load reports while the context is open. Raise BusDown."""
        subject = subjects.worker(self._runtime.namespace, "*", "load")
        subscription = await self._runtime.bus.subscribe(subject, self._on_report, pending_limit=WORKERS_HEARD)
        try:
            await asyncio.sleep(FIRST_REPORTS_S)
            yield
        finally:
            await subscription.unsubscribe()
            self._loads.clear()
            self._rates = TokenRates()

    async def _on_report(self, message: Message) -> None:
        worker = message.subject.rpartition(".")[0].rpartition(".")[2]
        if worker in self._loads or len(self._loads) < WORKERS_HEARD:
            self._loads[worker] = (message.payload, asyncio.get_running_loop().time())

    async def snapshot(self) -> bytes:
        """Return the next snapshot, as JSON."""
        runtime = self._runtime
        namespace, directory = runtime.namespace, runtime.directory
        connected = runtime.bus.connected
        routers, stores, others = await asyncio.gather(
            self._ask_all("router", partial(subjects.router_state, namespace), ROUTER_STATE),
            self._ask_all("kvbm", lambda kvbm: subjects.kvbm(namespace, kvbm, "stat"), KVBM_STATE),
            self._ask_all("frontend", partial(subjects.recent_requests, namespace), RECENT_REQUESTS),
        )
        facts = Facts(
            namespace,
            runtime.instance,
            VERSION,
            runtime.wall(),
            connected,
            directory.instances,
            directory.cards,
            directory.refused,
            self._seen_loads(),
            routers,
            stores,
            [self._service.recent(), *others],
        )
        return msgspec.json.encode(snapshot(facts))

    def _seen_loads(self) -> dict[str, SeenLoad]:
        now = asyncio.get_running_loop().time()
        instances = self._runtime.directory.instances
        seen: dict[str, SeenLoad] = {}
        for worker, (payload, at_s) in list(self._loads.items()):
            if worker not in instances:
                del self._loads[worker]
                continue
            try:
                report = LOAD_REPORT.decode(payload)
            except ProtocolError as wrong:
                self._limited_log.warn("load report", wrong)
                continue
            seen[worker] = SeenLoad(report, now - at_s, self._rates.update(report, at_s))
        self._rates.forget_all_but(instances)
        return seen

    def _others(self, service: ServiceName) -> list[str]:
        """Return the processes of a service, without this one."""
        instances = self._runtime.directory.instances.values()
        return [one.instance for one in instances if one.service == service and one.instance != self._runtime.instance]

    async def _ask_all(
        self, service: ServiceName, subject: Callable[[str], str], codec: Codec[T], payload: bytes = b""
    ) -> list[T]:
        """Ask the processes of a service, as many as are shown; return the answers that came in time."""
        asked = islice(self._others(service), OTHERS_SHOWN)
        answers = await asyncio.gather(*(self._ask(subject(one), codec, payload) for one in asked))
        return [one for one in answers if one is not None]

    async def _ask(self, subject: str, codec: Codec[T], payload: bytes) -> T | None:
        try:
            answer = await self._runtime.bus.request(subject, payload, timeout_s=ANSWER_LIMIT_S)
            return codec.decode(answer.payload, answer.headers)
        except Unavailable:  # the page shows that it did not answer
            return None
        except ProtocolError as wrong:
            self._limited_log.warn("answer for the page", wrong)
            return None

    async def decisions(self, request: str) -> Decisions:
        """Return what routers remember of a request. Raise Unavailable if none of them answers."""
        routers = self._others("router")
        if not routers:
            raise Unavailable("no router is registered")
        answers: Sequence[Explanations] = await self._ask_all(
            "router", partial(subjects.explain, self._runtime.namespace), EXPLANATIONS, request.encode()
        )
        if not answers:
            raise Unavailable("no router answers")
        return merged_decisions(answers, len(routers))
