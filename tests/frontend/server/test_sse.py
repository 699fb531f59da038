"""Streamed bodies on the wire, and clients that do not read them."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import uvloop
from aiohttp import web
from prometheus_client import CollectorRegistry

from services.frontend.config import HttpConfig, LimitsConfig
from services.frontend.metrics import Metrics
from services.frontend.server import sse
from services.frontend.server.port import UNSENT_BYTES, Port
from services.frontend.server.sse import CHUNK_BYTES, HEADERS_S, ResponseBody
from shared.hashing import pack_tokens
from shared.messages.frames import NOT_FINITE, TokenLogprob
from shared.messages.generate import Refused
from tests.frontend.peers import CONTEXT, DEADLINE_S, MODEL, World, clients, world
from tests.servers import free_port

BODY = json.dumps({"model": MODEL, "prompt": "x", "stream": True, "max_tokens": CONTEXT - 100}).encode()
HELLO = [{"role": "user", "content": "hello"}]
MANY = CONTEXT - 200
LARGE = {"model": MODEL, "prompt": "x", "stream": True, "max_tokens": CONTEXT - 100, "logprobs": 5}
"""A request whose log-probabilities for MANY tokens are several megabytes."""


def post(body: bytes, version: str = "1.1", path: str = "completions") -> bytes:
    head = f"POST /v1/{path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


@asynccontextmanager
async def connected(w: World) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client that reads as slowly as the test does."""
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        url = urlsplit(w.url)
        await asyncio.get_running_loop().sock_connect(client, (url.hostname, url.port))
        reader, writer = await asyncio.open_connection(sock=client, limit=4096)
        try:
            async with asyncio.timeout(DEADLINE_S):
                yield reader, writer
        finally:
            writer.close()


async def head(reader: asyncio.StreamReader) -> str:
    return (await reader.readuntil(b"\r\n\r\n")).decode().lower()


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Yield the chunks of the body up to its end."""
    while size := int(await reader.readuntil(b"\r\n"), 16):
        yield await reader.readexactly(size)
        assert await reader.readexactly(2) == b"\r\n"
    assert await reader.readexactly(2) == b"\r\n"


def texts(events: bytes) -> list[str]:
    """Return the text of each event of a completion."""
    *shown, done, rest = (event for event in events.decode().split("\n\n") if not event.startswith(":"))
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in shown]


async def test_every_part_is_a_chunk_and_so_is_the_end_and_the_connection_serves_on(directory: Path) -> None:
    async with world(directory) as w, connected(w) as (reader, writer):
        worker = w.workers[0]
        worker.output = None
        for number in (1, 2):
            writer.write(post(BODY))
            generate = (await worker.generates.at_least(number))[-1]
            got, body = [], chunks(reader)
            for at, token in enumerate(token for letter in "abcd" for token in w.ids(letter)):
                await worker.send(generate, at, [token])
                if at == 0:
                    assert "transfer-encoding: chunked" in await head(reader)
                got.append(await anext(body))
            await worker.send(generate, 4, [2], "stop")
            got += [chunk async for chunk in body]
            assert texts(b"".join(got)) == ["a", "b", "c", "d", ""]
            assert len(got) == 5


async def test_a_client_of_http_1_0_gets_events_without_chunks_and_then_the_end(directory: Path) -> None:
    async with world(directory) as w, connected(w) as (reader, writer):
        w.say("abc")
        writer.write(post(BODY, "1.0"))
        assert "transfer-encoding" not in await head(reader)
        assert "".join(texts(await reader.read())) == "abc"


async def test_what_a_client_left_unread_comes_in_order_and_in_fewer_chunks(directory: Path) -> None:
    async with world(directory) as w, connected(w) as (reader, writer):
        said = stream_much(w)
        writer.write(post(json.dumps(LARGE).encode()))
        assert await others_are_served(w) == "others"
        assert w.metric("headrace_inflight_requests") == 1
        await head(reader)
        got = [chunk async for chunk in chunks(reader)]
        assert len(got) < MANY / 2
        assert "".join(texts(b"".join(got))) == said


async def test_a_client_that_does_not_read_is_ended_and_others_are_not(directory: Path) -> None:
    async with world(directory, http=HttpConfig(unread_s=0.2)) as w, connected(w) as (_, writer):
        stream_much(w)
        writer.write(post(json.dumps(LARGE).encode()))
        assert await others_are_served(w) == "others"
        await w.counted("headrace_disconnected_clients_total", 1)
        assert w.metric("headrace_inflight_requests") == 0


WHOLE = json.dumps(
    {
        "model": MODEL,
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": CONTEXT - 100,
        "logprobs": True,
        "top_logprobs": 20,
    }
).encode()


async def test_a_client_that_does_not_read_a_large_whole_answer_is_ended_too_and_fills_no_log(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with world(directory, http=HttpConfig(unread_s=0.2)) as w, connected(w) as (_, writer):
        stream_much(w)
        writer.write(post(WHOLE, path="chat/completions"))
        await w.counted("headrace_disconnected_clients_total", 1)
        await w.counted("headrace_open_connections", 1)  # that of who asks for it
        assert w.metric("headrace_inflight_requests") == 0
        assert not [record for record in caplog.records if record.exc_info]


async def test_a_client_that_reads_a_large_whole_answer_slowly_gets_all_of_it_and_keeps_its_place_for_so_long(
    directory: Path,
) -> None:
    async with world(directory, http=HttpConfig(unread_s=5.0)) as w, connected(w) as (reader, writer):
        said = stream_much(w)
        for _ in range(2):  # and its connection serves on
            writer.write(post(WHOLE, path="chat/completions"))
            shown = await head(reader)
            length = int(re.findall(r"content-length: (\d+)", shown)[0])
            assert length > 4 * CHUNK_BYTES
            assert "content-type: application/json" in shown
            assert w.metric("headrace_inflight_requests") == 1
            assert json.loads(await reader.readexactly(length))["choices"][0]["message"]["content"] == said
            await w.counted("headrace_inflight_requests", 0)


async def test_a_large_last_event_is_cut_like_any_other_and_none_says_done(directory: Path) -> None:
    include = {"include": ["message.output_text.logprobs"], "top_logprobs": 20}
    asked = {"model": MODEL, "input": "x", "stream": True, "max_output_tokens": CONTEXT - 100, **include}
    async with world(directory) as w, connected(w) as (reader, writer):
        said = stream_much(w)
        writer.write(post(json.dumps(asked).encode(), path="responses"))
        await head(reader)
        pieces = [piece async for piece in chunks(reader)]
        assert max(map(len, pieces)) == CHUNK_BYTES
        last = b"".join(pieces).decode().split("\n\n")[-2]
        name, _, content = last.partition("\ndata: ")
        assert name == "event: response.incomplete"
        assert json.loads(content)["response"]["output"][0]["content"][0]["text"] == said


DOORS: dict[str, tuple[str, dict[str, Any], bytes]] = {
    "chat": ("/v1/chat/completions", {"messages": HELLO}, b": waiting\n\n"),
    "completions": ("/v1/completions", {"prompt": "x"}, b": waiting\n\n"),
    "responses": ("/v1/responses", {"input": "x"}, b": waiting\n\n"),
    "messages": ("/v1/messages", {"messages": HELLO, "max_tokens": 9}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    "ollama_chat": ("/api/chat", {"messages": HELLO}, b'"message":{"role":"assistant","content":""},"done":false}\n'),
    "ollama_generate": ("/api/generate", {"prompt": "x", "raw": True}, b'"response":"","done":false}\n'),
}
"""For each door of streams its path, a body without model and `stream`, and the end of what it sends in a silence."""


@pytest.mark.parametrize("door", DOORS)
async def test_a_stream_without_a_token_and_one_that_pauses_are_never_silent_for_long(
    directory: Path, door: str
) -> None:
    path, asked, sign = DOORS[door]
    async with world(directory, http=HttpConfig(silent_s=0.02)) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        async with http.post(path, json={"model": MODEL, "stream": True, **asked}) as response:
            assert response.status == 200
            body = b""
            while body.count(sign) < 2:  # no token has come
                body += await response.content.readany()
            [generate] = await worker.generates.at_least(1)
            await worker.send(generate, 0, w.ids("a"))
            begun = len(body)
            while b'"a"' not in body[begun:] or body[begun:].count(sign) < 3:
                body += await response.content.readany()
            await worker.send(generate, 1, [*w.ids("b"), 2], "stop")
            body += await response.read()
        events = body.decode().replace(": waiting\n\n", "").split("\n" if door.startswith("ollama") else "\n\n")
        told = [json.loads(event[event.find("{") :]) for event in events if "{" in event]
        assert text_of(told) == "ab"
        if door == "responses":
            assert [event["sequence_number"] for event in told] == list(range(len(told)))
            assert told[0]["type"] == "response.created"
        if door == "messages":
            assert next(event["type"] for event in told if event["type"] != "ping") == "message_start"


def text_of(told: list[dict[str, Any]]) -> str:
    """Join the texts of a stream's events, of whatever API."""
    found = []
    for event in told:
        choice = (event.get("choices") or [{}])[0]
        delta = event.get("delta", "")
        parts = [choice.get("text"), choice.get("delta", {}).get("content"), event.get("response")]
        parts += [event.get("message", {}).get("content"), delta.get("text") if isinstance(delta, dict) else delta]
        found += [part for part in parts if isinstance(part, str)]
    return "".join(found)


@pytest.mark.parametrize("door", DOORS)
async def test_an_error_after_the_headers_is_an_event_of_the_doors_api(directory: Path, door: str) -> None:
    path, asked, sign = DOORS[door]
    async with world(directory, http=HttpConfig(silent_s=0.02)) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        async with http.post(path, json={"model": MODEL, "stream": True, **asked}) as response:
            body = b""
            while sign not in body:
                body += await response.content.readany()
            [generate] = await worker.generates.at_least(1)
            await worker.send(generate, 0, [], "error", f"{NOT_FINITE}: burned down")
            body += await response.read()
        last = body.decode().rstrip("\n").rpartition("\n")[2]
        shown = json.loads(last[last.find("{") :])
        error = shown["response"]["error"] if door == "responses" else shown["error"]
        assert "burned down" in (error if isinstance(error, str) else error["message"])
        assert w.metric("headrace_requests_total", operation=door, status="500") == 1


async def test_an_error_that_comes_soon_is_a_status_also_for_a_stream(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sse, "HEADERS_S", DEADLINE_S)
    async with world(directory, http=HttpConfig(silent_s=DEADLINE_S)) as w, clients(w) as (_, http):
        for worker in w.workers:
            worker.answer = lambda one: Refused(one.request, one.attempt, "overloaded", "full")
        for path, asked, _ in DOORS.values():
            async with http.post(path, json={"model": MODEL, "stream": True, **asked}) as response:
                assert response.status == 503
                assert int(response.headers["Retry-After"]) >= 1


async def test_without_a_limit_of_silence_headers_wait_for_the_text(directory: Path) -> None:
    limits = LimitsConfig(deadline_s=HEADERS_S + 0.6, drain_s=0.0)
    for silent_s, status in ((0.0, 504), (5.0, 200)):
        async with world(directory, http=HttpConfig(silent_s=silent_s), limits=limits) as w, clients(w) as (_, http):
            w.workers[0].output = None
            async with http.post("/v1/completions", json={"model": MODEL, "prompt": "x", "stream": True}) as response:
                assert response.status == status
                assert "deadline" in await response.text()


async def test_a_client_of_http_1_0_gets_comments_without_chunks(directory: Path) -> None:
    async with world(directory, http=HttpConfig(silent_s=0.02)) as w, connected(w) as (reader, writer):
        w.workers[0].output = None
        writer.write(post(BODY, "1.0"))
        assert "transfer-encoding" not in await head(reader)
        assert await reader.readexactly(22) == b": waiting\n\n: waiting\n\n"


async def test_a_client_that_leaves_in_a_silence_cancels_its_request(directory: Path) -> None:
    async with world(directory, http=HttpConfig(silent_s=0.02)) as w:
        w.workers[0].output = None
        async with connected(w) as (reader, writer):
            writer.write(post(BODY))
            await head(reader)
            await w.workers[0].generates.at_least(1)
        await w.workers[0].cancels.at_least(1)
        await w.counted("headrace_inflight_requests", 0)


async def test_the_further_choices_of_a_silent_prompt_wait_with_comments_too(directory: Path) -> None:
    async with world(directory, http=HttpConfig(silent_s=0.02)) as w, clients(w) as (_, http):
        worker = w.workers[0]
        worker.output = None
        asked = {"model": MODEL, "prompt": "x", "stream": True, "n": 2}
        async with http.post("/v1/completions", json=asked) as response:
            await response.content.readuntil(b": waiting\n\n")
            [first] = await worker.generates.at_least(1)
            await worker.send(first, 0, [*w.ids("a"), 2], "stop")
            _, second = await worker.generates.at_least(2)
            await response.content.readuntil(b"stop")
            await response.content.readuntil(b": waiting\n\n")
            await worker.send(second, 0, [*w.ids("b"), 2], "stop")
            assert (await response.text()).endswith("data: [DONE]\n\n")


def stream_much(w: World) -> str:
    """Make the workers answer with a long text; return it."""
    tokens = w.ids("the water finds the wheel ")
    output = (tokens * MANY)[:MANY]
    for worker in w.workers:
        worker.output = output
        worker.logprobs = [TokenLogprob(-1.0, pack_tokens([0] * 20), (-1.2345678901234567,) * 20)] * MANY
        worker.finish = "length"
    return w.tokenizer.decode(output)


async def others_are_served(w: World) -> str:
    """Return the answer to another client once the workers have sent the long text."""
    await w.workers[0].generates.at_least(1)
    w.say("others")
    async with connected(w) as (reader, writer):
        writer.write(post(BODY))
        await head(reader)
        return "".join(texts(b"".join([chunk async for chunk in chunks(reader)])))


@pytest.mark.parametrize("new_loop", [uvloop.new_event_loop, asyncio.new_event_loop])
def test_no_chunk_waits_for_the_clients_acknowledgement(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Nagle's algorithm would hold chunks back for 40 ms. The kernel accepts no more than it can send."""
    options = {}

    async def answer(request: web.Request) -> web.StreamResponse:
        body = ResponseBody(request, {}, unread_s=DEADLINE_S)
        await body.write(b"first")
        assert body.try_send(b"second")
        connection = request.get_extra_info("socket")
        for option in (socket.TCP_NODELAY, socket.TCP_NOTSENT_LOWAT):
            options[option] = connection.getsockopt(socket.IPPROTO_TCP, option)
        return await body.end(b"third")

    async def ask() -> bytes:
        app = web.Application()
        app.router.add_get("/", answer)
        port = Port(HttpConfig(port=free_port()), Metrics(CollectorRegistry()))
        async with port.open(app) as url, aiohttp.ClientSession() as client, client.get(url) as response:
            return await response.read()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        assert runner.run(ask()) == b"data: first\n\ndata: second\n\ndata: third\n\n"
    assert options == {socket.TCP_NODELAY: 1, socket.TCP_NOTSENT_LOWAT: UNSENT_BYTES}
