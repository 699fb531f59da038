"""Servers that misbehave: each is one clear line that names the setting."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from services.worker.attached.server import ALIAS_CHARACTERS, Server, read_files
from services.worker.attached.vllm_api import VLLM
from services.worker.config import AttachedConfig, WorkerConfig
from services.worker.contracts.messages import Ready, Submit
from services.worker.model.facts import facts_of
from shared.errors import ConfigError, InvalidRequest, Unavailable
from shared.hashing import pack_tokens
from shared.messages.generate import Sampling
from tests.authority import Authority, needs_openssl, serving
from tests.servers import free_port
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import SIZES, Peer, answering, says

ATTEMPT = Submit("r", 1, "f", pack_tokens([1, 2, 3]), 3, Sampling(max_tokens=4), 9.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def peer(model: Path) -> AsyncIterator[Peer]:
    async with answering(Peer(model)) as one:
        yield one


@asynccontextmanager
async def connected(peer: Peer, **settings: object) -> AsyncIterator[Server]:
    server = Server(AttachedConfig(url=peer.url, **settings), VLLM, 4)  # type: ignore[arg-type]
    try:
        yield server
    finally:
        await server.close()


async def facts(peer: Peer, local: Path, block_size: int = 16, **settings: object) -> Ready:
    config = WorkerConfig(
        model=str(local),
        engine="attached",
        block_size=block_size,
        attached=AttachedConfig(url=peer.url, **settings),  # type: ignore[arg-type]
    )
    async with connected(peer, **settings) as server:
        return await server.facts(facts_of(local, block_size=block_size, capacity_blocks=0), config, "name")


async def generated(peer: Peer, model: Path, attempt: Submit = ATTEMPT, **settings: object) -> list[int]:
    async with connected(peer, **settings) as server:
        config = WorkerConfig(model=str(model), attached=AttachedConfig(url=peer.url), engine="attached")
        await server.facts(facts_of(model, block_size=16, capacity_blocks=0), config, "name")
        async with aclosing(server.generate(attempt)) as outputs:
            return [token async for output in outputs for token in output.tokens]


async def never(_: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError


async def test_facts_are_the_servers_where_it_says_them(peer: Peer, model: Path) -> None:
    found = await facts(peer, model)
    assert (found.context_length, found.block_size, found.capacity_blocks) == (100, 32, 64)
    assert (found.vocab_size, found.embedding_size, found.grammars, found.biases) == (320, 0, False, True)


async def test_a_gateway_is_given_the_address_of_the_url_or_another_one_that_is_set(peer: Peer, model: Path) -> None:
    assert (await facts(peer, model)).address == peer.url.removeprefix("http://")
    assert (await facts(peer, model, address="localhost:80")).address == "127.0.0.1:80"
    assert (await facts(peer, model, address="[::1]:81")).address == "[::1]:81"
    with pytest.raises(Unavailable, match=r"attached.address: nowhere.invalid:80 has no address"):
        await facts(peer, model, address="nowhere.invalid:80")


@pytest.mark.parametrize(
    ("listed", "alias"), [("name", ""), ("org/tiny", "org/tiny"), ("x" * ALIAS_CHARACTERS + "/tiny", "")]
)
async def test_the_name_that_a_server_has_is_another_name_of_the_model(
    peer: Peer, model: Path, listed: str, alias: str
) -> None:
    peer.models = [{"id": listed, "root": str(model), "max_model_len": 100}]
    assert (await facts(peer, model)).alias == alias


async def test_tokens_come_and_no_more_are_asked_for_than_the_context_has_room_for(peer: Peer, model: Path) -> None:
    assert await generated(peer, model) == [5, 6]
    long = Submit("r", 1, "f", pack_tokens([1] * 90), 90, Sampling(max_tokens=50), 9.0)
    await generated(peer, model, long)
    assert [body["max_tokens"] for body in peer.bodies] == [4, 10]


async def test_the_key_comes_from_its_file(peer: Peer, model: Path, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    await facts(peer, model, api_key_file=str(key))
    assert {headers.get("Authorization") for headers in peer.seen} == {"Bearer sesame"}
    key.write_text("two words")
    with pytest.raises(ConfigError, match=r"attached\.api_key_file: .*not one line with a key"):
        await facts(peer, model, api_key_file=str(key))
    with pytest.raises(ConfigError, match=r"attached\.api_key_file: /none: No such file"):
        await facts(peer, model, api_key_file="/none")


async def test_a_name_is_reached_at_the_address_of_the_settings(model: Path) -> None:
    peer = Peer(model)
    async with answering(peer, "127.0.0.2"):
        peer.url = peer.url.replace("127.0.0.1", "vllm.test")
        assert (await facts(peer, model, ip="127.0.0.2")).address == f"127.0.0.2:{peer.url.rpartition(':')[2]}"
    assert {headers["Host"] for headers in peer.seen} == {peer.url.removeprefix("http://")}
    with pytest.raises(ValueError, match="vllm"):
        AttachedConfig(url=peer.url, ip="vllm.test")


@needs_openssl
async def test_https_is_checked_with_the_files_of_the_settings(model: Path, tmp_path: Path) -> None:
    authority, peer = Authority(tmp_path), Peer(model)
    cert, key = authority.sign("client", "client")
    files: dict[str, Any] = {"ca_file": str(authority.pem), "client_cert": str(cert), "client_key": str(key)}
    async with answering(peer, tls=serving(*authority.sign("127.0.0.1"), authority.pem)):
        peer.url = peer.url.replace("http:", "https:")
        assert (await facts(peer, model, **files)).block_size == 32
        with pytest.raises(
            Unavailable, match=r"^attached\.url: https:.*its certificate is refused: .*; attached\.ca_file names an"
        ):
            await facts(peer, model)
        peer.url = peer.url.replace("127.0.0.1", "localhost")
        with pytest.raises(Unavailable, match=r"its certificate is refused: Hostname mismatch"):
            await facts(peer, model, ip="127.0.0.1", **files)
    with pytest.raises(ConfigError, match=r"^attached\.ca_file /none: No such file"):
        read_files(AttachedConfig(ca_file="/none"))


async def test_another_model_is_refused(peer: Peer, model: Path) -> None:
    peer.tokens = [1, 2]
    with pytest.raises(ConfigError, match=r"attached\.url: .*serves another model: its tokenizer"):
        await facts(peer, model)
    peer.models = [{"id": "org/large", "max_model_len": 100}]
    with pytest.raises(ConfigError, match=r"attached\.model: .*has no model name or tiny; it has org/large"):
        await facts(peer, model)
    with pytest.raises(ConfigError, match=r"attached\.model: .*has no model other; it has org/large"):
        await facts(peer, model, model="other")
    peer.models = [{"id": f"org/large-{number}"} for number in range(10_000)]
    with pytest.raises(ConfigError, match=r"attached\.model: .*has no model other; it has org/large-0, ") as wrong:
        await facts(peer, model, model="other")
    assert len(str(wrong.value)) <= 500


@pytest.mark.parametrize(
    ("path", "status", "said"),
    [
        ("/v1/models", 401, r"^attached\.api_key_file: .*/v1/models answers 401"),
        ("/v1/models", 404, r"^attached\.url: .*/v1/models answers 404"),
        ("/v1/models", 302, r"^attached\.url: .*/v1/models answers 302"),
        ("/v1/models", 200, r"^attached\.url: .*/v1/models answers no JSON object"),
        ("/metrics", 404, r"^capacity_blocks, block_size: set them"),
    ],
)
async def test_a_server_that_is_no_such_one_is_named(
    peer: Peer, model: Path, path: str, status: int, said: str
) -> None:
    peer.said[path] = says(status, "what")
    with pytest.raises(ConfigError, match=said):
        await facts(peer, model)


async def test_a_block_size_or_ranks_that_contradict_are_named(peer: Peer, model: Path) -> None:
    with pytest.raises(ConfigError, match=r"^block_size: 64: set 32, as http.* has"):
        await facts(peer, model, block_size=64)
    peer.said["/metrics"] = says(200, SIZES + SIZES)
    assert (await facts(peer, model)).block_size == 32
    with pytest.raises(ConfigError, match=r"^attached\.events: .* 2 data-parallel ranks"):
        await facts(peer, model, events="tcp://127.0.0.1:9")


async def test_a_server_that_is_slow_or_not_there_may_come_back(peer: Peer, model: Path) -> None:
    peer.said["/v1/models"] = never
    with pytest.raises(Unavailable, match=r"^attached\.url: .*/v1/models did not answer in 0\.2 s"):
        await facts(peer, model, limit_s=0.2)
    peer.url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(Unavailable, match=r"^attached\.url: .*/v1/models does not answer: Connection refused"):
        await facts(peer, model)


async def test_an_answer_without_an_end_is_read_to_a_limit_of_bytes_and_of_time(peer: Peer, model: Path) -> None:
    async def endless(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        with suppress(ConnectionError):
            while True:
                await answer.write(b" " * 65536)
        return answer

    async def trickles(request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse()
        await answer.prepare(request)
        await answer.write(b" ")
        await asyncio.Event().wait()
        raise AssertionError

    peer.said["/v1/models"] = endless
    with pytest.raises(Unavailable, match=r"^attached\.url: .*/v1/models answers more than 8388608 bytes"):
        await facts(peer, model)
    peer.said["/v1/models"] = trickles
    with pytest.raises(Unavailable, match=r"^attached\.url: .*/v1/models did not answer in 0\.2 s"):
        await facts(peer, model, limit_s=0.2)


async def test_an_unhealthy_server_says_so(peer: Peer, model: Path) -> None:
    async with connected(peer) as server:
        assert await server.load() is not None
        peer.said["/metrics"] = says(404)
        assert await server.load() is None
        peer.said["/health"] = says(503)
        with pytest.raises(Unavailable, match="/health answers 503"):
            await server.load()


async def test_answers_of_another_kind_are_named(peer: Peer, model: Path) -> None:
    peer.lines = ['{"choices": [{"text": "hello"}]}']
    with pytest.raises(ConfigError, match="answers text for token ids"):
        await generated(peer, model)
    peer.lines = ["what"]
    with pytest.raises(Unavailable, match="broke off: JSON is malformed"):
        await generated(peer, model)
    for token in (-1, 320, 1 << 32):
        peer.lines = [f'{{"choices": [{{"token_ids": [5, {token}]}}]}}']
        with pytest.raises(Unavailable, match="token ids are 0 to 319"):
            await generated(peer, model)
    peer.lines = ['{"choices": [{"token_ids": [5, 6, 7]}]}'] * 2
    with pytest.raises(Unavailable, match="broke off: it sends more than the 4 tokens that it was asked for"):
        await generated(peer, model)
    peer.said["/v1/completions"] = says(400, '{"error": "too long"}')
    with pytest.raises(InvalidRequest, match=r"answers 400 .*too long"):
        await generated(peer, model)
    peer.said["/v1/completions"] = says(200, "data: " + "x" * (9 << 20))
    with pytest.raises(Unavailable, match="broke off"):
        await generated(peer, model)


async def test_an_answer_that_is_not_utf8_or_nested_too_deeply_is_named(peer: Peer, model: Path) -> None:
    async def latin(_: web.Request) -> web.StreamResponse:
        return web.Response(body=b'{"data": [{"id": "\xe9"}]}')

    peer.said["/v1/models"] = latin
    with pytest.raises(ConfigError, match="/v1/models answers no JSON object"):
        await facts(peer, model)
    del peer.said["/v1/models"]
    peer.lines = ['{"choices": [], "more": ' + "[" * 100_000]
    with pytest.raises(Unavailable, match="broke off"):
        await generated(peer, model)


async def test_what_no_attached_server_can_do_is_refused_by_name(peer: Peer, model: Path) -> None:
    lora = Submit("r", 1, "f", pack_tokens([1]), 1, Sampling(max_tokens=4), 9.0, lora="poet@0123456789abcdef")
    with pytest.raises(InvalidRequest, match=r"^lora: poet"):
        await generated(peer, model, lora)
    done = Submit("r", 1, "f", pack_tokens([1] * 5), 1, Sampling(max_tokens=4), 9.0)
    with pytest.raises(InvalidRequest, match=r"^sampling\.max_tokens: "):
        await generated(peer, model, done)
