"""What NATS can do to its bus: be late, be killed, be frozen, refuse a password."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvloop

from shared import subjects
from shared.bus.contract import Message
from shared.bus.nats_bus import NatsBus, connect
from shared.bus.nats_connection import FAIR_SHARE
from shared.config import NatsConfig
from shared.errors import BusDown, ConfigError, NoResponders, ProtocolError
from tests.logged import logged
from tests.servers import NatsServer, nats_server

DEADLINE_S = 60.0


@asynccontextmanager
async def connected(url: str, user: str = "", password: str = "") -> AsyncIterator[NatsBus]:
    async with asyncio.timeout(DEADLINE_S):
        bus = await connect(NatsConfig(url=url, user=user, password=password), "test")
    try:
        yield bus
    finally:
        await bus.drain()


async def wait_lost(bus: NatsBus) -> None:
    """Until a publish raises BusDown."""
    with pytest.raises(BusDown):
        await asyncio.wait_for(publish_on_and_on(bus), DEADLINE_S)
    assert not bus.connected


async def publish_on_and_on(bus: NatsBus) -> None:
    while True:
        await bus.publish("anything", b"")
        await asyncio.sleep(0)


async def publish_bytes(bus: NatsBus, size_bytes: int) -> None:
    for _ in range(size_bytes >> 20):
        await bus.publish("anything", bytes(1 << 20))


async def wait_back(bus: NatsBus) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await bus.wait_connected()


async def test_a_killed_server_raises_bus_down_and_subscriptions_live_on(own_nats: NatsServer) -> None:
    async with connected(own_nats.url) as bus, connected(own_nats.url) as other:
        heard: asyncio.Queue[bytes] = asyncio.Queue()

        async def receive(message: Message) -> None:
            heard.put_nowait(message.payload)

        before = await bus.subscribe("events", receive)
        own_nats.kill()
        await wait_lost(bus)
        await wait_lost(other)
        during = await bus.subscribe("during", receive)
        with pytest.raises(BusDown):
            await bus.request("events", b"", timeout_s=DEADLINE_S)
        await asyncio.to_thread(own_nats.start)
        await wait_back(bus)
        await wait_back(other)
        await other.publish("events", b"one")
        await other.publish("during", b"two")
        assert {await asyncio.wait_for(heard.get(), DEADLINE_S) for _ in range(2)} == {b"one", b"two"}
        assert before.statistics().received == 1
        assert during.statistics().received == 1


async def test_what_was_published_before_an_outage_is_not_confirmed_after_it(own_nats: NatsServer) -> None:
    async with connected(own_nats.url) as bus:
        before = bus.connections
        await bus.publish("anything", b"")
        await bus.confirm(before)
        own_nats.kill()
        await wait_lost(bus)
        with pytest.raises(BusDown):
            await bus.confirm(before)
        await asyncio.to_thread(own_nats.start)
        await wait_back(bus)
        with pytest.raises(BusDown):
            await bus.confirm(before)
        assert bus.connections == before + 1
        await bus.confirm(bus.connections)


async def test_who_gives_up_waiting_for_nats_does_not_take_the_connection_along(own_nats: NatsServer) -> None:
    async with connected(own_nats.url) as bus:
        before = bus.connections
        own_nats.freeze()
        try:
            waiting = asyncio.create_task(bus.confirm(before))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(BusDown):
                await bus.confirm(before)
        finally:
            own_nats.thaw()
        await bus.confirm(before)
        assert bus.connections == before


async def test_what_waits_for_an_answer_fails_when_the_connection_is_lost(own_nats: NatsServer) -> None:
    async with connected(own_nats.url) as bus:
        asked = asyncio.Queue[None]()

        async def silent(message: Message) -> None:
            asked.put_nowait(None)

        await bus.subscribe("silent", silent)
        request = asyncio.create_task(bus.request("silent", b"", timeout_s=60.0))
        async with bus.stream("silent", b"", idle_timeout_s=60.0) as answers:
            for _ in range(2):
                await asyncio.wait_for(asked.get(), DEADLINE_S)
            own_nats.kill()
            with pytest.raises(BusDown):
                await asyncio.wait_for(request, DEADLINE_S)
            with pytest.raises(BusDown):
                await asyncio.wait_for(anext(answers), DEADLINE_S)


async def test_a_bus_connects_to_a_server_that_starts_later(tmp_path: Path) -> None:
    server = NatsServer(tmp_path)
    with logged("waiting for NATS", "shared.rate_limited_log") as waiting:
        connecting = asyncio.create_task(connect(NatsConfig(url=server.url), "early"))
        await asyncio.wait_for(waiting.wait(), DEADLINE_S)
    await asyncio.to_thread(server.start)
    try:
        bus = await asyncio.wait_for(connecting, DEADLINE_S)
        with pytest.raises(NoResponders):
            await bus.request("nobody", b"", timeout_s=DEADLINE_S)
        await bus.drain()
    finally:
        server.kill()


async def test_giving_up_before_there_is_a_server_leaves_nothing_behind(tmp_path: Path) -> None:
    connecting = asyncio.create_task(connect(NatsConfig(url=NatsServer(tmp_path).url), "early"))
    await asyncio.sleep(0)
    connecting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await connecting
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_refused_password_is_said_loudly_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def users(password: str) -> str:
        return f'authorization {{ users = [{{ user: "service", password: "{password}" }}] }}\n'

    server = NatsServer(tmp_path, users("old"))
    server.start()
    try:
        secret = secrets.token_hex(8)
        config = NatsConfig(url=server.url, user="service", password=secret)
        with logged("refuses user 'service'", "shared.rate_limited_log") as refused:
            why: list[str] = []
            connecting = asyncio.create_task(connect(config, "test", why.append))
            await asyncio.wait_for(refused.wait(), DEADLINE_S)
        assert any(record.levelno == logging.ERROR for record in caplog.records)
        assert re.search("refuses user 'service' .*Authorization Violation.*HEADRACE_NATS_PASSWORD", why[0])
        server.reload(users(secret))
        bus = await asyncio.wait_for(connecting, DEADLINE_S)
        assert secret not in caplog.text
        server.reload(users("other"))
        await wait_lost(bus)
        server.reload(users(secret))
        await wait_back(bus)
        await bus.drain()
    finally:
        server.kill()


async def test_what_a_user_may_not_do_is_said_and_the_rest_goes_on(tmp_path: Path) -> None:
    settings = (
        'authorization { users = [{ user: "u", password: "p", permissions: { publish: ["allowed", "_INBOX.>"] } }] }'
    )
    with nats_server(tmp_path, settings) as server:
        async with connected(server.url, "u", "p") as bus:
            heard: asyncio.Queue[bytes] = asyncio.Queue()

            async def receive(message: Message) -> None:
                heard.put_nowait(message.payload)

            await bus.subscribe("allowed", receive)
            with logged("permissions violation", "shared.rate_limited_log") as said:
                await bus.publish("forbidden", b"")
                await asyncio.wait_for(said.wait(), DEADLINE_S)
            await bus.publish("allowed", b"heard")
            assert await asyncio.wait_for(heard.get(), DEADLINE_S) == b"heard"


async def test_a_publisher_to_a_frozen_server_gets_bus_down_rather_than_memory_without_end(
    own_nats: NatsServer,
) -> None:
    async with connected(own_nats.url) as bus:
        own_nats.freeze()
        with pytest.raises(BusDown):
            await publish_bytes(bus, 64 << 20)
        own_nats.thaw()


async def test_a_cancelled_request_is_cancelled(own_nats: NatsServer) -> None:
    async with connected(own_nats.url) as bus:
        own_nats.freeze()
        request = asyncio.create_task(bus.request("anything", b"", timeout_s=60.0))
        await asyncio.sleep(0)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        own_nats.thaw()


@pytest.mark.parametrize("url", ["", "127.0.0.1:4222", "nats://", "nats://host:port", "http://host:1"])
async def test_a_malformed_url_is_a_config_error(url: str) -> None:
    with pytest.raises(ConfigError):
        await connect(NatsConfig(url=url), "test")


async def test_a_password_in_the_url_is_not_shown() -> None:
    with pytest.raises(ConfigError) as wrong:
        await connect(NatsConfig(url="http://user:secret@host:1"), "test")
    assert "secret" not in str(wrong.value)


def test_the_bus_runs_on_uvloop_as_services_do(tmp_path: Path) -> None:
    async def asked(url: str) -> list[int]:
        async with connected(url) as bus:

            async def echo(message: Message) -> None:
                await bus.publish(message.reply, message.payload)

            await bus.subscribe("echo", echo)
            answers = [await bus.request("echo", bytes(size), timeout_s=DEADLINE_S) for size in (0, 10, 1 << 21)]
            return [len(answer.payload) for answer in answers]

    with nats_server(tmp_path) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(asked(server.url)) == [0, 10, 1 << 21]


def stop_reading(bus: NatsBus, _server: NatsServer) -> None:
    assert bus._client is not None
    assert bus._client._reading_task is not None
    bus._client._reading_task.cancel()


def kill_and_start(_bus: NatsBus, server: NatsServer) -> None:
    server.kill()
    server.start()


@pytest.mark.parametrize("lose", [stop_reading, kill_and_start])
def test_a_connection_that_is_lost_with_much_unsent_is_replaced_on_uvloop(
    tmp_path: Path, lose: Callable[[NatsBus, NatsServer], None]
) -> None:
    """uvloop, unlike asyncio, raises where something is written to a socket that was closed."""
    wrong: list[object] = []

    async def lost(server: NatsServer) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, told: wrong.append(told))
        async with connected(server.url) as bus:
            server.freeze()
            with pytest.raises(BusDown):
                await publish_bytes(bus, 64 << 20)
            before = bus.connections
            lose(bus, server)
            async with asyncio.timeout(DEADLINE_S):
                while bus.connected:  # noqa: ASYNC110 - the bus has no event for it
                    await asyncio.sleep(0.01)
                server.thaw()
                while bus.connections == before:  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.01)
            await bus.confirm(bus.connections)
        gc.collect()

    with nats_server(tmp_path) as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(lost(server))
    assert not wrong


UNREADABLE = [
    b"HPUB chat 1 4\r\nxabc\r\n",
    b"HPUB chat 8 11\r\nNATS/1.0abc\r\n",
    b"HPUB chat 18 21\r\nNATS/1.0 503 \xff\r\n\r\nabc\r\n",
    b"PUB chat.\xff 3\r\nabc\r\n",
    b"PUB chat _INBOX.\xff 3\r\nabc\r\n",
]


@pytest.mark.parametrize("unreadable", UNREADABLE)
async def test_a_message_that_cannot_be_read_is_dropped_and_the_next_one_heard(
    own_nats: NatsServer, unreadable: bytes
) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def receive(message: Message) -> None:
        heard.put_nowait(message.payload)

    async with connected(own_nats.url) as bus:
        await bus.subscribe("chat.>", receive)
        await bus.subscribe("chat", receive)
        host, _, port = own_nats.url.removeprefix("nats://").partition(":")
        _reader, writer = await asyncio.open_connection(host, int(port))
        with logged("dropped a message", "shared.rate_limited_log") as dropped:
            writer.write(b'CONNECT {"verbose": false, "headers": true, "no_responders": true}\r\n')
            writer.write(unreadable + b"PUB chat 4\r\nnext\r\n")
            async with asyncio.timeout(DEADLINE_S):
                assert await heard.get() == b"next"
                await dropped.wait()
        assert bus.malformed >= 1
        writer.close()
        await writer.wait_closed()


async def test_a_server_that_does_not_speak_nats_is_left_and_tried_again(tmp_path: Path) -> None:
    async def nonsense(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"220 mail.example.org ESMTP\r\n")
        await writer.drain()
        writer.close()

    server = NatsServer(tmp_path)
    host, _, port = server.url.removeprefix("nats://").partition(":")
    listening = await asyncio.start_server(nonsense, host, int(port))
    with logged("waiting for NATS", "shared.rate_limited_log") as said:
        connecting = asyncio.create_task(connect(NatsConfig(url=server.url), "test"))
        async with asyncio.timeout(DEADLINE_S):
            await said.wait()
    listening.close()
    await listening.wait_closed()
    await asyncio.to_thread(server.start)
    try:
        bus = await asyncio.wait_for(connecting, DEADLINE_S)
        await bus.drain()
    finally:
        server.kill()


async def test_a_connection_that_reads_no_more_is_replaced(own_nats: NatsServer) -> None:
    async with connected(own_nats.url) as bus:
        client = bus._client
        assert client is not None
        assert client._reading_task is not None
        with logged("lost the connection", "shared.bus.nats_bus") as lost:
            client._reading_task.cancel()
            async with asyncio.timeout(DEADLINE_S):
                await lost.wait()
        await wait_back(bus)
        assert client.is_closed
        with pytest.raises(NoResponders):
            await bus.request("nobody", b"", timeout_s=DEADLINE_S)


async def test_what_was_published_is_not_confirmed_by_a_connection_that_reads_no_more(own_nats: NatsServer) -> None:
    async with connected(own_nats.url) as bus:
        client = bus._client
        assert client is not None
        assert client._reading_task is not None
        client._reading_task.cancel()
        await asyncio.wait([client._reading_task])
        with pytest.raises(BusDown):
            await bus.confirm(bus.connections)


async def test_many_small_messages_that_come_at_once_leave_turns_for_others(own_nats: NatsServer) -> None:
    heard = 0

    async def receive(_message: Message) -> None:
        nonlocal heard
        heard += 1

    async with connected(own_nats.url) as bus:
        subscription = await bus.subscribe("small", receive)
        client, remote = bus._client, subscription._remote
        assert client is not None
        assert remote is not None
        turns = 0
        reading = asyncio.create_task(client._ps.parse(b"MSG small %d 1\r\na\r\n" % remote._id * (8 * FAIR_SHARE)))
        while not reading.done():
            await asyncio.sleep(0)
            turns += 1
        await subscription.unsubscribe()
    assert heard == 8 * FAIR_SHARE
    assert turns >= 8


async def test_what_goes_by_the_socket_and_by_nats_py_keeps_its_order(own_nats: NatsServer) -> None:
    """Messages with headers are nats-py's, and all that the socket does not take at once."""
    heard: list[int] = []

    async def receive(message: Message) -> None:
        heard.append(int(message.payload[:8]))

    async with connected(own_nats.url) as bus, connected(own_nats.url) as other:
        await other.subscribe("numbered", receive)
        unsent = False
        for number in range(400):
            headers = {"a": "b"} if number % 7 == 3 else None
            await bus.publish("numbered", b"%08d" % number + bytes(64 << 10 if number % 5 else 0), headers=headers)
            unsent = unsent or (bus._client is not None and bus._client.pending_data_size > 0)
        assert unsent
        await bus.confirm(bus.connections)
        async with asyncio.timeout(DEADLINE_S):
            while len(heard) < 400:
                await other.confirm(other.connections)
                await asyncio.sleep(0)
        assert heard == list(range(400))


async def test_the_longest_subject_with_an_answer_to_it_leaves_the_connection_standing(own_nats: NatsServer) -> None:
    gone = asyncio.Event()
    async with connected(own_nats.url) as bus:
        subject = "a" * subjects.LIMIT_BYTES
        await bus.publish(subject, bytes(1 << 16), headers={"Content-Type": "application/json"}, no_responders=gone.set)
        async with asyncio.timeout(DEADLINE_S):
            await gone.wait()
        with pytest.raises(ProtocolError):
            await bus.publish(subject + "a", b"")


async def test_a_task_that_waits_for_the_end_of_the_bus_returns_when_it_is_closed(own_nats: NatsServer) -> None:
    async with connected(own_nats.url) as bus:
        kept = asyncio.create_task(bus.wait_closed())
        await bus.publish("subject", b"")
        assert not kept.done()
    await kept


async def test_over_tls_a_server_is_believed_whose_certificate_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificates = Path(__file__).parents[2] / "frontend" / "certificates"
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "one.pem"))
    server = NatsServer(
        tmp_path, f'tls {{ cert_file: "{certificates / "one.pem"}", key_file: "{certificates / "one.key"}" }}\n'
    )
    server.start()
    try:
        async with asyncio.timeout(DEADLINE_S), connected(f"tls://localhost:{server.port}") as bus:
            came: asyncio.Queue[Message] = asyncio.Queue()

            async def receive(message: Message) -> None:
                came.put_nowait(message)

            await bus.subscribe("large", receive)
            await bus.publish("large", bytes(3 << 20))
            assert len((await came.get()).payload) == 3 << 20
    finally:
        server.stop()


async def test_a_bus_ends_at_whatever_step_of_its_connecting_it_is(nats_url: str) -> None:
    for turns in range(60):
        bus = NatsBus(NatsConfig(url=nats_url), "test")
        for _ in range(turns // 4):
            await asyncio.sleep(0.0005 * (turns % 4))
        async with asyncio.timeout(DEADLINE_S):
            await bus.drain()
            await bus.wait_closed()
