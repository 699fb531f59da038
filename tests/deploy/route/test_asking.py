"""deploy/local/route/asking.py: a server's answers over real sockets, and one line for each fault."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import get_args

import pytest
from aiohttp import web

from deploy.local.route import asking
from deploy.local.route.asking import addresses_of, ask, key_of
from deploy.local.route.targets import Target, parse_targets
from deploy.local.usage import By
from shared.errors import ConfigError, Unavailable
from shared.outbound import TlsFiles
from tests.servers import free_port
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering, says


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def peer(model: Path) -> AsyncIterator[Peer]:
    async with answering(Peer(model)) as one:
        yield one


def target(peer: Peer) -> Target:
    (one,) = parse_targets([peer.url])
    return one


async def test_a_server_says_what_it_is(peer: Peer, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    found = await ask(target(peer), key, TlsFiles())
    assert [one.id for one in found.models.bases] == ["tiny"]
    assert (found.version, found.block_size, found.blocks, found.ranks) == ("0.32.0", 32, 64, 1)
    assert (found.events, found.replay) == ("", "")
    assert found.lacks.startswith("it publishes no KV events: start it with --kv-events-config")
    assert {headers.get("Authorization") for headers in peer.seen} == {"Bearer sesame"}


async def test_events_are_found_where_something_listens(peer: Peer) -> None:
    port = int(peer.url.rpartition(":")[2])
    peer.events = {"0": {"endpoint": f"tcp://*:{port}", "replay_endpoint": f"tcp://*:{port}"}}
    found = await ask(target(peer), None, TlsFiles())
    assert (found.events, found.replay, found.lacks) == (f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}", "")
    closed = free_port()
    peer.events = {"0": {"endpoint": f"tcp://*:{closed}"}}
    found = await ask(target(peer), None, TlsFiles())
    assert found.events == ""
    assert found.lacks == f"nothing answers at tcp://127.0.0.1:{closed}, where its KV events are"


async def test_an_older_server_lacks_what_it_does_not_say(peer: Peer) -> None:
    for path in ("/version", "/metrics", "/kv_event_sources"):
        peer.said[path] = says(404)
    found = await ask(target(peer), None, TlsFiles())
    assert (found.version, found.block_size) == ("", 0)
    assert found.lacks == "it says nothing of KV events, as vLLM does from 0.32 on"
    peer.said["/version"] = peer.said["/kv_event_sources"] = says(200, "<html>")
    assert (await ask(target(peer), None, TlsFiles())).version == ""


@pytest.mark.parametrize("status", [302, 401, 403, 404, 405, 501])
async def test_a_server_without_vllms_paths_takes_text(peer: Peer, status: int) -> None:
    peer.models = [{"id": "m:8b", "object": "model", "created": 1, "owned_by": "library"}]
    for path in ("/version", "/metrics", "/kv_event_sources"):
        peer.said[path] = says(status, "what")
    for by in get_args(By):
        found = await ask(target(peer), None, TlsFiles(), by)
        assert found.text == (by != "tokens")
        assert [one.id for one in found.models.bases] == ["m:8b"]


async def test_any_server_takes_text_if_it_is_to(peer: Peer) -> None:
    assert not (await ask(target(peer), None, TlsFiles())).text
    asked = len(peer.seen)
    assert (await ask(target(peer), None, TlsFiles(), "text")).text
    assert len(peer.seen) == asked + 1


@pytest.mark.parametrize(
    ("status", "text", "said"),
    [
        (200, "<html>hello</html>", "/v1/models is no list of models: JSON is malformed"),
        (200, '{"data": 5}', "/v1/models is no list of models: Expected `array`"),
        (200, '{"data": [' + '{"id":"a"},' * 1000 + '{"id":"a"}]}', "/v1/models is no list of models: Expected `arra"),
        (200, " " * (asking.ANSWER_LIMIT_BYTES + 1), "/v1/models answers more than 8388608 bytes"),
        (302, "", "/v1/models answers 302"),
        (401, "", "/v1/models answers 401: give its key with --api-key-file"),
        (404, "", "/v1/models answers 404"),
        (503, "", "/v1/models answers 503"),
    ],
)
async def test_what_is_no_such_server_gets_one_line(peer: Peer, status: int, text: str, said: str) -> None:
    peer.said["/v1/models"] = says(status, text)
    with pytest.raises((ConfigError, Unavailable)) as wrong:
        await ask(target(peer), None, TlsFiles())
    assert str(wrong.value).startswith(said)
    assert "\n" not in str(wrong.value)


@pytest.mark.parametrize("listed", [b'{"data": [{"id": "\xe9"}]}', b'{"data": [], "more": ' + b"[" * 100_000])
async def test_a_list_that_is_not_utf8_or_nested_too_deeply_gets_one_line(peer: Peer, listed: bytes) -> None:
    async def answer(_: web.Request) -> web.StreamResponse:
        return web.Response(body=listed)

    peer.said["/v1/models"] = answer
    with pytest.raises(ConfigError, match=r"^/v1/models is no list of models: "):
        await ask(target(peer), None, TlsFiles())


async def test_a_server_that_is_slow_endless_or_not_there_takes_no_longer_than_the_limit(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        with_pauses = asyncio.Event()
        while True:
            await answer.write(b" ")
            try:
                async with asyncio.timeout(0.01):
                    await with_pauses.wait()
            except TimeoutError:
                pass

    peer.said["/v1/models"] = endless
    with monkeypatch.context() as short:
        short.setattr(asking, "ASK_LIMIT_S", 0.2)
        with pytest.raises(Unavailable, match=r"^/v1/models did not answer in 0\.2 s$"):
            await ask(target(peer), None, TlsFiles())
    (gone,) = parse_targets([f"http://127.0.0.1:{free_port()}"])
    with pytest.raises(Unavailable, match=r"^does not answer: Connection refused$"):
        await ask(gone, None, TlsFiles())
    (secure,) = parse_targets([peer.url.replace("http:", "https:")])
    with pytest.raises(Unavailable, match=r"^does not answer: "):
        await ask(secure, None, TlsFiles())


def test_a_name_has_its_addresses_of_ipv4_and_one_without_any_is_a_fault() -> None:
    assert addresses_of("localhost") == ["127.0.0.1"]
    assert addresses_of("::1") == ["::1"]
    for host in ("no.such.host.invalid", "a" * 70, "a..b"):
        with pytest.raises(Unavailable):
            addresses_of(host)


def test_a_key_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    assert key_of(None) == ""
    key = tmp_path / "key"
    for content, said in ((b"", "not one line"), (b"two words", "not one line"), (b"\xff", "not ASCII")):
        key.write_bytes(content)
        with pytest.raises(ConfigError, match=rf"^--api-key-file {key}: {said}"):
            key_of(key)
    with pytest.raises(ConfigError, match=rf"^--api-key-file {tmp_path}: Is a directory"):
        key_of(tmp_path)
