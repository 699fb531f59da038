"""worker/kv_connector/link.py: what the shell shows and logs of its engine's exchange with the kvbm."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from random import Random

import pytest
from prometheus_client import CollectorRegistry

from services.worker.contracts.messages import AskSpan, KvbmAsked, KvbmAsks, KvbmLink
from services.worker.kv_connector.link import LINGER_S, LinkReports
from services.worker.kv_connector.link_log import LOG_AFTER_S
from services.worker.kv_connector.metrics import KvbmMetrics
from shared.config import TraceConfig
from shared.tracing.spans import SpanRecord
from shared.tracing.traceparent import TraceParent
from shared.tracing.tracer import Tracer
from tests.simulation.clock import SimulatedLoop

LINK = KvbmLink("k1", "5eed", "")


class Shell:
    """LinkReports, and what becomes of them."""

    def __init__(self, *, configured: bool = True) -> None:
        self.registry = CollectorRegistry()
        self.cards: list[tuple[str, str]] = []
        """(kvbm, layout) at each change of the card."""
        self.spans: list[SpanRecord] = []
        self.link = LinkReports(
            KvbmMetrics(self.registry, configured=configured),
            namespace="a",
            link_changed=self._link_changed,
            tracer=Tracer(TraceConfig(), CollectorRegistry(), self.spans.append, draw=Random(1)),
        )
        self.running = asyncio.create_task(self.link.run())

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, labels)

    def _link_changed(self) -> None:
        self.cards.append((self.link.shown_link.kvbm, self.link.shown_link.layout))


def simulate(scenario: Coroutine[object, object, None]) -> None:
    """Runs it on a clock of its own."""
    with asyncio.Runner(loop_factory=SimulatedLoop) as runner:
        runner.run(scenario)


def test_the_card_tells_of_a_link_at_once_and_of_its_end_when_that_lasts() -> None:
    async def scenario() -> None:
        shell = Shell()
        shell.link.take(LINK)
        assert shell.cards == [("k1", "5eed")]
        shell.link.take(KvbmLink("", "", "not answered"))
        await asyncio.sleep(LINGER_S / 2)
        shell.link.take(LINK)
        await asyncio.sleep(10)
        assert len(shell.cards) == 1, "it attached anew, soon"
        shell.link.take(KvbmLink("", "", "not answered"))
        shell.link.take(KvbmLink("", "", "refused"))
        await asyncio.sleep(LINGER_S + 1)
        assert shell.cards == [("k1", "5eed"), ("", "")]
        shell.link.take(KvbmLink("k2", "5eed", ""))
        shell.link.take(KvbmLink("k2", "f00d", ""))
        assert shell.cards[2:] == [("k2", "5eed"), ("k2", "f00d")]
        assert shell.metric("headrace_kvbm_attached") == 1

    simulate(scenario())


def test_the_link_ends_with_its_engine() -> None:
    async def scenario() -> None:
        shell = Shell()
        shell.link.take(LINK)
        shell.link.engine_lost()
        assert shell.cards == [("k1", "5eed"), ("", "")]
        assert shell.metric("headrace_kvbm_attached") == 0
        assert shell.link.missing == "the engine was lost"

    simulate(scenario())


def test_it_says_why_no_blocks_are_exchanged_as_long_as_that_is_so() -> None:
    async def scenario() -> None:
        shell = Shell()
        assert shell.link.missing == "the engine has not attached yet"
        shell.link.take(KvbmLink("", "", "attach: not_ready: 3 % are made"))
        assert shell.link.missing == "attach: not_ready: 3 % are made"
        shell.link.take(LINK)
        assert shell.link.missing == ""
        without = Shell(configured=False)
        await without.running
        assert without.link.missing == ""

    simulate(scenario())


def test_two_outages_soon_after_each_other_are_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        shell = Shell()
        away = KvbmLink("", "", "/pool/socket: no kvbm listens")
        shell.link.take(away)
        await asyncio.sleep(LOG_AFTER_S - 2)
        assert not caplog.records, "it may start soon"
        for kvbm in ("k1", "k2"):
            shell.link.take(KvbmLink(kvbm, "5eed"))
            await asyncio.sleep(20)
            assert f"kvbm {kvbm}" in caplog.messages[-1]
            shell.link.take(KvbmLink("", "", "/pool/socket: the kvbm has closed the connection"))
            shell.link.take(away)
            await asyncio.sleep(20)
        await asyncio.sleep(3600)
        assert caplog.messages[-1] == "no blocks are exchanged: /pool/socket: no kvbm listens"
        assert caplog.messages.count(caplog.messages[-1]) == 2

    with caplog.at_level(logging.INFO):
        simulate(scenario())


def test_the_loss_of_an_engine_ends_its_link_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        shell = Shell()
        shell.link.take(LINK)
        shell.link.engine_lost()
        assert caplog.messages[-1] == "no blocks are exchanged: the engine was lost"

    with caplog.at_level(logging.INFO):
        simulate(scenario())


def test_a_note_names_a_kvbm_of_another_namespace_as_long_as_blocks_are_exchanged_with_it() -> None:
    async def scenario() -> None:
        shell = Shell()
        shell.link.take(LINK)
        assert shell.link.notes == []
        shell.link.take(KvbmLink("k2", "5eed", namespace="b"))
        [note] = shell.link.notes
        assert "kvbm k2 of namespace b" in note
        shell.link.take(KvbmLink("", "", "not answered"))
        assert shell.link.notes == []

    simulate(scenario())


def test_requests_are_counted_and_traced_ones_have_a_span() -> None:
    async def scenario() -> None:
        shell = Shell()
        place = TraceParent("a" * 32, "b" * 16)
        span = AskSpan(place, "c" * 16, 1_000_000_000)
        asks = [
            KvbmAsked("store", "answered", 0.002),
            KvbmAsked("fetch", "late", 2.0, "no answer in 2 s", span),
        ]
        shell.link.take(KvbmAsks(asks))
        asked = "headrace_kvbm_asks_total"
        assert shell.metric(asked, operation="store", outcome="answered") == 1
        assert shell.metric(asked, operation="fetch", outcome="late") == 1
        assert shell.metric("headrace_kvbm_ask_seconds_sum", operation="store") == 0.002
        assert shell.metric("headrace_kvbm_ask_seconds_sum", operation="fetch") is None
        [one] = shell.spans
        assert (one.name, one.trace, one.span, one.parent) == ("fetch", place.trace, place.span, "c" * 16)
        assert (one.start_ns, one.end_ns, one.error) == (1_000_000_000, 3_000_000_000, "no answer in 2 s")

    simulate(scenario())
