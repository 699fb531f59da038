"""The NATS door on a real nats-server that cuts off who does not take what clients send."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from openai import AsyncStream
from openai.types.chat import ChatCompletionChunk

from services.frontend.server.nats_api import FLAPPING_S, RECONNECTION_S, _Outages
from shared import subjects
from shared.bus.memory_bus import MemoryBroker, MemoryBus
from shared.bus.nats_bus import NatsBus
from shared.config import NatsConfig
from shared.messages.generate import Generate
from tests.chaos.proxy import Proxy
from tests.frontend.peers import MODEL, NAMESPACE, World, clients, world
from tests.servers import NatsServer, free_port, nats_server

DEADLINE_S = 120.0
CHAT = subjects.client(NAMESPACE, "chat")
FLOOD = 64
"""Requests of 1 MiB; the server keeps 8 MiB for a connection."""
FLAPS = 16
"""Times that a connection comes and goes, in some 5 s."""


@asynccontextmanager
async def connections(server: NatsServer) -> AsyncIterator[Callable[[str], NatsBus]]:
    """Makes connections to `server`, and closes them in the end."""
    opened: list[NatsBus] = []

    def connected(name: str) -> NatsBus:
        opened.append(NatsBus(NatsConfig(url=server.url), name))
        return opened[-1]

    try:
        yield connected
    finally:
        for bus in opened:
            await bus.drain()


def flood(server: NatsServer) -> None:
    """Sends it all, and returns when the server has it. The event loop stands meanwhile, so no connection reads."""
    request = f"PUB {CHAT} _INBOX.stranger {1 << 20}\r\n".encode() + bytes(1 << 20) + b"\r\n"
    with socket.create_connection(("127.0.0.1", server.port), DEADLINE_S) as client:
        client.sendall(b'CONNECT {"verbose": false}\r\n')
        for _ in range(FLOOD):
            client.sendall(request)
        client.sendall(b"PING\r\n")
        heard = b""
        while b"PONG\r\n" not in heard:
            heard += client.recv(4096)


HELLO = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}).encode()


class Buses:
    """Connections to one broker, by name, which can be lost and come back."""

    def __init__(self) -> None:
        self._broker = MemoryBroker()
        self._buses: dict[str, MemoryBus] = {}

    def connected(self, name: str) -> MemoryBus:
        return self._buses.setdefault(name, MemoryBus(self._broker, name))

    def disconnect(self, name: str) -> None:
        self._broker.disconnect(self._buses[name])

    def reconnect(self, name: str) -> None:
        self._broker.reconnect(self._buses[name])


async def test_a_frontend_that_is_cut_off_from_workers_says_so_to_its_clients(directory: Path) -> None:
    buses = Buses()
    async with world(directory, connected=buses.connected) as w:
        client = buses.connected("client")
        buses.disconnect("f1")
        refused = await client.request(CHAT, HELLO, timeout_s=DEADLINE_S)
        assert (refused.headers["Headrace-Status"], refused.headers["Headrace-Last"]) == ("503", "true")
        buses.reconnect("f1")
        w.say("next")
        answer = await client.request(CHAT, HELLO, timeout_s=DEADLINE_S)
        assert json.loads(answer.payload)["choices"][0]["message"]["content"] == "next"


async def test_a_request_that_comes_before_the_connection_to_the_workers_is_back_waits_for_it(
    directory: Path,
) -> None:
    buses = Buses()
    async with world(directory, connected=buses.connected) as w:
        w.say("late")
        client = buses.connected("client")
        buses.disconnect("f1")
        asking = asyncio.create_task(client.request(CHAT, HELLO, timeout_s=DEADLINE_S))
        for _ in range(100):  # until the frontend has it
            await asyncio.sleep(0)
        assert not asking.done()
        buses.reconnect("f1")
        answer = await asking
        assert json.loads(answer.payload)["choices"][0]["message"]["content"] == "late"


async def test_the_first_request_of_a_second_outage_waits_as_that_of_the_first_did(directory: Path) -> None:
    buses = Buses()
    async with world(directory, connected=buses.connected) as w:
        client = buses.connected("client")
        buses.disconnect("f1")
        refused = await client.request(CHAT, HELLO, timeout_s=DEADLINE_S)
        assert refused.headers["Headrace-Status"] == "503"
        buses.reconnect("f1")  # no request comes before the connection is lost again
        buses.disconnect("f1")
        w.say("late")
        asking = asyncio.create_task(client.request(CHAT, HELLO, timeout_s=DEADLINE_S))
        for _ in range(100):  # until the frontend has it
            await asyncio.sleep(0)
        assert not asking.done()
        buses.reconnect("f1")
        answer = await asking
        assert json.loads(answer.payload)["choices"][0]["message"]["content"] == "late"


async def test_while_the_connection_comes_and_goes_all_requests_end_and_once_it_stays_they_are_served(
    directory: Path,
) -> None:
    buses = Buses()
    stays = asyncio.Event()

    async def flap() -> None:
        while not stays.is_set():
            buses.reconnect("f1")  # for so short a time that no request sees it
            buses.disconnect("f1")
            await asyncio.sleep(0.005)
        buses.reconnect("f1")

    async with world(directory, connected=buses.connected) as w, asyncio.TaskGroup() as tasks:
        client = buses.connected("client")
        buses.disconnect("f1")
        flapping = tasks.create_task(flap())
        asked = [tasks.create_task(client.request(CHAT, HELLO, timeout_s=DEADLINE_S)) for _ in range(20)]
        for asking in asked:
            refused = await asking
            assert (refused.headers["Headrace-Status"], refused.headers["Headrace-Last"]) == ("503", "true")
            assert "lost its connection to the workers" in json.loads(refused.payload)["error"]["message"]
        stays.set()
        await flapping
        w.say("stable")
        answer = await client.request(CHAT, HELLO, timeout_s=DEADLINE_S)
        assert json.loads(answer.payload)["choices"][0]["message"]["content"] == "stable"


async def test_a_request_that_comes_while_the_connection_flaps_is_served_when_it_stays(directory: Path) -> None:
    buses = Buses()
    async with world(directory, connected=buses.connected) as w:
        w.say("late")
        client = buses.connected("client")
        buses.disconnect("f1")
        asking = asyncio.create_task(client.request(CHAT, HELLO, timeout_s=DEADLINE_S))
        for _ in range(20):
            await asyncio.sleep(0.005)
            buses.reconnect("f1")
            buses.disconnect("f1")
        assert not asking.done()
        buses.reconnect("f1")
        answer = await asking
        assert json.loads(answer.payload)["choices"][0]["message"]["content"] == "late"


async def test_a_nats_server_that_comes_and_goes_leaves_no_request_without_an_end(
    directory: Path, tmp_path: Path
) -> None:
    with nats_server(tmp_path) as server:
        port = free_port()
        proxy = Proxy(port, server.port)
        await proxy.mend()
        flapping = NatsBus(NatsConfig(url=f"nats://127.0.0.1:{port}"), "f1")
        async with connections(server) as connected:
            async with world(directory, connected=lambda name: flapping if name == "f1" else connected(name)) as w:
                w.say("said")
                await flapping.wait_connected()
                client = connected("client")
                await client.wait_connected()
                async with asyncio.TaskGroup() as tasks, asyncio.timeout(2 * DEADLINE_S):
                    await proxy.sever()
                    asked = [tasks.create_task(client.request(CHAT, HELLO, timeout_s=DEADLINE_S)) for _ in range(20)]
                    for _ in range(FLAPS):
                        before = flapping.connections
                        await proxy.mend()
                        while flapping.connections == before:  # noqa: ASYNC110 - nothing is called for it
                            await asyncio.sleep(0)
                        await proxy.sever()
                    await proxy.mend()
                for answer in [task.result() for task in asked]:
                    assert answer.headers["Headrace-Last"] == "true"
                    if answer.headers.get("Headrace-Status", "200") == "200":
                        assert json.loads(answer.payload)["choices"][0]["message"]["content"] == "said"
                    else:
                        assert answer.headers["Headrace-Status"] == "503"
                await flapping.wait_connected()
                answer = await client.request(CHAT, HELLO, timeout_s=DEADLINE_S)
                assert json.loads(answer.payload)["choices"][0]["message"]["content"] == "said"
            await flapping.drain()
        await proxy.sever()


def test_requests_wait_for_an_outage_again_once_none_was_missed_for_a_while() -> None:
    outages, now_s = _Outages(), 0.0
    while outages.allow_wait(connections := int(now_s), now_s):
        now_s += 0.5
    assert now_s == FLAPPING_S, "each outage lasts for a second"
    assert not outages.allow_wait(connections + 1, now_s + 1.0), "it has waited enough for these"
    assert outages.allow_wait(connections + 2, now_s + 1.0 + RECONNECTION_S)


async def begun(w: World, count: int) -> list[Generate]:
    """Wait until the worker has been asked for this many answers."""
    return await w.workers[0].generates.at_least(count)


async def text_of(chunks: AsyncStream[ChatCompletionChunk]) -> str:
    return "".join([choice.delta.content or "" async for chunk in chunks for choice in chunk.choices])


async def test_a_flood_of_requests_breaks_no_stream_that_runs(directory: Path, tmp_path: Path) -> None:
    asked = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    with nats_server(tmp_path, "max_pending: 8MB\n") as server:
        async with (
            connections(server) as connected,
            world(directory, connected=connected) as w,
            clients(w) as (openai, _),
        ):
            assert w.doors is not None
            w.workers[0].output = None
            over_http = asyncio.create_task(
                openai.chat.completions.create(
                    model=MODEL, messages=[{"role": "user", "content": "hello"}], stream=True
                )
            )
            await begun(w, 1)
            client = connected("client")
            await client.wait_connected()
            body = json.dumps({**asked, "stream": True}).encode()
            async with client.stream(CHAT, body, idle_timeout_s=DEADLINE_S) as messages:
                running = await begun(w, 2)
                for generate in running:
                    await w.workers[0].send(generate, 0, w.ids("before"))
                http_text = asyncio.create_task(text_of(await over_http))
                flood(server)
                async with asyncio.timeout(DEADLINE_S):
                    while w.doors.connections < 2:  # noqa: ASYNC110 - nothing is called for it
                        await asyncio.sleep(0.01)
                for generate in running:
                    await w.workers[0].send(generate, len(w.ids("before")), w.ids("after"), "length")
                nats_text = "".join(
                    [
                        choice["delta"].get("content") or ""
                        async for message in messages
                        for choice in json.loads(message.payload)["choices"]
                    ]
                )
            assert (nats_text, await asyncio.wait_for(http_text, DEADLINE_S)) == ("beforeafter", "beforeafter")
            assert w.serving.connections == 1
            w.say("next")
            answer = await client.request(CHAT, json.dumps(asked).encode(), timeout_s=DEADLINE_S)
            assert json.loads(answer.payload)["choices"][0]["message"]["content"] == "next"
