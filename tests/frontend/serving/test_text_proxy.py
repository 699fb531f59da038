"""Requests that pass through to servers that take text alone, over real sockets. The router says what a test says."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from services.frontend.__main__ import check_files
from services.frontend.config import AccessConfig, FrontendConfig, HttpConfig, LimitsConfig, TextServersConfig
from services.frontend.protocol.text_body import LINE_BYTES
from services.frontend.serving import text_proxy, text_suspects
from services.frontend.serving.text_servers import read_text_files
from services.frontend.serving.text_suspects import FAULTS
from shared import subjects
from shared.bus.memory_bus import MemoryBus
from shared.errors import ConfigError
from shared.hashing import SEED, pack_hashes, sequence_hashes
from shared.messages.frontends import RECENT_REQUESTS, RecentRequests
from shared.messages.select import Finished, Prefilled, Select, SelectRefused
from tests.frontend.peers import DEADLINE_S, MODEL, NAMESPACE, World, clients, instance_entry, world
from tests.frontend.text_peer import (
    BLOCK_UNITS,
    DONE,
    EVENTS,
    STREAM,
    WHOLE_STREAM,
    Asked,
    TextPeer,
    chunk,
    says,
    serving,
    text_card,
    text_settings,
    whole,
)

CHAT = "/v1/chat/completions"
PROMPT = "once upon a time " * 100
BODY: dict[str, Any] = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": PROMPT}]}
SECRET = {"Authorization": "Bearer secret"}
ANSWER = b"".join(EVENTS) + DONE
USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "total_tokens": 14}
JSON = json.dumps({"object": "chat.completion", "choices": [], "usage": USAGE}).encode()


@asynccontextmanager
async def routed(
    directory: Path, *peers: TextPeer, access: AccessConfig | None = None, unread_s: float = 30.0, **settings: Any
) -> AsyncIterator[World]:
    """A frontend whose model these servers have; w1 stands for the first one, and is chosen first."""
    limits = LimitsConfig(drain_s=0.0, deadline_s=settings.pop("deadline_s", 60.0))
    config, http = text_settings(**settings), HttpConfig(silent_s=0.0, unread_s=unread_s)
    async with (
        asyncio.timeout(DEADLINE_S),
        world(directory, settings=config, limits=limits, http=http, access=access, announced=False) as w,
    ):
        await w.announce_router()
        for number, peer in enumerate(peers, 1):
            await w.announce(f"w{number}", instance_entry("worker", f"w{number}") | text_card(f"w{number}", peer.url))
        await w.ready()
        async with serving(*(peer for peer in peers)):
            yield w


async def posted(
    w: World, body: dict[str, Any] | bytes = BODY, path: str = CHAT, headers: Mapping[str, str] | None = None
) -> tuple[int, bytes]:
    """Return the status and the body of an answer; what came of it, if it was cut."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession(w.url) as http, http.post(path, data=BytesIO(content), headers=headers) as answer:
        came = b""
        with suppress(aiohttp.ClientPayloadError):
            async for part in answer.content.iter_any():
                came += part
            return answer.status, came
        return answer.status, came + b"<cut>"


def error_of(body: bytes) -> str:
    return str(json.loads(body)["error"]["message"])


def _has_asked(peer: TextPeer, _: Any) -> bool:
    return bool(peer.asked)


def _is_idle(w: World, _: Any) -> bool:
    return not w.metric("headrace_inflight_requests")


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def first_parts(w: World) -> float:
    return w.metric("headrace_time_to_first_token_seconds_count")


async def freed(w: World) -> list[int]:
    """Wait until each attempt that was reserved has ended. Return their numbers. A question that no router answers in
    time is asked again, for the same attempt."""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            ended = sorted((event.attempt, event.request) for event in w.router.told.all if isinstance(event, Finished))
            if ended == sorted({(select.attempt, select.request) for select in w.router.asked.all}):
                return [attempt for attempt, _ in ended]
            await w.router.told.at_least(len(w.router.told.all) + 1)


async def test_a_body_goes_through_unchanged_and_its_answer_comes_back_as_it_is(directory: Path) -> None:
    peer = TextPeer()
    body = b'{"stream" :true,  "model":"tiny/model-1.0","unknown": [1.0, {"a": null}], "messages":[{"role":"user"}]}'
    async with routed(directory, peer) as w:
        async with aiohttp.ClientSession(w.url) as http:
            headers = {"Authorization": "Bearer mine", "Cookie": "a=b", "X-Request-Id": "named", "X-Other": "x"}
            async with http.post(CHAT, data=body, headers=headers) as answer:
                assert (answer.status, answer.headers["Content-Type"]) == (200, "text/event-stream")
                assert answer.headers["X-Request-Id"] == "named"
                assert await answer.read() == ANSWER
        [asked] = peer.asked
        assert (asked.path, asked.body) == (CHAT, body)
        assert asked.headers["host"] == peer.url.removeprefix("http://")
        assert asked.headers["x-request-id"].startswith("named-")
        assert asked.headers["accept-encoding"] == "identity"
        assert not {"authorization", "cookie", "x-other"}.intersection(asked.headers)


async def test_the_router_is_asked_with_blocks_of_text_and_hears_of_the_end(directory: Path) -> None:
    async with routed(directory, TextPeer()) as w:
        await posted(w, {**BODY, "max_tokens": 40}, headers={"X-Session-Id": "s"})
        assert await freed(w) == [1]
        [select] = w.router.asked.all
        text = json.dumps(BODY["messages"], separators=(",", ":"))[:-1].encode()
        assert select.hashes == pack_hashes(sequence_hashes(text, BLOCK_UNITS, SEED))
        assert len(select.hashes) == 8 * 6
        assert (select.max_tokens, select.session, select.whole, select.unreported) == (40, "s", True, True)
        [first] = [event for event in w.router.told.all if isinstance(event, Prefilled)]
        assert (first.request, first.instance) == (select.request, "w1")


async def test_official_clients_are_served_with_and_without_a_stream(directory: Path) -> None:
    message = {"role": "assistant", "content": "once"}
    body = {"id": "x", "object": "chat.completion", "created": 1, "model": MODEL, "usage": USAGE}
    body |= {"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}

    async def answers(asked: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE_STREAM if json.loads(asked.body).get("stream") else whole(json.dumps(body).encode()))

    async with routed(directory, TextPeer(answers)) as w, clients(w) as (client, _):
        ask: Any = {"model": MODEL, "messages": BODY["messages"]}
        assert (await client.chat.completions.create(**ask)).choices[0].message.content == "once"
        parts = [part async for part in await client.chat.completions.create(**ask, stream=True)]
        assert "".join(part.choices[0].delta.content or "" for part in parts) == "once"
        [listed] = (await client.models.list()).data
        assert listed.id == MODEL == (await client.models.retrieve(MODEL)).id


@pytest.mark.parametrize(
    "path",
    ["/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/tokenize", "/api/chat", "/api/embed"],
)
async def test_each_path_that_is_served_here_is_the_servers_own(directory: Path, path: str) -> None:
    peer = TextPeer(says(whole(JSON)))
    async with routed(directory, peer) as w:
        assert await posted(w, {"model": MODEL, "input": "x"}, path) == (200, JSON)
        assert [asked.path for asked in peer.asked] == [path]


@pytest.mark.parametrize("status", [400, 404, 413, 422, 500])
async def test_a_servers_own_error_passes_and_no_other_server_is_asked(directory: Path, status: int) -> None:
    one, two = (
        TextPeer(says(whole(b'{"error": "mine"}', status, more="Set-Cookie: a=b\r\nRetry-After: 7\r\n"))),
        TextPeer(),
    )
    async with routed(directory, one, two) as w, aiohttp.ClientSession(w.url) as http:
        async with http.post(CHAT, json=BODY) as answer:
            assert (answer.status, await answer.read()) == (status, b'{"error": "mine"}')
            assert "Set-Cookie" not in answer.headers
            assert answer.headers["Retry-After"] == "7"
        assert not two.asked
        assert await freed(w) == [1]
        assert not any(isinstance(event, Prefilled) for event in w.router.told.all)


BAD = {
    "busy": whole(b"{}", 503),
    "limited": whole(b"{}", 429),
    "overloaded": whole(b"{}", 529),
    "another key": whole(b'{"error": "sk-12"}', 401),
    "a redirect": whole(b"", 302, more="Location: http://127.0.0.1:1/secret\r\n"),
    "a page": whole(b"<html>hello</html>", 200, "text/html; charset=utf-8"),
    "a page with an error": whole(b"<html>hello</html>", 502, "text/html"),
    "no HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "a switch": b"HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
    "a head too long": b"HTTP/1.1 200 OK\r\nX: " + b"y" * 20_000 + b"\r\n\r\n",
    "heads too many": b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 500 + b"\r\n",
    "a wrong chunk": STREAM + b"zz\r\n",
    "nothing": b"",
    "a head alone": STREAM,
}


@pytest.mark.parametrize("name", BAD)
async def test_a_server_without_an_answer_is_followed_by_another_one(directory: Path, name: str) -> None:
    one, two = TextPeer(says(BAD[name], closes=True)), TextPeer()
    async with routed(directory, one, two) as w:
        assert await posted(w) == (200, ANSWER)
        assert await freed(w) == [1, 2]
        assert w.router.asked.all[1].excluded == ("w1",)
        assert one.asked[0].body == two.asked[0].body
        assert (
            sum(w.metric("headrace_attempts_lost_total", reason=each) for each in ("gone", "refused", "senseless")) == 1
        )


@pytest.mark.parametrize("name", BAD)
async def test_if_no_server_has_an_answer_the_client_gets_one_line_or_what_the_busy_one_said(
    directory: Path, name: str
) -> None:
    async with routed(directory, TextPeer(says(BAD[name], closes=True))) as w:
        status, body = await posted(w)
        if (passed := {"busy": 503, "limited": 429, "overloaded": 529}.get(name)) is not None:
            assert (status, body) == (passed, b"{}")
        else:
            assert status == 503
            assert error_of(body).startswith("no server answers; w1 ")
            assert not re.search("sk-12|http://|SSH|yyy", error_of(body))  # neither where it is, nor what it sent
            assert "\n" not in error_of(body)
        await freed(w)


async def test_a_server_that_is_not_there_is_followed_by_another_one(directory: Path) -> None:
    gone, two = TextPeer(), TextPeer()
    async with routed(directory, gone, two) as w:
        await gone.kill()
        assert await posted(w) == (200, ANSWER)
        await two.kill()
        status, body = await posted(w)
        assert (status, error_of(body)[:60]) == (503, "no server answers; w1 does not answer: Connection refused; w")
        assert w.metric("headrace_attempts_lost_total", reason="unreachable") == 3


async def test_a_server_that_answers_nothing_but_errors_is_passed_over_until_it_answers(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = TextPeer(says(whole(b"{}", 500))), TextPeer()
    async with routed(directory, one, two) as w:
        assert [(await posted(w))[0] for _ in range(FAULTS + 5)] == [500] * FAULTS + [200] * 5
        await two.kill()
        assert await posted(w) == (500, b"{}"), "no other one is there"
        await two.start()
        assert (await posted(w))[0] == 200
        one.script = says(WHOLE_STREAM)
        monkeypatch.setattr(text_suspects, "PAUSE_S", -1.0)
        assert await posted(w) == (200, ANSWER)
        while not await posted_to(w, one):
            pass


async def posted_to(w: World, peer: TextPeer) -> bool:
    """Ask once; return whether this server was asked."""
    before = len(peer.asked)
    assert await posted(w) == (200, ANSWER)
    return len(peer.asked) > before


async def test_a_server_that_hangs_is_passed_over(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def hangs(_: Asked, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(DEADLINE_S)

    monkeypatch.setattr(text_proxy, "HANGS_S", 0.01)
    one, two = TextPeer(hangs), TextPeer()
    async with routed(directory, one, two) as w:
        for _ in range(FAULTS):
            asking, asked = asyncio.create_task(posted(w)), len(one.asked)
            async with asyncio.timeout(DEADLINE_S):
                while len(one.asked) == asked:  # noqa: ASYNC110 - the peer is another task's
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            one.left.clear()
            asking.cancel()
            await one.left.wait()
        assert await posted(w) == (200, ANSWER)
        assert len(one.asked) == FAULTS


async def test_a_connection_that_a_server_closed_is_made_again_if_no_other_server_is_left(directory: Path) -> None:
    times = iter(range(9))

    async def ends_the_first(_: Asked, writer: asyncio.StreamWriter) -> None:
        if next(times):
            writer.write(WHOLE_STREAM)
        else:
            writer.close()

    async with routed(directory, TextPeer(ends_the_first)) as w:
        assert await posted(w) == (200, ANSWER)
        assert (await freed(w))[-1] > 1


async def test_wherever_an_answer_is_cut_it_is_whole_elsewhere_or_ends_with_an_error(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_suspects, "FAULTS", 1 << 20)  # or few requests would be cut
    cut = 0

    async def cuts(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(WHOLE_STREAM[:cut])
        await writer.drain()
        writer.close()

    first_part, broken = len(STREAM) + len(chunk(EVENTS[0])) - len(EVENTS[0]) - 2, 0
    first_line = first_part + len(EVENTS[0]) - 1
    async with routed(directory, TextPeer(cuts), TextPeer()) as w:
        for cut in range(len(WHOLE_STREAM)):
            status, body = await posted(w)
            if cut <= first_part or body == ANSWER:  # the end may be seen before what came just before it
                assert (status, body) == (200, ANSWER), cut
                continue
            broken += 1
            assert status == (200 if cut >= first_line else 503), cut
            passed, _, failure = body.rpartition(b"data: ")
            *events, rest = passed.split(b"\n\n")
            assert ANSWER.startswith(b"".join(event + b"\n\n" for event in events if event)), cut
            assert not rest.strip(), cut  # each event is whole, so that no client takes a half for one
            assert "cannot go on elsewhere" in error_of(failure)
            assert failure.endswith(b"}\n\n" if status == 200 else b"}}")
        assert broken
        await freed(w)


@pytest.mark.parametrize(
    ("path", "kind", "line", "ends"),
    [
        (CHAT, "text/event-stream; charset=utf-8", b"data: {}\n\n", b'data: {"error":{"message":"the server broke off'),
        (
            "/v1/messages",
            "text/event-stream",
            b"data: {}\r\n\r\n",
            b'event: error\ndata: {"type":"error","error":{"type"',
        ),
        ("/v1/responses", "text/event-stream", b"data: {}\n", b'\n\nevent: error\ndata: {"message":"the server broke'),
        ("/api/chat", "application/x-ndjson", b'{"done":false}\n', b'{"error":"the server broke off before'),
        ("/api/chat", "application/json", b'{"done":false}\n', b"<cut>"),
        (CHAT, "text/event-stream\r\nContent-Encoding: gzip", b"packed", b"<cut>"),
        (CHAT, "text/event-stream", b"data: " + b"x" * LINE_BYTES, b"<cut>"),
    ],
)
async def test_a_stream_that_breaks_off_ends_as_the_clients_of_its_api_expect(
    directory: Path, path: str, kind: str, line: bytes, ends: bytes
) -> None:
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    part = b"data: {half"
    async with routed(directory, TextPeer(says(head + chunk(line) + chunk(part), closes=True))) as w:
        status, body = await posted(w, BODY, path)
        assert status == 200
        if ends == b"<cut>":  # what came last may be lost with the connection
            assert (line + part + ends).startswith(body.removesuffix(ends))
            assert body.endswith(ends)
            return
        assert body.startswith(line + ends)
        assert json.loads(body[len(line) :][ends.index(b"{") :])["error"]
        assert body.endswith(b"}\n" if "ndjson" in kind else b"}\n\n")


async def test_the_clients_of_each_api_raise_the_error_of_a_stream_that_breaks_off(directory: Path) -> None:
    peer = TextPeer(says(STREAM + chunk(b": begun\n\n") + chunk(b"data: {"), closes=True))
    async with routed(directory, peer) as w, clients(w) as (client, _):
        ask: Any = {"model": MODEL, "stream": True}
        for create, more in (
            (client.chat.completions.create, {"messages": []}),
            (client.responses.create, {"input": "x"}),
        ):
            with pytest.raises(openai.APIError, match="broke off before"):
                [part async for part in await create(**ask, **more)]


async def test_a_whole_answer_that_is_cut_is_not_taken_for_one(directory: Path) -> None:
    async def cuts(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(whole(JSON)[:-1])
        await w.until("/health", lambda _: first_parts(w) == 1)
        writer.close()

    async with routed(directory, TextPeer(cuts)) as w:
        assert await posted(w, {**BODY, "stream": False}) == (200, JSON[:-1] + b"<cut>")
        assert w.metric("headrace_requests_total", operation="chat", status="503") == 1
        await freed(w)


async def test_a_client_that_leaves_ends_the_servers_connection_at_once(directory: Path) -> None:
    async def endless(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while True:
            writer.write(chunk(EVENTS[1]))
            await writer.drain()
            await asyncio.sleep(0.001)

    async def never(_asked: Asked, _writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    for script in (endless, never):
        peer = TextPeer(script)
        async with routed(directory, peer) as w, aiohttp.ClientSession(w.url) as http:
            asking = asyncio.ensure_future(http.post(CHAT, json=BODY))
            await w.until("/health", partial(_has_asked, peer))
            if script is endless:
                answer = await asking
                assert await answer.content.readany()
                answer.close()
            else:
                asking.cancel()
            await peer.left.wait()
            await freed(w)
            await w.until("/health", partial(_is_idle, w))


async def test_a_server_is_not_read_while_the_client_does_not_read(directory: Path) -> None:
    sent = 0

    async def endless(_: Asked, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        writer.write(STREAM)
        while True:
            writer.write(chunk(b"data: " + b"x" * 60_000 + b"\n\n"))
            await writer.drain()
            sent += 60_000

    peer = TextPeer(endless)
    async with routed(directory, peer, unread_s=0.3) as w:
        host, port = w.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port), limit=1)
        body = json.dumps(BODY).encode()
        writer.write(
            b"POST %b HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
        )
        await peer.left.wait()  # the client was ended after unread_s
        assert sent < 40 << 20, "what waits is in the kernel's buffers"
        writer.close()
        await freed(w)


async def test_a_silent_server_ends_its_answer_and_a_client_that_waits_for_its_first_part_is_not_silent(
    directory: Path,
) -> None:
    async def stops(_: Asked, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        writer.write(STREAM + chunk(EVENTS[0]))
        await asyncio.Event().wait()

    async with routed(directory, TextPeer(stops), idle_s=0.1) as w:
        status, body = await posted(w)
        assert (status, body.startswith(EVENTS[0])) == (200, True)
        assert "sent nothing for 0.1 s" in error_of(body.rpartition(b"data: ")[2])
        assert w.metric("headrace_attempts_lost_total", reason="stalled") == 1


async def test_a_deadline_ends_a_request_before_and_after_its_first_part(directory: Path) -> None:
    begins = False

    async def drips(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM)
        while True:
            if begins:
                writer.write(chunk(EVENTS[1]))
            await asyncio.sleep(0.01)

    async with routed(directory, TextPeer(drips)) as w:
        status, body = await posted(w, headers={"Headrace-Deadline-S": "0.2"})
        assert (status, error_of(body)[:36]) == (504, "the request's deadline passed, or li")
        begins = True
        status, body = await posted(w, headers={"Headrace-Deadline-S": "2.0"})
        assert status == 200
        assert error_of(body.rpartition(b"data: ")[2]) == "the request's deadline passed before its answer ended"
        await freed(w)


async def test_many_streams_of_a_server_that_is_killed_have_each_one_end_and_none_is_taken_for_whole(
    directory: Path,
) -> None:
    async def slow(asked: Asked, writer: asyncio.StreamWriter) -> None:
        if b"late" in asked.body:
            await asyncio.sleep(60)
        writer.write(STREAM)
        for _ in range(100_000):
            writer.write(chunk(EVENTS[1]))
            await asyncio.sleep(0.01)

    one, two = TextPeer(slow), TextPeer()
    async with routed(directory, one, two) as w:
        begun = [asyncio.ensure_future(posted(w)) for _ in range(64)]
        late = [asyncio.ensure_future(posted(w, {**BODY, "user": "late"})) for _ in range(64)]
        await w.until("/health", lambda _: len(one.asked) == 128 and first_parts(w) >= 64)
        await one.kill()
        for status, body in await asyncio.gather(*begun):
            assert status == 200
            assert b"cannot go on elsewhere" in body
            assert DONE not in body
        assert await asyncio.gather(*late) == [(200, ANSWER)] * 64
        assert len(await freed(w)) >= 192, "the late ones have two attempts each"


async def test_connections_are_used_again_only_after_a_whole_answer(directory: Path) -> None:
    peer = TextPeer(says(whole(JSON)))
    async with routed(directory, peer) as w:
        for _ in range(5):
            assert (await posted(w))[0] == 200
        assert (len(peer.asked), peer.connections) == (5, 1)


async def test_nothing_is_left_of_many_cut_streams(directory: Path) -> None:
    peer = TextPeer(says(STREAM + chunk(EVENTS[0]), closes=True))
    async with routed(directory, peer) as w:
        files: list[int] = []
        for count in (20, 200):
            for _ in range(count):
                await posted(w)
            await freed(w)
            files.append(open_files())
        assert files[1] <= files[0] + 2
        assert peer.open == 0


async def test_servers_get_the_key_of_the_file_which_is_read_again(directory: Path, tmp_path: Path) -> None:
    file, peer = tmp_path / "key", TextPeer(says(whole(JSON)))
    file.write_text("sesame\n")
    async with routed(directory, peer, api_key_file=str(file)) as w:
        await posted(w, headers={"Authorization": "Bearer mine"})
        file.write_text("open\n")
        await posted(w)
        assert [asked.headers["authorization"] for asked in peer.asked] == ["Bearer sesame", "Bearer open"]
        file.unlink()
        status, body = await posted(w)
        assert (status, error_of(body)) == (
            503,
            "no server answers; w1 text.api_key_file: No such file or directory",
        )


def test_a_file_that_cannot_be_read_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^text\.api_key_file: /.*/none: No such file or directory$"):
        read_text_files(TextServersConfig(api_key_file=str(tmp_path / "none")))
    with pytest.raises(ConfigError, match=r"^text\.ca_file /.*/none: No such file or directory$"):
        check_files(FrontendConfig(text=TextServersConfig(ca_file=str(tmp_path / "none"))))


def keys_file(tmp_path: Path, **entry: Any) -> AccessConfig:
    file = tmp_path / "keys.json"
    file.write_text(json.dumps({"alice": {"sha256": hashlib.sha256(b"secret").hexdigest(), **entry}}))
    return AccessConfig(keys_file=str(file))


async def test_a_key_pays_for_what_the_answer_says_it_had(directory: Path, tmp_path: Path) -> None:
    peer = TextPeer(says(whole(JSON)))
    access = keys_file(tmp_path, tokens_per_minute=100_000)
    async with routed(directory, peer, access=access) as w:
        for body, prompt, output in (
            (whole(JSON), 11, 3),
            (WHOLE_STREAM, (len(json.dumps(BODY["messages"])) // 4), 4),
            (whole(b"{}", 400), 0, 0),
        ):
            peer.script = says(body)
            before = [w.metric("headrace_key_tokens_total", key="alice", kind=kind) for kind in ("prompt", "output")]
            await posted(w, headers=SECRET)
            after = [w.metric("headrace_key_tokens_total", key="alice", kind=kind) for kind in ("prompt", "output")]
            assert [now - then for now, then in zip(after, before, strict=True)] == [prompt, output]
        assert (await posted(w, {**BODY, "max_tokens": 200_000}, headers=SECRET))[0] == 429


async def test_a_request_that_wants_a_cache_of_its_own_is_refused_unless_that_is_ignored(
    directory: Path, tmp_path: Path
) -> None:
    access = keys_file(tmp_path, salt="own")
    async with routed(directory, TextPeer(), access=access) as w:
        status, body = await posted(w, headers=SECRET)
        assert status == 403
        assert error_of(body).startswith("model: the API key asks for cached blocks of its own, and the servers of")
    async with routed(directory, TextPeer()) as w:
        assert (await posted(w, headers={"X-Cache-Salt": "mine"}))[0] == 403
    async with routed(directory, TextPeer(), ignore_salts=True) as w:
        assert (await posted(w, headers={"X-Cache-Salt": "mine"}))[0] == 200
        await posted(w)
        one, two = w.router.asked.all
        assert one.hashes != two.hashes


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 404, ""),
        (b'{"\xff": 1}', 400, "the body is not UTF-8"),
        (json.dumps({**BODY, "model": "other"}).encode(), 404, "the model 'other' does not exist"),
        (json.dumps({**BODY, "x": "y" * (5 << 20)}).encode(), 413, "over the limit"),
    ],
)
async def test_what_cannot_be_meant_gets_one_line(directory: Path, body: bytes, status: int, said: str) -> None:
    peer = TextPeer()
    async with routed(directory, peer) as w:
        found, answer = await posted(w, body)
        assert found in (status, 400)
        assert said in error_of(answer)
        assert not peer.asked


async def test_a_large_body_is_sent_whole(directory: Path) -> None:
    one, two = TextPeer(says(whole(b"", 503))), TextPeer(says(whole(JSON)))
    async with routed(directory, one, two) as w:
        body = json.dumps({**BODY, "user": "y" * (3 << 20)}).encode()
        assert await posted(w, body) == (200, JSON)
        assert one.asked[0].body == two.asked[0].body == body


async def test_a_refusal_of_the_router_is_the_clients(directory: Path) -> None:
    def full(select: Select) -> SelectRefused:
        return SelectRefused(select.request, select.attempt, "overloaded", "too much waits", 9.0)

    async with routed(directory, TextPeer()) as w:
        w.router.answer = full
        status, body = await posted(w)
        assert (status, error_of(body)) == (429, "too much waits")


async def test_a_choice_that_this_frontend_does_not_know_yet_is_made_again(directory: Path) -> None:
    async with routed(directory, TextPeer()) as w:
        w.router.workers.insert(0, "w0")
        assert await posted(w) == (200, ANSWER)
        assert [select.excluded for select in w.router.asked.all] == [(), ("w0",)]
        assert await freed(w) == [1, 2]


async def test_a_model_without_a_server_left_is_503_and_one_with_both_kinds_is_refused(directory: Path) -> None:
    async with routed(directory, TextPeer()) as w:
        await w.leave("w1")
        await w.until("/health", lambda health: not health.get("models"))
        status, body = await posted(w)
        assert (status, error_of(body)) == (503, f"no worker serves the model '{MODEL}' now")


async def test_a_model_whose_servers_no_router_chooses_says_why_where_it_is_described(directory: Path) -> None:
    peer = TextPeer()
    async with routed(directory, peer) as w, clients(w) as (_, http):
        await w.announce("w2", text_card("w2", peer.url, "half", role="prefill"))
        await w.until("/health", lambda health: bool(health.get("not_served")))
        for name, status in (("half", 503), (MODEL, 200)):
            async with http.get(f"/v1/models/{name}") as answer:
                assert answer.status == status


async def test_over_nats_such_a_model_is_refused_by_name(directory: Path) -> None:
    async with routed(directory, TextPeer()) as w:
        asking = MemoryBus(w.broker).request(
            subjects.client(NAMESPACE, "chat"), json.dumps(BODY).encode(), timeout_s=DEADLINE_S
        )
        assert error_of((await asking).payload).startswith(f"the model '{MODEL}' has servers that take and give text a")


async def test_lists_of_other_apis_have_no_such_model(directory: Path) -> None:
    async with routed(directory, TextPeer()) as w, clients(w) as (_, http), http.get("/api/tags") as answer:
        assert (await answer.json())["models"] == []


async def test_what_became_of_tries_is_noted_for_explanations(directory: Path) -> None:
    async with routed(directory, TextPeer(says(whole(b"{}", 503))), TextPeer()) as w:
        await posted(w, headers={"X-Request-Id": "named"})
        [select, _] = w.router.asked.all
        notes = w.notes.find_request(select.request, 0.0)
        assert [(note.attempt, note.text) for note in notes] == [(1, "w1 answers 503")]


async def recent(w: World) -> RecentRequests:
    """Return what the page is given of this frontend."""
    answer = await MemoryBus(w.broker).request(subjects.recent_requests(NAMESPACE, "f1"), b"", timeout_s=DEADLINE_S)
    return RECENT_REQUESTS.decode(answer.payload, answer.headers)


CUT = STREAM + b"".join(map(chunk, EVENTS[:2]))


@pytest.mark.parametrize(
    ("first", "instances", "tokens", "outcome"),
    [
        (says(whole(JSON)), ("w1",), (11, 3), "answered"),
        (says(whole(b"{}", 503)), ("w1", "w2"), (11, 3), "answered"),
        (says(whole(b"{}", 404)), ("w1",), (433, 0), "404"),
        (says(CUT, closes=True), ("w1",), (433, 2), "Unavailable"),
    ],
    ids=["answered", "by the second server", "with another status", "cut"],
)
async def test_a_request_is_in_the_pages_list_with_its_steps_and_its_end(
    directory: Path, first: Any, instances: tuple[str, ...], tokens: tuple[int, int], outcome: str
) -> None:
    async with routed(directory, TextPeer(first), TextPeer(says(whole(JSON)))) as w:
        await posted(w)
        await w.until("/health", partial(_is_idle, w))
        found = await recent(w)
        [row] = found.requests
        assert (found.arriving, found.running, found.begun) == (0, 0, 1)
        assert (row.model, row.instances, row.attempt) == (MODEL, instances, len(instances))
        assert (row.prompt_tokens, row.output_tokens, row.outcome) == (*tokens, outcome)
        times = [row.tokenised_s, row.selected_s, row.accepted_s, row.first_token_s, row.ended_s]
        known = [each for each in times if each is not None]
        assert known == sorted(known)
        assert times.index(None) == 3 if outcome == "404" else len(known) == 5


async def test_a_request_that_runs_is_in_the_pages_list_and_one_whose_client_left_was_cancelled(
    directory: Path,
) -> None:
    async def waits(_: Asked, writer: asyncio.StreamWriter) -> None:
        writer.write(CUT)
        await asyncio.Event().wait()

    async with routed(directory, TextPeer(waits)) as w, aiohttp.ClientSession(w.url) as http:
        async with http.post(CHAT, json=BODY) as answer:
            assert await answer.content.readany()
            while (found := await recent(w)).requests[0].output_tokens < 2:
                assert await answer.content.readany()
            assert (found.running, found.requests[0].outcome, found.requests[0].ended_s) == (1, "", None)
            answer.close()
        await w.until("/health", partial(_is_idle, w))
        found = await recent(w)
        assert (found.running, found.requests[0].outcome) == (0, "cancelled")


async def test_a_redirect_leads_nowhere(directory: Path) -> None:
    secret = TextPeer(says(whole(JSON)))
    async with serving(secret):
        there = whole(b"", 307, more=f"Location: {secret.url}/secret\r\n")
        async with routed(directory, TextPeer(says(there))) as w:
            assert (await posted(w))[0] == 503
            assert not secret.asked


async def test_an_answer_without_a_body_is_one(directory: Path) -> None:
    async with routed(directory, TextPeer(says(whole(b"")))) as w:
        assert await posted(w) == (200, b"")


async def test_an_http_1_0_server_and_interim_answers_are_understood(directory: Path) -> None:
    old = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n" + JSON
    async with routed(directory, TextPeer(says(b"HTTP/1.1 100 Continue\r\n\r\n" + old, closes=True))) as w:
        assert await posted(w) == (200, JSON)
