"""Requests that no ordinary client sends, byte for byte, at the whole frontend: refused or harmless, and others notice
nothing."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import zlib
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from services.frontend.config import AccessConfig
from tests.frontend.peers import DEADLINE_S, MODEL, World, clients, world

ALICE, BOB = "hr-alices-own-key", "hr-bobs-own-key"
BODY = json.dumps({"model": MODEL, "prompt": "hello", "max_tokens": 50}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def access(tmp_path: Path) -> AccessConfig:
    path = tmp_path / "keys.toml"
    path.write_text("".join(f'{name} = {{ sha256 = "{_digest(key)}" }}\n' for name, key in (("a", ALICE), ("b", BOB))))
    return AccessConfig(keys_file=str(path))


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> bytes:
    return b"Authorization: Bearer %s\r\n" % key.encode()


def sized(body: bytes) -> bytes:
    return b"Content-Length: %d\r\n\r\n%s" % (len(body), body)


async def connect(w: World) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    url = urlsplit(w.url)
    return await asyncio.open_connection(url.hostname, url.port)


async def said(w: World, sent: bytes) -> bytes:
    """All that comes back, up to the end of the connection."""
    reader, writer = await connect(w)
    writer.write(sent)
    async with asyncio.timeout(DEADLINE_S):
        answered = await reader.read()
    writer.close()
    return answered


async def answer(reader: asyncio.StreamReader) -> tuple[int, dict[str, str], bytes]:
    async with asyncio.timeout(DEADLINE_S):
        first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        return int(first.split()[1]), headers, await reader.readexactly(int(headers.get("content-length", 0)))


# --- codings of a body


@pytest.mark.parametrize("coding", ["gzip", "GZIP", "deflate", "br", "zstd", "x-gzip", "identity, gzip", "wonders"])
@pytest.mark.parametrize("key", [True, False])
async def test_a_body_with_a_content_encoding_is_415_with_a_key_and_without(
    directory: Path, access: AccessConfig, key: bool, coding: str
) -> None:
    async with world(directory, access=access) as w:
        reader, writer = await connect(w)
        for body in (gzip.compress(BODY), b"no gzip", BODY):  # on one connection: what is refused was read, and dropped
            coded = f"Content-Encoding: {coding}\r\n".encode()
            writer.write(POST + bearer(ALICE) * key + coded + sized(body))
            status, headers, refused = await answer(reader)
            assert (status, headers["accept-encoding"]) == (415, "identity")
            error = json.loads(refused)["error"]
            assert (error["type"], error["param"]) == ("invalid_request_error", "Content-Encoding")
            assert "Content-Encoding" in error["message"]
        writer.close()
        assert w.router.asked.all == []


async def test_a_body_that_says_that_it_has_no_coding_is_served(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("fine")
        for coding in ("identity", "Identity", ""):
            async with http.post("/v1/completions", data=BODY, headers={"Content-Encoding": coding}) as response:
                assert response.status == 200


async def test_a_coding_without_a_body_says_nothing(directory: Path) -> None:
    coded = {"Content-Encoding": "gzip"}
    async with world(directory) as w, clients(w) as (_, http), http.get("/v1/models", headers=coded) as response:
        assert response.status == 200


@pytest.mark.parametrize("key", [True, False])
async def test_compressed_bombs_are_refused_while_others_are_served(
    directory: Path, access: AccessConfig, key: bool
) -> None:
    """20 of them, of 64 MiB each."""
    packing = zlib.compressobj(9, zlib.DEFLATED, 31)
    bomb = b"".join(packing.compress(bytes(1 << 20)) for _ in range(64)) + packing.flush()
    async with world(directory, access=access) as w, clients(w, ALICE) as (client, _):
        w.say("fine")
        bombs = [await connect(w) for _ in range(20)]
        for _, writer in bombs:
            writer.write(POST + bearer(BOB) * key + b"Content-Encoding: gzip\r\n" + sized(bomb))
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "fine"
        for reader, writer in bombs:
            assert (await answer(reader))[0] == 415
            writer.close()


@pytest.mark.parametrize(
    "parts",
    [
        [b"Content-Length: 33554432\r\n\r\n", *[bytes(1 << 16)] * 512],
        [b"Transfer-Encoding: chunked\r\n\r\n", *[b"10000\r\n" + bytes(1 << 16) + b"\r\n"] * 512],
        [b"Transfer-Encoding: chunked\r\n\r\n", *[b"1\r\n{\r\n" * 1000] * 100],
        [b"Transfer-Encoding: chunked\r\n\r\n1", *[b";a=" + b"b" * 60_000] * 100],
        [b"Transfer-Encoding: chunked\r\n\r\n0\r\n", *[b"A: " + b"b" * 8000 + b"\r\n"] * 500],
        [b"Connection: upgrade\r\nUpgrade: websocket\r\nContent-Length: 2\r\n\r\n{}", *[bytes(1 << 16)] * 512],
    ],
    ids=["length", "chunks", "small chunks", "extension", "trailers", "upgrade"],
)
@pytest.mark.parametrize("key", [True, False])
async def test_bodies_without_an_end_are_cut_off_and_others_are_served(
    directory: Path, access: AccessConfig, parts: list[bytes], key: bool
) -> None:
    async with world(directory, access=access) as w, clients(w, ALICE) as (client, _):
        w.say("fine")
        reader, writer = await connect(w)
        read = asyncio.create_task(reader.read())
        writer.write(POST + bearer(BOB) * key)
        with suppress(ConnectionError):  # it has been cut off already
            for part in parts:
                writer.write(part)
                await writer.drain()
        assert (await client.completions.create(model=MODEL, prompt="x")).choices[0].text == "fine"
        writer.close()
        with suppress(ConnectionError):  # what it said was lost with the connection
            assert b"HTTP/1.1 20" not in await read
        assert len(w.workers[0].generates.all) == 1


# --- one request within another


async def test_a_trailer_gives_the_next_request_no_other_key(directory: Path, access: AccessConfig) -> None:
    """As a proxy would send them that has one connection for two clients."""
    for trailer in (bearer(BOB), bearer("x"), b"Headrace-Deadline-S: 0.001\r\n", b"Expect: x\r\n"):
        async with world(directory, access=access) as w:
            w.say("fine")
            chunks = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n%s\r\n" % (len(BODY), BODY, trailer)
            answered = await said(w, POST + bearer(BOB) + chunks + POST + bearer(ALICE) + sized(BODY))
            assert answered.count(b"HTTP/1.1 200 OK") == answered.count(b"HTTP/1.1") == 1
            assert b"\r\nConnection: close\r\n" in answered
            assert w.metric("headrace_key_requests_total", key="a") == 0


async def test_two_keys_are_400_whichever_comes_first(directory: Path, access: AccessConfig) -> None:
    async with world(directory, access=access) as w:
        for keys in (bearer(ALICE) + bearer(BOB), bearer(ALICE) * 2, bearer("x") + bearer(ALICE)):
            reader, writer = await connect(w)
            writer.write(POST + keys + sized(BODY))
            status, _, body = await answer(reader)
            assert (status, json.loads(body)["error"]["param"]) == (400, "Authorization")
            writer.close()
        assert w.router.asked.all == []


async def test_keys_are_not_read_where_none_is_asked_for_however_many_there_are(directory: Path) -> None:
    async with world(directory) as w:
        reader, writer = await connect(w)
        writer.write(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n" + bearer(ALICE) + bearer(BOB) + b"\r\n")
        assert (await answer(reader))[0] == 200
        writer.close()


async def test_a_request_without_a_version_is_400(directory: Path, access: AccessConfig) -> None:
    async with world(directory, access=access) as w:
        for line in (b"GET /live\r\n\r\n", b"GET /v1/models\r\n\r\n", b"GET /live HTTP/0.9\r\n\r\n"):
            assert b" 400 " in (await said(w, line)).splitlines()[0]


INNER = b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        b"Content-Length: 4\r\nContent-Length: 5\r\n\r\n",
        b"Content-Length: 4, 4\r\n\r\n",
        b"Content-Length: +4\r\n\r\n",
        b"Content-Length: 0x4\r\n\r\n",
        b"Content-Length: -1\r\n\r\n",
        b"Content-Length: 99999999999999999999\r\n\r\n",
        b"Content-Length : 4\r\n\r\n",
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding:\r\n chunked\r\n\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n0x1\r\n{\r\n0\r\n\r\n",
        b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
        b"Transfer-Encoding: chunked\r\n\r\n1\n{\n0\n\n",
        b"Transfer-Encoding: chunked\r\n\r\n1\r\n{{\r\n0\r\n\r\n",
        b"X: a\r\n b\r\n\r\n",
        b"X: a\x00b\r\n\r\n",
        b"X: a\rY: b\r\n\r\n",
        b"X y: b\r\n\r\n",
        b": b\r\n\r\n",
        b"Host: y\r\n\r\n",
    ],
)
async def test_a_request_of_two_readings_is_400_and_what_comes_after_it_is_not_answered(
    directory: Path, access: AccessConfig, head: bytes
) -> None:
    async with world(directory, access=access) as w:
        answered = await said(w, POST + head + INNER)
        assert b" 400 " in answered.splitlines()[0]
        assert answered.count(b"HTTP/1.1 ") + answered.count(b"HTTP/1.0 ") == 1


@pytest.mark.parametrize(
    "target", ["/v1/models", "//v1/models", "/v1/../v1/models", "/v1/models;x", "/v1%2fmodels", "*"]
)
@pytest.mark.parametrize("more", ["", "Upgrade: h2c\r\nConnection: Upgrade\r\n", "X-Original-URL: /live\r\n"])
async def test_no_way_of_writing_a_path_leads_past_the_key(
    directory: Path, access: AccessConfig, target: str, more: str
) -> None:
    async with world(directory, access=access) as w:
        for method in ("GET", "HEAD", "OPTIONS", "POST", "TRACE"):
            lines = f"{method} {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n{more}\r\n"
            assert (await said(w, lines.encode())).split(b" ")[1] in (b"400", b"401")
