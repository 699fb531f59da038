"""The stream of KV events at a real nats-server: what it keeps, who makes it, and servers that cannot have it."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.errors import Error
from nats.js.api import StorageType, StreamConfig

from shared import subjects
from shared.bus import jetstream
from shared.bus.jetstream import EventStore
from shared.bus.nats_bus import NatsBus, connect
from shared.config import NatsConfig
from shared.errors import ConfigError, Unavailable
from tests.clusters import nats_cluster, url_of
from tests.event_planes import event_planes, stream_there, with_jetstream
from tests.servers import NatsServer, nats_server
from tests.shared.bus.test_events import DEADLINE_S, Batches, joined, replayed

LIMIT_BYTES = 16 << 20


@pytest.fixture
def namespace() -> str:
    return f"t{secrets.token_hex(6)}"


@pytest.fixture
async def bus(jetstream_url: str) -> AsyncIterator[NatsBus]:
    async with bus_at(jetstream_url) as one:
        yield one


@asynccontextmanager
async def bus_at(url: str) -> AsyncIterator[NatsBus]:
    one = await connect(NatsConfig(url=url), "test")
    yield one
    await one.drain()


def publish(bus: NatsBus, subject: str, *sequences: int) -> None:
    for sequence in sequences:
        bus.publish_now(subject, sequence.to_bytes(8, "big") + str(sequence).encode())


async def stored(store: EventStore, subject: str, last: int) -> None:
    """Return when the stream has this batch as the newest of the subject."""
    async with asyncio.timeout(DEADLINE_S):
        while await store.read(store.name, subject, last) != [(last, str(last).encode())]:  # noqa: ASYNC110
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("others", [0, 3, 200])
async def test_a_replay_finds_its_beginning_among_the_batches_of_other_sources(
    bus: NatsBus, namespace: str, others: int
) -> None:
    store = EventStore(bus, namespace, LIMIT_BYTES)
    await store.make()
    mine = subjects.events(namespace, "mine")
    for sequence in range(50):
        publish(bus, mine, sequence)
        for other in range(others):
            publish(bus, subjects.events(namespace, f"other-{other}"), sequence)
    await stored(store, mine, 49)
    for first in (0, 1, 30, 48, 49):
        batches = await store.read(store.name, mine, first)
        assert batches == [(sequence, str(sequence).encode()) for sequence in range(first, 50)]
    assert await store.read(store.name, mine, 50) == []
    assert await store.read(store.name, subjects.events(namespace, "unknown"), 0) == []


@pytest.mark.parametrize(
    ("limit", "value", "questions"), [("PAGE_BATCHES", 1000, 3), ("PAGE_BYTES", 2000, None), ("PAGE_BATCHES", 0, 2500)]
)
async def test_a_long_replay_is_read_in_pages_and_from_an_old_server_one_by_one(
    bus: NatsBus, namespace: str, monkeypatch: pytest.MonkeyPatch, limit: str, value: int, questions: int | None
) -> None:
    monkeypatch.setattr(jetstream, limit, value)  # without a number of messages, the server answers as one before 2.11
    store, mine, asked = EventStore(bus, namespace, LIMIT_BYTES), subjects.events(namespace, "mine"), list[str]()
    await store.make()
    for sequence in range(2500):
        publish(bus, mine, sequence)
        publish(bus, subjects.events(namespace, "other"), sequence)
    await stored(store, mine, 2499)
    ask = bus.stream

    def counted(subject: str, payload: bytes, **limits: Any) -> Any:
        asked.append(subject)
        return ask(subject, payload, **limits)

    monkeypatch.setattr(bus, "stream", counted)
    assert await store.read(store.name, mine, 0) == [(number, str(number).encode()) for number in range(2500)]
    assert questions is None or len(asked) in (questions, questions + 1), "the last page may be empty"


async def test_a_replay_with_gaps_has_what_was_stored(bus: NatsBus, namespace: str) -> None:
    store = EventStore(bus, namespace, LIMIT_BYTES)
    await store.make()
    mine = subjects.events(namespace, "mine")
    publish(bus, mine, 0, 1, 2, 900, 901, 5000)
    await stored(store, mine, 5000)
    for first, wanted in ((0, 0), (2, 2), (3, 900), (901, 901), (902, 5000)):  # the reader sees that some are missing
        assert (await store.read(store.name, mine, first))[0][0] == wanted


async def test_the_stream_keeps_a_bounded_number_of_batches_of_each_source(
    bus: NatsBus, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "KEPT_BATCHES", 10)
    store = EventStore(bus, namespace, LIMIT_BYTES)
    await store.make()
    busy, quiet = subjects.events(namespace, "busy"), subjects.events(namespace, "quiet")
    publish(bus, quiet, 0)
    publish(bus, busy, *range(100))
    await stored(store, busy, 99)
    assert [sequence for sequence, _ in await store.read(store.name, busy, 90)] == [*range(90, 100)]
    assert await store.read(store.name, busy, 89) == [], "it does not reach so far back"
    assert await store.read(store.name, quiet, 0) == [(0, b"0")]


async def test_the_stream_is_bounded_in_bytes(bus: NatsBus, namespace: str) -> None:
    store = EventStore(bus, namespace, 1 << 20)
    await store.make()
    mine = subjects.events(namespace, "mine")
    for sequence in range(40):
        bus.publish_now(mine, sequence.to_bytes(8, "big") + bytes(100_000))
        await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        while not await store.read(store.name, mine, 39):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert len(await store.read(store.name, mine, 35)) == 5
    assert await store.read(store.name, mine, 28) == []


async def test_a_stream_that_is_not_there_is_no_replay(bus: NatsBus, namespace: str) -> None:
    with pytest.raises(Unavailable, match="stream nowhere"):
        await EventStore(bus, namespace, LIMIT_BYTES).read("nowhere", subjects.events(namespace, "mine"), 0)


async def test_a_replay_outlives_its_source_and_not_the_server(tmp_path: Path, namespace: str) -> None:
    with nats_server(tmp_path, with_jetstream(tmp_path)) as server:
        async with event_planes("jetstream", server.url, namespace=namespace) as sources:
            publisher, batches = sources.open_publisher(), Batches()
            subscription = sources.subscribe(publisher.source, batches.receive)
            await joined(publisher, batches)
            publisher.publish(1_000_000, b"kept")
            await replayed(subscription, 1_000_000, 1_000_000)
        async with event_planes("zmq", server.url) as router:
            follower = router.subscribe(publisher.source, Batches().receive)
            assert (await replayed(follower, 1_000_000, 1_000_000)) == [(1_000_000, b"kept")]
            await asyncio.to_thread(server.restart)
            async with asyncio.timeout(DEADLINE_S):
                await router._over_nats().bus.wait_connected()
            with pytest.raises(Unavailable, match=f"stream {subjects.event_stream(namespace)[0]}"):
                await follower.replay(0, timeout_s=DEADLINE_S)


async def test_a_source_makes_the_stream_again_when_the_server_has_lost_it(tmp_path: Path, namespace: str) -> None:
    with nats_server(tmp_path, with_jetstream(tmp_path)) as server:
        async with event_planes("jetstream", server.url, namespace=namespace) as events:
            client = await nats.connect(server.url)
            await client.jetstream().delete_stream(subjects.event_stream(namespace)[0])
            await client.close()
            await asyncio.to_thread(server.restart)
            await stream_there(NatsConfig(url=server.url), namespace)
            publisher, batches = events.open_publisher(), Batches()
            subscription = events.subscribe(publisher.source, batches.receive)
            await joined(publisher, batches)
            publisher.publish(1_000_000, b"kept")
            assert await replayed(subscription, 1_000_000, 1_000_000) == [(1_000_000, b"kept")]


async def test_a_source_makes_the_stream_again_when_it_is_deleted_while_it_is_connected(
    jetstream_url: str, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jetstream, "ASKED_S", 0.0)
    monkeypatch.setattr(jetstream, "LOOK_S", 0.01)
    async with event_planes("jetstream", jetstream_url, namespace=namespace) as events:
        client = await nats.connect(jetstream_url)
        await client.jetstream().delete_stream(subjects.event_stream(namespace)[0])
        await client.close()
        await stream_there(NatsConfig(url=jetstream_url), namespace)
        assert events._over_nats().bus.connections == 1


@pytest.fixture
def small(tmp_path: Path) -> Iterator[NatsServer]:
    """A server whose JetStream has little memory."""
    with nats_server(tmp_path, with_jetstream(tmp_path, "max_memory_store: 8MB")) as server:
        yield server


async def test_a_server_without_jetstream_is_named_with_the_setting(nats_url: str, namespace: str) -> None:
    async with bus_at(nats_url) as bus:
        with pytest.raises(ConfigError, match=r"^observe\.events_plane: jetstream needs JetStream.*choose nats$"):
            await EventStore(bus, namespace, LIMIT_BYTES).keep()


async def test_a_stream_that_the_server_has_no_room_for_is_named_with_the_setting(
    small: NatsServer, namespace: str
) -> None:
    async with bus_at(small.url) as bus:
        with pytest.raises(ConfigError, match=rf"^observe\.events_stream_bytes: NATS refuses .* {LIMIT_BYTES} bytes"):
            await EventStore(bus, namespace, LIMIT_BYTES).keep()


async def test_a_stream_that_an_operator_has_made_keeps_its_limits(
    bus: NatsBus, jetstream_url: str, namespace: str
) -> None:
    name, mine = subjects.event_stream(namespace)
    client = await nats.connect(jetstream_url)
    made = StreamConfig(name=name, subjects=[mine], max_msgs=3, allow_direct=True)
    await client.jetstream().add_stream(made)
    store = EventStore(bus, namespace, LIMIT_BYTES)
    await store.make()
    publish(bus, subjects.events(namespace, "mine"), *range(9))
    await stored(store, subjects.events(namespace, "mine"), 8)
    assert len(await store.read(name, subjects.events(namespace, "mine"), 6)) == 3
    assert await store.read(name, subjects.events(namespace, "mine"), 5) == []
    await client.close()


USERS = """authorization { users: [
  { user: operator, password: operator }
  { user: worker, password: worker, permissions: {
    publish: { allow: ["headrace.*.events.*", "$JS.API.STREAM.INFO.*", "$JS.API.DIRECT.GET.>"] }, subscribe: ">"
  } }
] }
"""


async def test_a_user_that_may_make_and_change_no_stream_takes_that_of_an_operator(
    tmp_path: Path, namespace: str
) -> None:
    """With those rights a user reads all of its account: a stream can publish what it takes on another subject."""
    name, mine = subjects.event_stream(namespace)
    with nats_server(tmp_path, with_jetstream(tmp_path) + USERS) as server:
        client = await nats.connect(server.url, user="operator", password="operator")
        await client.jetstream().add_stream(StreamConfig(name=name, subjects=[mine], allow_direct=True))
        await client.close()
        bus = await connect(NatsConfig(url=server.url, user="worker", password="worker"), "test")
        store = EventStore(bus, namespace, LIMIT_BYTES)
        await store.make()
        publish(bus, subjects.events(namespace, "mine"), 7)
        await stored(store, subjects.events(namespace, "mine"), 7)
        await bus.drain()


async def test_a_source_that_starts_with_another_size_gives_it_to_a_stream_of_ours_and_to_no_other(
    bus: NatsBus, jetstream_url: str, namespace: str, caplog: pytest.LogCaptureFixture
) -> None:
    name, mine = subjects.event_stream(namespace)
    client = await nats.connect(jetstream_url)

    async def size() -> int | None:
        return (await client.jetstream().stream_info(name)).config.max_bytes

    await (before := EventStore(bus, namespace, LIMIT_BYTES)).make()
    publish(bus, subjects.events(namespace, "mine"), 7)
    await stored(before, subjects.events(namespace, "mine"), 7)
    await EventStore(bus, namespace, 2 * LIMIT_BYTES).make()
    assert await size() == 2 * LIMIT_BYTES
    await before.make(resize=False)
    assert await size() == 2 * LIMIT_BYTES
    assert await before.read(name, subjects.events(namespace, "mine"), 7) == [(7, b"7")]
    found = (await client.jetstream().stream_info(name)).config
    assert (found.max_age, found.max_msgs_per_subject) == (jetstream.KEPT_S, jetstream.KEPT_BATCHES)
    await client.jetstream().delete_stream(name)
    await client.jetstream().add_stream(StreamConfig(name=name, subjects=[mine], max_bytes=1 << 20, allow_direct=True))
    await before.make()
    assert await size() == 1 << 20
    assert f"observe.events_stream_bytes is {LIMIT_BYTES}, but the stream {name}, which someone else has" in caplog.text
    await client.close()


async def test_events_and_replays_go_on_when_one_of_three_servers_that_have_the_stream_is_killed(
    tmp_path: Path, namespace: str
) -> None:
    name, mine = subjects.event_stream(namespace)
    made = StreamConfig(name=name, subjects=[mine], num_replicas=3, storage=StorageType.MEMORY, allow_direct=True)
    with nats_cluster(tmp_path, 'jetstream { store_dir: "{folder}/jetstream" }\n') as servers:
        client = await nats.connect(servers[0].url)
        async with asyncio.timeout(DEADLINE_S):
            while True:
                with suppress(Error):  # the servers have not elected a leader yet
                    await client.jetstream().add_stream(made)
                    break
                await asyncio.sleep(0.1)
        async with event_planes("jetstream", url_of(servers), namespace=namespace) as events:
            publisher, batches = events.open_publisher(), Batches()
            subscription = events.subscribe(publisher.source, batches.receive)
            await joined(publisher, batches)
            publisher.publish(1_000_000, b"before")
            await batches.wait(1_000_000)
            await replayed(subscription, 1_000_000, 1_000_000)
            cluster = (await client.jetstream().stream_info(name)).cluster
            assert cluster is not None
            await client.close()
            servers[int((cluster.leader or "").removeprefix("nats-"))].kill()
            found: list[tuple[int, bytes]] = []
            async with asyncio.timeout(DEADLINE_S):
                for sequence in itertools.count(2_000_000):  # some are lost while connections move and servers elect
                    publisher.publish(sequence, b"after")
                    with suppress(Unavailable):
                        found = await subscription.replay(1_000_000, timeout_s=DEADLINE_S)
                    if found and found[-1][0] > 1_000_000 and batches.sequences[-1] > 1_000_000:
                        break
                    await asyncio.sleep(0.05)
            assert found[0] == (1_000_000, b"before")


async def test_another_stream_that_has_the_subjects_is_named(bus: NatsBus, jetstream_url: str, namespace: str) -> None:
    client = await nats.connect(jetstream_url)
    other = StreamConfig(name=f"other-{namespace}", subjects=[f"headrace.{namespace}.>"])
    await client.jetstream().add_stream(other)
    with pytest.raises(ConfigError, match=r"^observe\.events_plane: another stream of NATS has headrace\."):
        await EventStore(bus, namespace, LIMIT_BYTES).keep()
    await client.jetstream().delete_stream(f"other-{namespace}")
    await client.close()


async def test_a_stream_of_other_subjects_is_named(bus: NatsBus, jetstream_url: str, namespace: str) -> None:
    name, _ = subjects.event_stream(namespace)
    client = await nats.connect(jetstream_url)
    await client.jetstream().add_stream(StreamConfig(name=name, subjects=[f"other.{namespace}"]))
    with pytest.raises(ConfigError, match=rf"observe\.events_plane: the stream {name} that NATS has needs"):
        await EventStore(bus, namespace, LIMIT_BYTES).keep()
    await client.close()
