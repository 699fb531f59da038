"""Events on the plane of the settings, followed on each source's own."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeVar

import pytest
from prometheus_client import CollectorRegistry

from shared.bus.contract import EventPublisher
from shared.bus.event_planes import EventPlanes
from shared.bus.zmq_events import ZmqEventBus
from shared.config import NatsConfig, ObserveConfig, ServiceConfig, load
from shared.errors import ConfigError
from tests.clusters import nats_users
from tests.event_planes import NOWHERE, Plane, event_planes, with_jetstream
from tests.servers import NatsServer, nats_server
from tests.shared.bus.test_events import DEADLINE_S, Batches, joined, replayed

T = TypeVar("T")


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


@pytest.mark.parametrize("plane", ["nats", "jetstream"])
async def test_the_users_of_a_cluster_may_do_what_a_plane_needs_and_workers_hear_no_events(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, plane: Plane
) -> None:
    with nats_server(tmp_path, with_jetstream(tmp_path) + nats_users()) as server:
        for user in ("worker", "kvbm"):
            async with (
                event_planes(plane, server.url, user=user) as source,
                event_planes("zmq", server.url, user="router") as router,
            ):
                publisher, batches = source.open_publisher(), Batches()
                subscription = router.subscribe(publisher.source, batches.receive)
                await joined(publisher, batches)
                publisher.publish(1_000_000, b"kept")
                assert await replayed(subscription, 1_000_000, 1_000_000) == [(1_000_000, b"kept")]
                assert "permissions violation" not in caplog.text.lower()
                stranger = source.subscribe(publisher.source, lambda *_: None)
                async with asyncio.timeout(DEADLINE_S):
                    while "permissions violation for subscription" not in caplog.text.lower():  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                stranger.close()
                caplog.clear()


async def test_without_a_source_on_nats_no_connection_is_made() -> None:
    async with event_planes("zmq", NOWHERE) as planes:
        publisher, batches = planes.open_publisher(), Batches()
        subscription = planes.subscribe(publisher.source, batches.receive)
        await joined(publisher, batches)
        assert planes._nats is None
        subscription.close()
        publisher.close()


async def test_a_process_that_publishes_nothing_needs_no_plane() -> None:
    config = ServiceConfig(nats=NatsConfig(url=NOWHERE), observe=ObserveConfig(events_plane="jetstream"))
    with ZmqEventBus() as zmq:
        planes = EventPlanes(zmq, config, "headrace-test-1", CollectorRegistry(), publishes=False)
        running = asyncio.create_task(planes.run())
        await asyncio.wait((running,), timeout=0.05)
        assert planes._nats is None
        running.cancel()
        await planes.close()


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


async def test_a_router_that_does_not_read_is_cut_off_from_events_and_replays_what_it_missed(tmp_path: Path) -> None:
    with nats_server(tmp_path, 'max_pending: 8MB\nwrite_deadline: "1s"\n') as server, loop_in_thread() as elsewhere:
        opened = AsyncExitStack()

        async def open_source() -> EventPublisher:
            planes = await opened.enter_async_context(event_planes("nats", server.url))
            return planes.open_publisher()

        async def publish(first: int, count: int, size_bytes: int) -> None:
            for number in range(first, first + count):
                publisher.publish(number, bytes(size_bytes))
                await asyncio.sleep(0.001)

        def there(coroutine: Coroutine[None, None, T]) -> Future[T]:
            return asyncio.run_coroutine_threadsafe(coroutine, elsewhere)

        publisher = await asyncio.wrap_future(there(open_source()))
        async with event_planes("zmq", server.url) as router:
            batches, sequence = Batches(), 0
            subscription = router.subscribe(publisher.source, batches.receive)
            bus = router._over_nats().bus
            await bus.wait_connected()
            async with asyncio.timeout(DEADLINE_S):
                while bus.connections == 1:  # a publisher that is faster than its server loses batches, too
                    there(publish(sequence, 200, 100_000)).result(DEADLINE_S)  # meanwhile this loop stands still
                    sequence += 200
                    await asyncio.sleep(0.01)
                while not batches.all or batches.sequences[-1] < sequence - 1:
                    await asyncio.wrap_future(there(publish(sequence, 1, 10)))
                    sequence += 1
            assert len(batches.all) < sequence
            missed = await replayed(subscription, sequence - 100, sequence - 1)
            assert [number for number, _ in missed] == [*range(sequence - 100, sequence)]
        await asyncio.wrap_future(there(opened.aclose()))


@contextmanager
def loop_in_thread() -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop that runs while ours stands still."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()
