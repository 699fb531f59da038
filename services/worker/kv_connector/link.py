"""LinkReports: what the shell does with its engine's reports of the exchange with the machine's kvbm.

    KvbmLink ──▶ LinkLog, /health, `headrace_kvbm_attached`
             └─▶ the model card: at once when blocks are exchanged, and when that has ended for LINGER_S
    KvbmAsks ──▶ metrics and spans of the requests that the engine has sent

No failure of a kvbm stops the worker: it is logged, and the engine computes the blocks that it does not get.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.worker.contracts.messages import KvbmAsked, KvbmAsks, KvbmLink
from services.worker.kv_connector.link_log import LinkLog, of_another_namespace
from services.worker.kv_connector.metrics import KvbmMetrics
from shared.tracing.spans import finished
from shared.tracing.tracer import Tracer

LOOK_INTERVAL_S = 1.0
"""Seconds between two looks at how long the link has been broken."""
LINGER_S = 2.0
"""Seconds that a link must be broken before routers see it, since an engine that attaches again soon has one."""


class LinkReports:
    """Takes the reports of one worker's engines, one engine after the other."""

    def __init__(
        self,
        metrics: KvbmMetrics,
        *,
        namespace: str,
        link_changed: Callable[[], None],
        tracer: Tracer | None = None,
    ) -> None:
        """`namespace` is the worker's. `link_changed` is called when `shown_link` has changed."""
        self._metrics = metrics
        self._namespace = namespace
        self._link_changed = link_changed
        self._tracer = tracer
        self._log = LinkLog(namespace)
        """Has the link as the engine reported it last."""
        self.shown_link = self._log.link
        """The link that the model card names."""

    async def run(self) -> None:
        """Watch how long the link has been broken, until cancelled."""
        if not self._metrics.configured:
            return
        while True:
            self._log.look(self._now_s)
            if self._log.unlinked_for_s(self._now_s) >= LINGER_S:
                self._show(self._log.link)
            await asyncio.sleep(LOOK_INTERVAL_S)

    def engine_lost(self) -> None:
        """The engine was lost, and its link with it."""
        if self._log.link.kvbm:
            self._take_link(KvbmLink(kvbm="", reason="the engine was lost"))
        self._show(self._log.link)

    def take(self, report: KvbmAsks | KvbmLink) -> None:
        """Take up a report of the engine."""
        if isinstance(report, KvbmLink):
            self._take_link(report)
            return
        for asked in report.asks:
            self._metrics.count_asked(asked)
            if asked.span is not None and self._tracer is not None:
                self._record(self._tracer, asked)

    @property
    def missing(self) -> str:
        """The reason why no blocks are exchanged. Empty if they are, or if no kvbm is configured."""
        link = self._log.link
        if not self._metrics.configured or link.kvbm:
            return ""
        return link.reason or "the engine has not attached yet"

    @property
    def notes(self) -> list[str]:
        """What a person should know of the link."""
        note = of_another_namespace(self._log.link, self._namespace)
        return [note] if note else []

    # --- inside

    @property
    def _now_s(self) -> float:
        return asyncio.get_running_loop().time()

    def _take_link(self, link: KvbmLink) -> None:
        self._metrics.attached.set(1 if link.kvbm else 0)
        self._log.take(link, self._now_s)
        if link.kvbm:
            self._show(link)

    def _show(self, link: KvbmLink) -> None:
        before, self.shown_link = self.shown_link, link
        if (before.kvbm, before.layout) != (link.kvbm, link.layout):
            self._link_changed()

    def _record(self, tracer: Tracer, asked: KvbmAsked) -> None:
        span = asked.span
        assert span is not None
        ended_ns = span.start_ns + round(1e9 * asked.took_s)
        place, start_ns = span.place, span.start_ns
        ended = finished(asked.operation, place, span.parent, start_ns, ended_ns, kind="client", error=asked.failed)
        tracer.record((ended,))
