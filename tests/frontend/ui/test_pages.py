"""Open pages: what runs while there is one, who is cut off, and how pages end."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from services.frontend.config import AccessConfig, FrontendConfig, UiConfig
from services.frontend.ui import pages, routes
from shared import subjects
from shared.api_keys import key_digest
from shared.bus.contract import Message
from shared.errors import BusDown
from shared.messages.codec import JSON_HEADER
from shared.messages.people import ROUTER_STATE, ModelState, RouterState, SourceState
from tests.frontend.peers import DEADLINE_S, NAMESPACE, Seen, World, instance_entry, world

REQUEST = b"GET /ui/events HTTP/1.1\r\nHost: localhost\r\n\r\n"


@asynccontextmanager
async def stream(w: World) -> AsyncIterator[aiohttp.ClientResponse]:
    async with asyncio.timeout(DEADLINE_S), aiohttp.ClientSession(w.url) as http, http.get("/ui/events") as answer:
        assert answer.status == 200
        yield answer


async def answering(w: World) -> Seen[str]:
    """Let the router answer with its state; return the questions that it got."""
    asked: Seen[str] = Seen()
    state = RouterState("r1", "kv", [ModelState("m", 2, 0, 0, 0)], [SourceState("w1", "live")])

    async def on_question(message: Message) -> None:
        asked.add(message.subject)
        await w.router.bus.publish(message.reply, ROUTER_STATE.encode(state, JSON_HEADER), headers=JSON_HEADER)

    await w.router.bus.subscribe(subjects.router_state(NAMESPACE, "r1"), on_question)
    return asked


async def test_nothing_is_asked_while_no_page_is_open_and_once_for_all_that_are(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "INTERVAL_S", 0.2)
    async with world(directory) as w:
        asked = await answering(w)
        async with stream(w) as first, stream(w) as second:
            for opened in (first, second):
                for _ in range(3):
                    await opened.content.readuntil(b"\n\n")
            questions = len(asked.all)
        assert questions < 20  # each page alone would have asked as often
        async with stream(w) as third:  # the snapshots begin again
            await third.content.readuntil(b"\n\n")
            await asked.at_least(questions + 1)


async def test_a_page_that_opens_later_gets_the_latest_snapshot_at_once(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "INTERVAL_S", 10 * DEADLINE_S)
    async with world(directory) as w, stream(w) as first:
        seen = await first.content.readuntil(b"\n\n")
        async with stream(w) as second:
            assert await second.content.readuntil(b"\n\n") == seen


async def test_a_page_that_does_not_read_is_cut_off_and_others_do_not_notice(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "INTERVAL_S", 0.005)
    monkeypatch.setattr(routes, "UNREAD_S", 0.5)
    crowd: dict[str, bytes] = {}
    for number in range(64):  # for a large snapshot
        crowd |= instance_entry("worker", f"{number:064}")
    async with world(directory, more=crowd) as w:
        await answering(w)
        with socket.socket() as frozen:
            frozen.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            frozen.setblocking(False)
            loop, url = asyncio.get_running_loop(), urlsplit(w.url)
            await loop.sock_connect(frozen, (url.hostname, url.port))
            await loop.sock_sendall(frozen, REQUEST)
            async with stream(w) as healthy:
                for open_connections in (2, 1):  # both, and then the one that reads
                    while w.metric("headrace_open_connections") != open_connections:
                        await healthy.content.readuntil(b"\n\n")
                await healthy.content.readuntil(b"\n\n")


async def test_pages_end_when_the_frontend_does(directory: Path) -> None:
    async with aiohttp.ClientSession() as http, asyncio.timeout(DEADLINE_S):
        async with world(directory) as w:
            answer = await http.get(f"{w.url}/ui/events")
            await answer.content.readuntil(b"\n\n")
        rest = await answer.content.read()
        assert rest.count(b"\n\n") <= 2
        assert answer.content.at_eof()


async def test_pages_end_with_a_line_in_the_log_if_snapshots_cannot_be_made(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory) as w, aiohttp.ClientSession(w.url) as http, asyncio.timeout(DEADLINE_S):
        for wrong in (BusDown("NATS is away"), ZeroDivisionError("a bug")):

            async def fail(*_given: object, why: Exception = wrong, **_named: object) -> None:
                raise why

            with monkeypatch.context() as broken:
                broken.setattr(w.bus, "subscribe", fail)
                async with http.get("/ui/events") as answer:
                    assert answer.status == 503
        async with http.get("/ui/events") as answer:
            assert answer.status == 200
    assert caplog.text.count("the pages at /ui are closed") == 2


async def test_a_key_may_have_half_of_the_pages(directory: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text("".join(f'{name} = {{ sha256 = "{key_digest(name).hex()}" }}\n' for name in ("alice", "bob")))
    access = AccessConfig(keys_file=str(file))
    settings = FrontendConfig(ui=UiConfig(serve="api", pages=4))
    async with (
        world(directory, access=access, settings=settings) as w,
        aiohttp.ClientSession(w.url) as http,
        asyncio.timeout(DEADLINE_S),
    ):

        async def opened(key: str) -> int:
            answers.append(await http.get("/ui/events", headers={"Authorization": f"Bearer {key}"}))
            return answers[-1].status

        answers: list[aiohttp.ClientResponse] = []
        assert [await opened("alice") for _ in range(4)] == [200, 200, 503, 503]
        assert [await opened("bob") for _ in range(3)] == [200, 200, 503]
        for answer in answers:
            answer.close()
