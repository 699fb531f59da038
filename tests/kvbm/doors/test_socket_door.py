"""kvbm's socket: a real one, with a real service, pool and locks."""

from __future__ import annotations

import asyncio
import socket
import stat
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from itertools import count, permutations
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from services.kvbm.config import PoolConfig, TiersConfig
from services.kvbm.disk.segments import Segments
from services.kvbm.doors import socket_door
from services.kvbm.doors.replies import Request
from services.kvbm.doors.socket_door import MOST_CONNECTIONS, SocketDoor
from services.kvbm.layout import layouts
from services.kvbm.metrics import StoreMetrics
from services.kvbm.tickets.packing import unpack_slots
from services.kvbm.tickets.results import TicketLimits
from services.worker.kv_connector.contract import KvbmNews, KvbmUp
from services.worker.kv_connector.socket_client import SocketClient
from shared.bus.contract import Message
from shared.hashing import ContentKey
from shared.messages import kvbm as wire
from shared.pool.lock import LOCK, SOCKET, hold_directory
from shared.pool.socket_frames import FROM_KVBM, PROTOCOL, Answered, Asked, FrameReader, Hello, encode_frame
from shared.tracing.traceparent import TraceParent, carried
from tests.kvbm.chains import chain, keys
from tests.kvbm.store_rig import (
    LAYOUT,
    LIMIT_S,
    NAMESPACE,
    SMALL_BYTES,
    Engine,
    Store,
    World,
    running,
    serving,
    settings,
    until,
)
from tests.resource_limits import no_descriptor_left


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer
        self._frames = FrameReader()
        self._arrived: deque[Hello | Answered] = deque()

    async def read(self) -> Hello | Answered | None:
        """Return the next frame; None if the connection is closed."""
        async with asyncio.timeout(LIMIT_S):
            while not self._arrived:
                try:
                    data = await self.reader.read(1 << 16)
                except ConnectionError:
                    return None
                if not data:
                    return None
                self._arrived += [FROM_KVBM.decode(body) for body in self._frames.feed(data)]
        return self._arrived.popleft()

    async def answer(self) -> Answered:
        answered = await self.read()
        assert isinstance(answered, Answered), answered
        return answered

    def ask(self, number: int, operation: str, payload: bytes) -> None:
        self.writer.write(encode_frame(Asked(number, operation, payload)))


@asynccontextmanager
async def connected(world: World) -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_unix_connection(str(Path(world.config.pool.directory) / SOCKET))
    try:
        yield Client(reader, writer)
    finally:
        writer.transport.abort()


class SocketEngine(Engine):
    """An engine without NATS."""

    client: Client
    number = 0

    async def ask(self, operation: str, payload: bytes, *, headers: dict[str, str] | None = None) -> Message:
        (only,) = await self.answers(operation, payload)
        return Message(operation, only)

    async def fetch(self, keys: Sequence[ContentKey]) -> list[wire.Fetched | wire.KvbmRefused]:
        asked = wire.FETCH.encode(wire.Fetch(self.owner, b"".join(keys)))
        return [wire.FETCH_REPLY.decode(payload) for payload in await self.answers("fetch", asked)]

    async def answers(self, operation: str, payload: bytes) -> list[bytes]:
        self.number += 1
        self.client.ask(self.number, operation, payload)
        payloads: list[bytes] = []
        while True:
            answered = await self.client.answer()
            assert answered.number == self.number
            payloads.append(answered.payload)
            if answered.last:
                return payloads


@asynccontextmanager
async def engine(store: Store, name: str) -> AsyncIterator[SocketEngine]:
    """Attach an engine through the socket."""
    async with connected(store.world) as client:
        hello = await client.read()
        assert isinstance(hello, Hello)
        assert (hello.protocol, hello.kvbm, hello.namespace) == (PROTOCOL, store.runtime.instance, NAMESPACE)
        made = SocketEngine(store.world.bus, Path(store.world.config.pool.directory), name, f"{name}-worker", LAYOUT)
        made.client = client
        store.world.engines.append(made)
        await made.attach()
        yield made


async def closed(client: Client) -> None:
    """Return when kvbm has closed the connection."""
    while await client.read() is not None:
        pass


async def test_what_one_engine_stores_through_the_socket_others_read_there_and_over_nats(tmp_path: Path) -> None:
    async with serving(tmp_path) as store, engine(store, "a") as a, engine(store, "b") as b:
        c = await store.world.attached("c")
        contents = chain(1, 2, 3)
        assert await a.store(contents) == 3
        assert await b.load(contents) == await c.load(contents) == (3, 0)
        granted = await b.grant(chain(7))
        assert await b.abort(granted.ticket) == wire.Settled()
        assert await b.discard(keys(contents)) == wire.Settled()
        assert await a.load(contents) == (0, 0)
        mode = (Path(store.world.config.pool.directory) / SOCKET).stat().st_mode
        assert stat.S_ISSOCK(mode)
        assert stat.S_IMODE(mode) == 0o600
        assert store.metric("headrace_kvbm_request_seconds_count", operation="commit") == 1


async def test_blocks_from_disk_come_in_later_answers(tmp_path: Path) -> None:
    tiers = TiersConfig(host_policy="lru", disk_sightings=1)
    async with serving(tmp_path, size_bytes=SMALL_BYTES, disk=True, tiers=tiers) as store, engine(store, "a") as a:
        assert a.slots is not None
        contents = chain(1, 2, 3)
        await a.store(contents[1:])
        for token in range(10, 10 + 3 * a.slots.arena.slots):
            await a.store(chain(token))
            await store.spilled()
        await a.store(contents[:1])
        assert await a.load(contents) == (3, 2)


async def test_an_unknown_operation_and_a_payload_that_is_none_are_refused(tmp_path: Path) -> None:
    async with serving(tmp_path) as store, connected(store.world) as client:
        assert isinstance(await client.read(), Hello)
        for number, operation in enumerate(("stat", "store", "fetch")):
            client.ask(number, operation, b"\xc1")
            answered = await client.answer()
            assert (answered.number, answered.last) == (number, True)
            refused = wire.SETTLED.decode(answered.payload)
            assert isinstance(refused, wire.KvbmRefused)
            assert refused.code == "bad_request"
        assert store.metric("headrace_kvbm_refusals_total", code="bad_request") == 3


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", (1 << 20 | 1).to_bytes(4, "little"), b"\x01\0\0\0\xc1"])
async def test_a_connection_that_sends_nonsense_is_closed_and_others_stay(
    tmp_path: Path, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as store, engine(store, "a") as a, connected(store.world) as client:
        client.writer.write(sent)
        await closed(client)
        assert "nonsense" in caplog.text
        assert await a.store(chain(1)) == 1


async def test_one_connection_too_many_is_closed_and_room_comes_back(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        path = str(Path(store.world.config.pool.directory) / SOCKET)
        pairs = [await asyncio.open_unix_connection(path) for _ in range(MOST_CONNECTIONS)]
        clients = [Client(*pair) for pair in pairs]
        for client in clients:
            assert isinstance(await client.read(), Hello)
        async with connected(store.world) as one_more:
            assert await one_more.read() is None
        assert store.service.door.refused.count == 1
        for client in clients:
            client.writer.transport.abort()
        await until(lambda: not store.service.door._connections)
        async with engine(store, "a") as a:
            assert await a.store(chain(1)) == 1


async def test_engines_that_come_and_go_leave_no_file_descriptor(tmp_path: Path) -> None:
    def descriptors() -> int:
        return sum(1 for _ in Path("/proc/self/fd").iterdir())

    async with serving(tmp_path) as store, engine(store, "stays"):
        before = descriptors()
        for name in map(str, range(40)):
            async with engine(store, name) as one:
                await one.store(chain(1))
            one.die()
        await until(lambda: descriptors() <= before + 3)


async def test_a_client_that_does_not_read_is_closed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path) as store, engine(store, "a") as a:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_UNIX) as slow:
            slow.setblocking(False)
            await loop.sock_connect(slow, str(Path(store.world.config.pool.directory) / SOCKET))
            asked = encode_frame(Asked(1, "x" * 64, b"")) * 500
            with suppress(ConnectionError):
                async with asyncio.timeout(LIMIT_S):
                    while True:
                        await loop.sock_sendall(slow, asked)
        assert "unread" in caplog.text
        assert await a.store(chain(1)) == 1


async def test_a_kvbm_that_stops_removes_its_socket_and_the_next_one_replaces_one_left(tmp_path: Path) -> None:
    world = World(settings(tmp_path))
    path = Path(world.config.pool.directory) / SOCKET
    async with running(world, "b1") as store, connected(world) as client:
        assert isinstance(await client.read(), Hello)
        await until(lambda: store.service.prefault.complete)
    assert not path.exists()
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    async with running(world, "b2") as store, engine(store, "a") as a:
        assert await a.store(chain(1)) == 1
        a.die()
    assert not path.exists()


@pytest.mark.parametrize("turns", range(4))
async def test_a_client_that_connects_while_kvbm_stops_is_closed(tmp_path: Path, turns: int) -> None:
    world = World(settings(tmp_path))
    with socket.socket(socket.AF_UNIX) as client:
        async with running(world) as store:
            client.connect(str(Path(world.config.pool.directory) / SOCKET))
            for _ in range(turns):  # until the loop has accepted it
                await asyncio.sleep(0)
            await store.service.door.stop_reading()
            await store.service.door.close()
        client.settimeout(LIMIT_S)
        with suppress(ConnectionResetError):
            while await asyncio.to_thread(client.recv, 1 << 16):
                pass


async def test_engines_hear_at_once_that_kvbm_stops_after_their_answers_though_its_disk_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(settings(tmp_path, disk=True))
    contents = chain(1, 2)
    async with running(world, "b1") as store, engine(store, "a") as a:
        await a.store(contents)
        await store.spilled()
        a.die()
    started, stopping = asyncio.get_running_loop().create_future(), asyncio.Event()
    told, read = threading.Event(), Segments.read

    async def live() -> None:
        async with running(world, "b2") as store:
            started.set_result(store)
            await stopping.wait()

    def after_they_are_told(*record: Any) -> Any:
        assert told.wait(LIMIT_S)
        return read(*record)

    monkeypatch.setattr(layouts, "CLOSE_LIMIT_S", LIMIT_S)
    monkeypatch.setattr(Segments, "read", after_they_are_told)
    life = asyncio.create_task(live())
    store = await started
    try:
        async with engine(store, "b") as b, engine(store, "c") as c:
            disk = store.service.layouts.open[LAYOUT.digest].disk
            assert disk is not None
            await until(lambda: disk.statistics().state == "on")
            b.client.ask(9, "fetch", wire.FETCH.encode(wire.Fetch(b.owner, b"".join(keys(contents)))))
            first = await b.client.answer()
            assert (first.number, first.last) == (9, False)
            stopping.set()
            last = await b.client.answer()
            assert (last.number, last.last) == (9, True)
            assert isinstance(wire.FETCH_REPLY.decode(last.payload), wire.KvbmRefused)
            await closed(b.client)
            await closed(c.client)
            assert not life.done()
    finally:
        told.set()
    await life
    for each in world.engines:
        each.die()


async def test_tickets_end_with_the_engine_and_not_with_its_connection(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        async with engine(store, "a") as a:
            await a.grant(chain(1))
        await until(lambda: not store.service.door._connections)
        assert (await store.layout()).tickets["store"] == 1
        a.die()
        await until(lambda: store.metric("headrace_kvbm_dead_owners_total") == 1)
        assert (await store.layout()).tickets["store"] == 0


@pytest.mark.parametrize("order", sorted(set(permutations(["old"] * 4 + ["new"] * 3))), ids="-".join)
async def test_no_slot_that_an_engine_writes_is_anothers_in_any_order_of_its_connections_requests(
    tmp_path: Path, order: Sequence[str]
) -> None:
    async with (
        serving(tmp_path, size_bytes=SMALL_BYTES, tickets=TicketLimits(owner_share=1.0)) as store,
        engine(store, "a") as a,
        connected(store.world) as client,
    ):
        assert isinstance(await client.read(), Hello)
        neighbour = await store.world.attached("n")
        writes: list[int] = []
        contents = chain(1, 2, 3)
        tokens = count(100, 8)

        async def grant() -> None:
            granted = await a.grant(contents)
            writes.extend(unpack_slots(granted.slots))
            a.write(granted, contents)
            commits.append(partial(a.commit, granted.ticket, granted.slots))

        async def attach() -> None:
            assert isinstance(await a.try_attach(), wire.Attached)

        async def commit() -> None:
            assert await commits.pop()() == wire.Settled()
            writes.clear()
            assert await neighbour.load(contents) == (3, 0)

        commits: list[Callable[[], Awaitable[object]]] = []
        steps: dict[str, Iterator[Callable[[], Awaitable[object]]]] = {
            "old": iter([partial(a.try_store, chain(7)), a.try_attach, partial(a.try_store, chain(8)), a.try_attach]),
            "new": iter([attach, grant, commit]),
        }
        clients = {"old": a.client, "new": client}
        for connection in order:
            a.client = clients[connection]
            await next(steps[connection])()
            first = next(tokens)
            theirs = await neighbour.grant(chain(*range(first, first + 8)))
            assert set(writes).isdisjoint(unpack_slots(theirs.slots))
            await neighbour.abort(theirs.ticket)


async def test_what_kvbm_has_read_of_a_closed_connection_does_not_end_a_store_of_the_next(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as store, engine(store, "a") as a:
        path = str(Path(store.world.config.pool.directory) / SOCKET)
        attach = wire.ATTACH.encode(wire.Attach(a.worker, a.owner, a.layout))
        blocks = [wire.StoreBlock(one.key, one.parent, one.tokens, one.lora, one.salt) for one in chain(1)]
        with socket.socket(socket.AF_UNIX) as old:
            old.connect(path)
            await asyncio.to_thread(old.recv, 1 << 16)
            # All the rest is sent before kvbm reads any of it: its turns then go from one connection to the other.
            old.sendall(encode_frame(Asked(1, "release", b"")) * 300 + encode_frame(Asked(2, "attach", attach)))
        with socket.socket(socket.AF_UNIX) as new:
            new.connect(path)
            new.sendall(encode_frame(Asked(1, "attach", attach)))
            new.sendall(encode_frame(Asked(2, "store", wire.STORE.encode(wire.Store(a.owner, blocks)))))
            await until(lambda: store.metric("headrace_kvbm_request_seconds_count", operation="store") == 1)
            await until(lambda: len(store.service.door._connections) == 2)
            assert (await store.layout()).tickets["store"] == 1


async def test_an_engine_attaches_to_each_connection_and_does_not_go_back_from_the_socket_to_nats(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path) as store, connected(store.world) as client:
        assert isinstance(await client.read(), Hello)
        over_nats = await store.world.attached("a")
        directory = Path(store.world.config.pool.directory)
        a = SocketEngine(store.world.bus, directory, "a", over_nats.worker, over_nats.layout)
        a.client = client
        assert isinstance(await a.try_store(chain(1)), wire.KvbmRefused)
        assert isinstance(await a.try_attach(), wire.Attached)
        assert isinstance(await a.try_store(chain(1)), wire.Granted)
        for refused in (await over_nats.try_store(chain(2)), await over_nats.try_attach()):
            assert isinstance(refused, wire.KvbmRefused)
            assert refused.code == "unknown_owner"


async def test_a_directory_whose_path_is_too_long_for_a_socket_has_one(tmp_path: Path) -> None:
    directory = tmp_path / ("long" * 30)
    pool = PoolConfig(directory=str(directory / "pool"), size_bytes=1 << 20, prefault_threads=1)
    async with serving(directory, pool=pool) as store:
        client = SocketClient(directory / "pool")
        news: list[KvbmNews] = []

        def heard() -> bool:
            news.extend(client.poll(0.0))
            return bool(news)

        await until(heard)
        assert news == [KvbmUp(store.runtime.instance, NAMESPACE)]
        client.close()


@pytest.fixture
def taken(tmp_path: Path) -> None:
    """There is a directory where the socket would be."""
    pool = Path(settings(tmp_path).pool.directory)
    pool.mkdir(mode=0o700, parents=True)
    (pool / SOCKET).mkdir()


@pytest.mark.usefixtures("taken")
async def test_where_no_socket_can_be_made_kvbm_is_not_ready_and_serves_over_nats_until_there_is_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as store:
        path = store.service.door.path
        assert f"no socket at {path}" in caplog.text
        a = await store.world.attached("a")
        assert await a.store(chain(1)) == 1
        (reason,) = store.runtime.health.reasons
        assert reason.startswith(f"no socket at {path}, so that workers exchange no blocks with this kvbm: ")
        path.rmdir()
        await until(lambda: not store.runtime.health.reasons)
        async with engine(store, "b") as b:
            assert await b.store(chain(2)) == 1
        assert caplog.text.count("no socket at") == 1


@pytest.mark.parametrize("replaced", [False, True])
async def test_a_socket_that_is_removed_or_replaced_is_made_again_and_connections_stay(
    tmp_path: Path, replaced: bool
) -> None:
    async with serving(tmp_path) as store, engine(store, "a") as a:
        path = store.service.door.path
        path.unlink()
        if replaced:
            path.touch()
        await until(path.is_socket)
        async with engine(store, "b") as b:
            assert await a.store(chain(1)) == await b.store(chain(2)) == 1
    assert not path.exists()


async def test_where_another_kvbm_may_be_at_the_path_no_socket_is_made(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        path = store.service.door.path
        await until(lambda: not store.runtime.health.reasons)
        (path.parent / LOCK).unlink()
        path.unlink()
        path.touch()  # as another kvbm's socket
        await until(lambda: bool(store.runtime.health.reasons))
        assert "another kvbm may be there" in store.runtime.health.reasons[0]
    assert path.is_file()


async def test_a_request_that_kvbm_fails_over_is_logged_and_counted_and_its_connection_is_closed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def handle(request: Request) -> None:
        raise OSError("a fault of ours")

    registry = CollectorRegistry()
    lock = hold_directory(tmp_path, "b1")
    door = SocketDoor(lock, StoreMetrics(registry), handle, lambda: Hello(PROTOCOL, "b1"))
    door.listen()
    client = Client(*await asyncio.open_unix_connection(str(door.path)))
    client.ask(1, "fetch", b"")
    await closed(client)
    assert "socket: fetch failed" in caplog.text
    assert "OSError: a fault of ours" in caplog.text
    assert registry.get_sample_value("headrace_kvbm_unanswered_requests_total") == 1
    client.writer.transport.abort()
    await door.stop_reading()
    await door.close()
    lock.close()


async def test_a_traced_request_has_its_place_in_its_headers_and_another_one_has_none(tmp_path: Path) -> None:
    heard: list[Request] = []

    async def handle(request: Request) -> None:
        heard.append(request)

    lock = hold_directory(tmp_path, "b1")
    door = SocketDoor(lock, StoreMetrics(CollectorRegistry()), handle, lambda: Hello(PROTOCOL, "b1"))
    door.listen()
    place = TraceParent("a" * 32, "b" * 16)
    _, writer = await asyncio.open_unix_connection(str(door.path))
    for trace in (place.header, ""):
        writer.write(encode_frame(Asked(7, "fetch", b"q", trace)))
    await until(lambda: len(heard) == 2)
    assert [carried(request.headers) for request in heard] == [place, None]
    writer.transport.abort()
    await door.stop_reading()
    await door.close()
    lock.close()


async def test_without_file_descriptors_a_connection_waits_and_kvbm_does_not_spin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_door, "ACCEPT_RETRY_S", 0.01)
    world = World(settings(tmp_path))
    async with running(world) as store, connected(world) as first:
        assert isinstance(await first.read(), Hello)
        with socket.socket(socket.AF_UNIX) as client:
            with no_descriptor_left():
                client.connect(str(store.service.door.path))
                await until(lambda: store.service.door.refused.count > 0)
            client.settimeout(LIMIT_S)
            assert await asyncio.to_thread(client.recv, 1 << 16), "it says hello"
