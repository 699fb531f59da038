"""deploy/compose/nats.conf on a real server: what a client's user may do, and what not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.aio.msg import Msg

from deploy.local.stack.servers import nats_settings
from services.frontend.protocol.operations import OPERATIONS
from shared import subjects
from shared.bus.nats_connection import sync
from tests.servers import NatsServer, nats_server

CONF = Path(__file__).resolve().parents[2] / "deploy" / "compose" / "nats.conf"
ANSWER_LIMIT_S = 60.0
CHAT = subjects.client("default", "chat")


def rules() -> str:
    """What follows the server's own settings."""
    text = CONF.read_text(encoding="utf-8")
    return text[text.index("authorization") :]


def with_users_of_their_own() -> str:
    """The rules with the user that their comment shows, and the same one under another name."""
    passwords = {"$SERVICES_PASSWORD": '"12e4"', "$CLIENT_PASSWORD": '"0042"', "$ALICE_PASSWORD": "secret"}
    text = rules()
    for name, password in passwords.items():
        text = text.replace(name, password)
    lines = text.splitlines()
    at = next(number for number, line in enumerate(lines) if "{ user: alice" in line)
    end = next(number for number in range(at, len(lines)) if lines[number] == "    #   }")
    alice = "\n".join(line.replace("#", "", 1) for line in lines[at : end + 1])
    return "\n".join([*lines[:at], alice, alice.replace("alice", "bob"), *lines[end + 1 :]])


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NatsServer]:
    # As compose.yaml gives them: in quotes, so that one that looks like a number stays text.
    monkeypatch.setenv("SERVICES_PASSWORD", '"12e4"')
    monkeypatch.setenv("CLIENT_PASSWORD", '"0042"')
    text = CONF.read_text(encoding="utf-8")
    local = nats_settings(4222).splitlines()[1:]
    assert {line.partition("#")[0].strip() for line in text.splitlines()} >= set(local)
    with nats_server(tmp_path, rules()) as running:
        yield running


class Peer:
    """A connection that notes what the server denies it."""

    def __init__(self) -> None:
        self.denied: asyncio.Queue[str] = asyncio.Queue()
        self.client = Client()

    async def connect(self, server: NatsServer, user: str, password: str, inbox: str) -> None:
        await self.client.connect(
            server.url, user=user, password=password, inbox_prefix=inbox.encode(), error_cb=self._note
        )

    async def _note(self, wrong: Exception) -> None:
        self.denied.put_nowait(str(wrong))

    async def next_denial(self) -> str:
        return await asyncio.wait_for(self.denied.get(), ANSWER_LIMIT_S)


@pytest.fixture
async def services(server: NatsServer) -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.connect(server, "services", "12e4", "_INBOX_services")
    yield peer
    await peer.client.close()


@pytest.fixture
async def client(server: NatsServer) -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.connect(server, "client", "0042", "_INBOX")
    yield peer
    await peer.client.close()


@pytest.mark.parametrize("operation", [*OPERATIONS, "models"])
async def test_a_client_asks_the_frontend_and_hears_the_answer(services: Peer, client: Peer, operation: str) -> None:
    async def answer(message: Msg) -> None:
        await message.respond(b"answer")

    await services.client.subscribe(subjects.client("default", operation), queue="frontend", cb=answer)
    await sync(services.client)
    reply = await client.client.request(subjects.client("default", operation), b"{}", timeout=ANSWER_LIMIT_S)
    assert reply.data == b"answer"


@pytest.mark.parametrize(
    "subject",
    [
        subjects.stream("default", "a1"),
        subjects.response_store("default", "a1"),
        subjects.control("default", "frontend", "a1"),
        subjects.worker("default", "b2", "generate"),
        subjects.worker("default", "b2", "cancel"),
        subjects.worker("default", "b2", "load"),
        subjects.router_load("default", "model"),
        subjects.select("default", "model"),
        subjects.kvbm("default", "c3", "fetch"),
        subjects.kvbm("default", "c3", "load"),
        "_INBOX_services.forged",
    ],
)
async def test_a_client_may_publish_to_nothing_else(services: Peer, client: Peer, subject: str) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def hear(message: Msg) -> None:
        heard.put_nowait(message.data)

    await services.client.subscribe(subject, cb=hear)
    await sync(services.client)
    await client.client.publish(subject, b"forged")
    assert "permissions violation for publish" in (await client.next_denial()).lower()
    await services.client.publish(subject, b"own")
    assert await asyncio.wait_for(heard.get(), ANSWER_LIMIT_S) == b"own", "the forged message did not come through"


@pytest.mark.parametrize(
    "operation", ["attach", "store", "commit", "abort", "fetch", "release", "discard", "snapshot", "stat"]
)
async def test_services_ask_a_block_store_and_hear_its_answers_and_reports(services: Peer, operation: str) -> None:
    heard: asyncio.Queue[bytes] = asyncio.Queue()

    async def answer(message: Msg) -> None:
        await message.respond(b"answer")

    async def hear(message: Msg) -> None:
        heard.put_nowait(message.data)

    await services.client.subscribe(subjects.kvbm("default", "c3", operation), cb=answer)
    await services.client.subscribe(subjects.kvbm("default", "*", "load"), cb=hear)
    reply = await services.client.request(subjects.kvbm("default", "c3", operation), b"", timeout=ANSWER_LIMIT_S)
    assert reply.data == b"answer"
    await services.client.publish(subjects.kvbm("default", "c3", "load"), b"report")
    assert await asyncio.wait_for(heard.get(), ANSWER_LIMIT_S) == b"report"


async def test_clients_with_an_inbox_each_are_answered_there_and_kept_apart(tmp_path: Path) -> None:
    server = NatsServer(tmp_path, with_users_of_their_own())
    server.start()
    peers = {name: Peer() for name in ("services", "alice", "bob")}
    try:
        services, alice, bob = peers.values()
        await services.connect(server, "services", "12e4", "_INBOX_services")
        for name in ("alice", "bob"):
            await peers[name].connect(server, name, "secret", f"_INBOX_clients.{name}")

        async def answer(message: Msg) -> None:
            await message.respond(b"answer to " + message.data)

        await services.client.subscribe(CHAT, queue="frontend", cb=answer)
        await sync(services.client)
        for name in ("alice", "bob"):
            reply = await peers[name].client.request(CHAT, name.encode(), timeout=ANSWER_LIMIT_S)
            assert reply.data == f"answer to {name}".encode()
        inbox = alice.client.new_inbox()
        assert inbox.startswith("_INBOX_clients.alice.")
        for subject in (inbox, "_INBOX_clients.alice.>", "_INBOX_clients.>", "_INBOX.>"):
            await bob.client.subscribe(subject)
            assert "permissions violation for subscription" in (await bob.next_denial()).lower()
        await bob.client.publish(inbox, b"forged")
        assert "permissions violation for publish" in (await bob.next_denial()).lower()
        assert services.denied.empty()
    finally:
        for peer in peers.values():
            if peer.client.is_connected:
                await peer.client.close()
        server.kill()


@pytest.mark.parametrize("subject", ["headrace.>", "_INBOX_services.>", ">", subjects.stream("default", "a1")])
async def test_a_client_hears_nothing_but_its_inbox(client: Peer, subject: str) -> None:
    await client.client.subscribe(subject)
    assert "permissions violation for subscription" in (await client.next_denial()).lower()


@pytest.mark.parametrize("reply", ["orders.new", "$JS.API.STREAM.DELETE.orders", "$JS.API.STREAM.CREATE.spy"])
async def test_the_services_publish_only_what_is_headraces_even_if_a_request_names_another_reply(
    services: Peer, reply: str
) -> None:
    await services.client.publish(reply, b"an answer")
    assert "permissions violation for publish" in (await services.next_denial()).lower()


@pytest.mark.parametrize(("user", "password"), [("services", "0042"), ("client", ""), ("", ""), ("nobody", "12e4")])
async def test_a_wrong_password_is_refused(server: NatsServer, user: str, password: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    try:
        assert (await reader.readline()).startswith(b"INFO ")
        writer.write(b"CONNECT " + json.dumps({"user": user, "pass": password}).encode() + b"\r\nPING\r\n")
        answer = await asyncio.wait_for(reader.readline(), ANSWER_LIMIT_S)
        assert answer == b"-ERR 'Authorization Violation'\r\n"
    finally:
        writer.close()
        await writer.wait_closed()
