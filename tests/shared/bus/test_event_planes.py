"""Events on the plane of the settings, followed on each source's own."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from shared.bus.event_planes import EventPlanes
from shared.bus.zmq_events import ZmqEventBus
from shared.config import NatsConfig, ObserveConfig, ServiceConfig, load
from shared.errors import ConfigError
from tests.event_planes import NOWHERE, event_planes
from tests.servers import NatsServer
from tests.shared.bus.test_events import DEADLINE_S, Batches, joined


async def test_a_router_follows_sources_on_all_planes_whatever_its_own_is(jetstream_url: str) -> None:
    async with (
        event_planes("zmq", jetstream_url) as router,
        event_planes("zmq") as first,
        event_planes("nats", jetstream_url) as second,
        event_planes("jetstream", jetstream_url) as third,
    ):
        for source, way in ((first, "tcp:"), (second, "nats:"), (third, "nats:")):
            publisher, batches = source.open_publisher(), Batches()
            assert publisher.source.publish.startswith(way)
            subscription = router.subscribe(publisher.source, batches.receive)
            await joined(publisher, batches)
            subscription.close()
            publisher.close()


async def test_without_a_source_on_nats_no_connection_is_made() -> None:
    async with event_planes("zmq", NOWHERE) as planes:
        publisher, batches = planes.open_publisher(), Batches()
        planes.subscribe(publisher.source, batches.receive)
        await joined(publisher, batches)
        assert planes._nats is None


async def test_jetstream_where_there_is_none_ends_the_process_with_a_line(nats_url: str) -> None:
    config = ServiceConfig(nats=NatsConfig(url=nats_url), observe=ObserveConfig(events_plane="jetstream"))
    with ZmqEventBus() as zmq:
        planes = EventPlanes(zmq, config, "headrace-test-1", CollectorRegistry())
        with pytest.raises(ExceptionGroup) as wrong:
            await planes.run()
        await planes.close()
    assert wrong.group_contains(ConfigError, match=r"observe\.events_plane")


async def test_batches_that_nats_does_not_take_are_counted(own_nats: NatsServer) -> None:
    registry = CollectorRegistry()
    config = ServiceConfig(nats=NatsConfig(url=own_nats.url), observe=ObserveConfig(events_plane="nats"))
    with ZmqEventBus() as zmq:
        planes = EventPlanes(zmq, config, "headrace-test-1", registry)
        publisher, batches = planes.open_publisher(), Batches()
        planes.subscribe(publisher.source, batches.receive)
        await joined(publisher, batches)
        before = registry.get_sample_value("headrace_unsent_event_batches_total") or 0.0
        own_nats.freeze()
        sequence = 1_000_000
        async with asyncio.timeout(DEADLINE_S):
            while (registry.get_sample_value("headrace_unsent_event_batches_total") or 0.0) == before:
                publisher.publish(sequence, bytes(100_000))
                sequence += 1
                await asyncio.sleep(0)
        own_nats.thaw()
        await planes.close()
    assert sequence - 1_000_000 < 200, "what is unsent is bounded"


def test_a_plane_that_there_is_not_is_named_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"observe\.events_plane is one of zmq, nats, jetstream"):
        load(ServiceConfig, flags=["--observe-events-plane", "kafka"], environ={})
