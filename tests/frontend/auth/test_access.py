"""API keys over HTTP and NATS in a whole frontend: which requests are accepted, how many, and the effect on others."""

from __future__ import annotations

import asyncio
import gc
import hashlib
import json
import logging
import re
import tracemalloc
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest

from services.frontend.auth import file_reload
from services.frontend.auth.access import HEADER
from services.frontend.config import AccessConfig, LimitsConfig
from services.frontend.models import preprocess
from shared import subjects
from shared.bus.contract import LAST_HEADER
from shared.bus.memory_bus import MemoryBus
from shared.errors import ConfigError
from shared.messages.select import SelectRefused
from tests.frontend.peers import CONTEXT, DEADLINE_S, MODEL, NAMESPACE, World, clients, world
from tests.tiny_model import write_tiny_model

ALICE, BOB = "hr-alices-own-key", "hr-bobs-own-key"
BODY: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 50}
CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def bearer(key: str) -> dict[str, str]:
    return {HEADER: f"Bearer {key}"}


class KeysFile:
    """The file of `access.keys_file`: alice, with limits, and bob, without."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "keys.toml"
        self.config = AccessConfig(keys_file=str(self.path))

    def write(self, **limits: int) -> AccessConfig:
        settings = "".join(f", {name} = {value}" for name, value in limits.items())
        self.path.write_text(
            f'alice = {{ sha256 = "{hashlib.sha256(ALICE.encode()).hexdigest()}"{settings} }}\n'
            f'bob = {{ sha256 = "{hashlib.sha256(BOB.encode()).hexdigest()}" }}\n'
        )
        return self.config


@pytest.fixture
def keys(tmp_path: Path) -> KeysFile:
    return KeysFile(tmp_path)


async def ask_nats(
    w: World,
    operation: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    bus: MemoryBus | None = None,
) -> tuple[Any, Mapping[str, str]]:
    """Return the payload and the headers of the last message."""
    subject = subjects.client(NAMESPACE, operation)
    payload = json.dumps(body).encode()
    stream = (bus or MemoryBus(w.broker)).stream(subject, payload, idle_timeout_s=DEADLINE_S, headers=headers)
    async with stream as messages:
        last = [message async for message in messages][-1]
    assert last.headers[LAST_HEADER] == "true"
    return json.loads(last.payload), last.headers


# --- who is let in


@pytest.mark.parametrize("headers", [{}, {HEADER: ALICE}, {HEADER: "Basic eDp5"}, bearer("hr-nobodys"), bearer(" ")])
async def test_without_a_good_key_it_is_401_in_openais_shape_at_every_path_and_both_doors(
    directory: Path, keys: KeysFile, headers: dict[str, str]
) -> None:
    async with world(directory, access=keys.write()) as w, clients(w) as (_, http):
        for method, path in (
            ("POST", "/v1/chat/completions"),
            ("POST", "/v1/completions"),
            ("POST", "/tokenize"),
            ("POST", "/detokenize"),
            ("GET", "/v1/models"),
            ("GET", f"/v1/models/{MODEL}"),
            ("GET", "/v1/nothing"),
            ("GET", "/v1/../v1/models"),
            ("GET", "/%761/models"),
            ("DELETE", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/"),
        ):
            async with http.request(method, path, headers=headers, data=b"{" * (method == "POST")) as response:
                assert (path, response.status) == (path, 401)
                assert response.headers["WWW-Authenticate"] == "Bearer"
                error = (await response.json())["error"]
            assert error["type"] == "invalid_request_error"
            assert error["code"] == ("invalid_api_key" if "nobodys" in headers.get(HEADER, "") else None)
        for operation, body in (("chat", CHAT), ("completions", BODY), ("models", {}), ("tokenize", BODY)):
            answer, said = await ask_nats(w, operation, body, headers)
            assert (answer["error"], said["Headrace-Status"]) == (error, "401")
        assert w.router.asked.all == []


async def test_the_expect_header_is_checked_after_the_key(directory: Path, keys: KeysFile) -> None:
    async with world(directory, access=keys.write()) as w, clients(w) as (_, http):
        for headers, status in (({}, 401), (bearer(ALICE), 417)):
            expecting = {**headers, "Expect": "wonders"}
            async with http.post("/v1/completions", json=BODY, headers=expecting) as response:
                assert response.status == status
                assert (await response.json())["error"]["type"] == "invalid_request_error"


async def test_with_a_key_everything_is_as_without_at_both_doors(directory: Path, keys: KeysFile) -> None:
    async with world(directory, access=keys.write()) as w, clients(w, ALICE) as (client, _):
        w.say("hello alice")
        answer = await client.completions.create(**BODY)
        assert answer.choices[0].text == "hello alice"
        stream = await client.chat.completions.create(**CHAT, stream=True)
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == "hello alice"
        assert [model.id async for model in client.models.list()] == [MODEL]
        whole, _ = await ask_nats(w, "chat", CHAT, bearer(ALICE))
        assert whole["choices"][0]["message"]["content"] == "hello alice"
        models, _ = await ask_nats(w, "models", {}, bearer(ALICE))
        assert models["data"][0]["id"] == MODEL


async def test_the_official_client_raises_what_it_raises_for_openais_own_refusals(
    directory: Path, keys: KeysFile
) -> None:
    async with world(directory, access=keys.write(requests_per_minute=1)) as w:
        w.say("x")
        async with clients(w, "hr-wrong") as (client, _):
            with pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
                await client.completions.create(**BODY)
        async with clients(w, ALICE) as (client, _):
            await client.completions.create(**BODY)
            with pytest.raises(openai.RateLimitError) as refusal:
                await client.completions.create(**BODY)
            assert refusal.value.code == "rate_limit_exceeded"
            assert 55 < int(refusal.value.response.headers["Retry-After"]) <= 60


async def test_without_a_keys_file_no_key_is_needed_and_any_key_is_accepted(directory: Path) -> None:
    async with world(directory) as w, clients(w) as (_, http):
        w.say("fine")
        for headers in ({}, bearer("whatever"), {HEADER: "nonsense"}):
            async with http.post("/v1/completions", json=BODY, headers=headers) as response:
                assert response.status == 200
                assert not [name for name in response.headers if name.lower().startswith("x-ratelimit")]


async def test_a_balancer_needs_no_key_and_learns_nothing_but_whether_all_is_well(
    directory: Path, keys: KeysFile
) -> None:
    async with world(directory, access=keys.write()) as w, clients(w) as (_, http):
        async with http.get("/live") as response:
            assert response.status == 200
        async with http.get("/health") as response:
            assert await response.json() == {"ready": True}
        async with http.get("/metrics", headers=bearer(ALICE)) as response:
            assert response.status == 404, "they are at [observe]: they tell of other keys"


async def test_thousands_of_wrong_keys_leave_no_state(
    directory: Path, keys: KeysFile, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with world(directory, access=keys.write()) as w, aiohttp.ClientSession(w.url) as http:
        bus = MemoryBus(w.broker)

        async def wrong(numbers: range) -> None:
            for number in numbers:
                async with http.post("/v1/completions", data=b"x" * 100, headers=bearer(f"hr-{number}")) as response:
                    assert response.status == 401

        async def wrong_by_nats(numbers: range) -> None:
            for number in numbers:
                _, headers = await ask_nats(w, "completions", BODY, bearer(f"hr-{number}"), bus)
                assert headers["Headrace-Status"] == "401"

        await wrong(range(100))
        await wrong_by_nats(range(100))
        series = len(list(w.registry.collect()))
        tracemalloc.start()
        try:
            await asyncio.gather(*(wrong(range(at, 400, 8)) for at in range(8)))  # with all connections open
            gc.collect()
            before, _ = tracemalloc.get_traced_memory()
            await asyncio.gather(*(wrong(range(at, 3_000, 8)) for at in range(8)))
            await wrong_by_nats(range(500))
            gc.collect()
            after, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert after - before < 105_000, "30 bytes each would be as much"
        assert len(list(w.registry.collect())) == series
        assert w.metric("headrace_unauthorized_requests_total", reason="unknown") == 4_100
        assert w.metric("headrace_inflight_requests") == 0
        w.say("fine")
        async with http.post("/v1/completions", json=BODY, headers=bearer(ALICE)) as response:
            assert response.status == 200
    assert "hr-" not in caplog.text


async def test_no_key_is_ever_logged(directory: Path, keys: KeysFile, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with world(directory, access=keys.write(requests_per_minute=2)) as w, clients(w) as (_, http):
        w.say("x")
        for key in (ALICE, ALICE, ALICE, "hr-nobodys", BOB):
            for path, data in (("/v1/completions", json.dumps(BODY)), ("/v1/chat/completions", "{"), ("/v1/x", "")):
                async with http.post(path, data=data, headers=bearer(key)) as response:
                    assert key not in await response.text()
            await ask_nats(w, "chat", CHAT, bearer(key))
    for key in (ALICE, BOB, "hr-nobodys"):
        assert key not in caplog.text
        assert hashlib.sha256(key.encode()).hexdigest() not in caplog.text


# --- the file


async def test_keys_come_and_go_while_it_runs(directory: Path, keys: KeysFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_reload, "POLL_S", 0.01)
    async with world(directory, access=keys.write()) as w, clients(w) as (_, http):
        w.say("x")

        async def until(key: str, status: int) -> None:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    async with http.get("/v1/models", headers=bearer(key)) as response:
                        if response.status == status:
                            return

        await until(ALICE, 200)
        w.workers[0].output = None
        running = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer(ALICE)))
        [generate] = await w.workers[0].generates.at_least(1)
        file = keys.path.read_text()
        keys.path.write_text(file.replace("alice", "carol").replace(ALICE, "x").splitlines()[1])
        await until(ALICE, 401)
        await until(BOB, 200)
        await w.workers[0].send(generate, 0, [*w.ids("whole"), 2], "stop")
        async with await running as response:
            assert response.status == 200, "what runs goes on"
        broken = keys.path.with_name("broken")
        broken.write_text("this is no keys' file")
        broken.rename(keys.path)  # in place it could be seen empty, which refuses all keys
        await w.counted("headrace_inflight_requests", 0)
        await stale(w, 1)
        await until(BOB, 200)
        keys.path.write_text(file)
        await until(ALICE, 200)
        assert w.metric("headrace_stale_files", file="keys") == 0


async def stale(w: World, value: int) -> None:
    await w.until("/health", lambda _: w.metric("headrace_stale_files", file="keys") == value)


async def test_an_empty_keys_file_is_logged_and_refuses_every_request(
    directory: Path, keys: KeysFile, caplog: pytest.LogCaptureFixture
) -> None:
    keys.path.write_text("")
    async with world(directory, access=keys.config) as w, clients(w, ALICE) as (client, _):
        assert f"{keys.path} has no entry" in caplog.text
        with pytest.raises(openai.AuthenticationError):
            await client.models.list()


@pytest.mark.parametrize(("file", "said"), [(None, "No such file"), ("alice = 1", "alice: Expected `object`")])
async def test_a_keys_file_that_cannot_be_read_ends_the_start(
    directory: Path, keys: KeysFile, file: str | None, said: str
) -> None:
    if file is not None:
        keys.path.write_text(file)
    with pytest.raises(ConfigError, match=f"access.keys_file .*keys.toml: .*{said}"):
        async with world(directory, access=keys.config):
            pass


# --- how much


FILLED = 100_000 / 60 * 30
"""Tokens that a limit of 100,000 per minute regains in half a minute, by time alone."""


async def test_what_is_left_is_in_the_headers_of_every_answer_at_both_doors(directory: Path, keys: KeysFile) -> None:
    access = keys.write(requests_per_minute=100, tokens_per_minute=100_000)
    async with world(directory, access=access) as w, clients(w) as (_, http):
        said = w.say("so it is")
        async with http.post("/v1/completions", json=BODY, headers=bearer(ALICE)) as response:
            assert response.headers["x-ratelimit-limit-requests"] == "100"
            assert response.headers["x-ratelimit-remaining-requests"] == "99"
            assert response.headers["x-ratelimit-reset-requests"].endswith("ms")
            prompt = (await response.json())["usage"]["prompt_tokens"]
            left = int(response.headers["x-ratelimit-remaining-tokens"])
            assert 0 <= left - (100_000 - prompt - 50) < FILLED
        async with http.post("/v1/completions", json={**BODY, "stream": True}, headers=bearer(ALICE)) as response:
            assert response.headers["x-ratelimit-remaining-requests"] == "98"
            await response.read()
        async with http.post("/v1/completions", data=b"{", headers=bearer(ALICE)) as response:
            assert (response.status, response.headers["x-ratelimit-remaining-requests"]) == (400, "97")
        _, headers = await ask_nats(w, "completions", BODY, bearer(ALICE))
        assert headers["x-ratelimit-remaining-requests"] == "96"
        spent = 3 * (prompt + len(said) + 1)
        async with http.get("/v1/models", headers=bearer(ALICE)) as response:
            left = int(response.headers["x-ratelimit-remaining-tokens"])
        assert 0 <= left - (100_000 - spent) < FILLED, "the answers were shorter than asked for"
        for kind, tokens in (("prompt", 3 * prompt), ("output", 3 * (len(said) + 1))):
            assert w.metric("headrace_key_tokens_total", key="alice", kind=kind) == tokens


async def test_a_key_at_its_limit_is_429_at_both_doors_and_other_keys_notice_nothing(
    directory: Path, keys: KeysFile
) -> None:
    access = keys.write(requests_per_minute=2)
    async with world(directory, access=access) as w, clients(w) as (_, http):
        w.say("fine")
        statuses: list[int] = []
        answer: Any = None
        headers: Mapping[str, str] = {}
        for _ in range(50):
            async with http.post("/v1/completions", data=b"not even JSON", headers=bearer(ALICE)) as response:
                statuses.append(response.status)
            answer, headers = await ask_nats(w, "completions", BODY, bearer(ALICE))
            async with http.post("/v1/completions", json=BODY, headers=bearer(BOB)) as response:
                assert response.status == 200
        assert statuses == [400] + [429] * 49
        assert (answer["error"]["type"], answer["error"]["code"]) == ("requests", "rate_limit_exceeded")
        assert (headers["Headrace-Status"], headers["x-ratelimit-remaining-requests"]) == ("429", "0")
        assert 0 < int(headers["Retry-After"]) <= 30
        assert len(w.router.asked.all) == 51, "alice's one over NATS, and bob's; nothing was done for those refused"
        assert w.metric("headrace_key_refused_requests_total", key="alice", reason="requests") == 98
        assert w.metric("headrace_key_requests_total", key="bob") == 50


async def test_tokens_beyond_the_limit_are_refused_before_they_are_routed_and_owed_ones_before_they_are_read(
    directory: Path, keys: KeysFile
) -> None:
    access = keys.write(tokens_per_minute=60)
    async with world(directory, access=access) as w, clients(w) as (_, http):
        w.workers[0].output = w.workers[1].output = [5] * 2000
        async with http.post("/v1/completions", json=BODY, headers=bearer(ALICE)) as response:
            assert response.status == 200
        async with http.post("/v1/completions", json=BODY, headers=bearer(ALICE)) as response:
            error = (await response.json())["error"]
            assert (response.status, error["type"]) == (429, "tokens")
            assert "on tokens per min: Limit 60, Used " in error["message"]
        assert len(w.router.asked.all) == 1
        keys.write()
        async with http.post("/v1/chat/completions", json={**CHAT}, headers=bearer(BOB)) as response:
            assert (await response.json())["usage"]["completion_tokens"] > 1000


async def test_an_answer_longer_than_what_is_left_is_owed(directory: Path, keys: KeysFile) -> None:
    async with world(directory, access=keys.write(tokens_per_minute=200)) as w, clients(w) as (_, http):
        w.workers[0].output = [5] * 1000
        async with http.post("/v1/chat/completions", json=CHAT, headers=bearer(ALICE)) as response:
            assert response.status == 200
            await response.read()
        async with http.post("/v1/chat/completions", data=b"not read", headers=bearer(ALICE)) as response:
            assert response.status == 429
            assert int(response.headers["Retry-After"]) > 200
            assert response.headers["x-ratelimit-remaining-tokens"] == "0"


async def test_all_choices_are_paid_for_and_each_prompt_once(directory: Path, keys: KeysFile) -> None:
    async with world(directory, access=keys.write(tokens_per_minute=200)) as w, clients(w) as (_, http):
        w.workers[0].output = [5] * 50
        body = {**BODY, "prompt": [[5] * 10, [6] * 20], "n": 3, "max_tokens": 20}
        async with http.post("/v1/completions", json=body, headers=bearer(ALICE)) as response:
            assert response.status == 200
            assert len((await response.json())["choices"]) == 6
        for kind, tokens in (("prompt", 30), ("output", 120)):
            assert w.metric("headrace_key_tokens_total", key="alice", kind=kind) == tokens
        async with http.post("/v1/completions", json=body, headers=bearer(ALICE)) as response:
            assert response.status == 429
            assert "Requested 150" in (await response.json())["error"]["message"]


LONG = "7" * 200_000
LONG_CHAT = [{"role": "user", "content": LONG}]
TOO_LONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": LONG_CHAT}),
    ("/v1/chat/completions", {"messages": CHAT["messages"] * 4000}),
    ("/v1/chat/completions", {"messages": [*CHAT["messages"], *LONG_CHAT], "stream": True}),
    ("/v1/completions", {"prompt": LONG}),
    ("/v1/completions", {"prompt": ["hello", LONG]}),
    ("/v1/completions", {"prompt": "hello", "suffix": LONG}),
    ("/v1/responses", {"input": LONG}),
    ("/v1/embeddings", {"input": ["hello", LONG]}),
    ("/v1/messages", {"messages": LONG_CHAT, "max_tokens": 5}),
    ("/v1/messages/count_tokens", {"messages": LONG_CHAT}),
    ("/tokenize", {"prompt": LONG}),
    ("/tokenize", {"messages": LONG_CHAT}),
    ("/api/chat", {"messages": LONG_CHAT}),
    ("/api/generate", {"prompt": LONG}),
    ("/api/embed", {"input": LONG}),
]
"""Bodies at each door with a text that is too long for it."""


async def test_a_text_that_is_too_long_is_not_tokenised_at_any_door_and_its_key_pays(
    directory: Path, keys: KeysFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preprocess, "TEXT_TOKENS_LIMIT", CONTEXT + 1)  # that of texts that are only counted
    directory = write_tiny_model(directory.parent / "fim", marks=("<fim_prefix>", "<fim_suffix>", "<fim_middle>"))
    access = keys.write(tokens_per_minute=1_000_000)
    async with world(directory, access=access, embedding_size=8) as w, clients(w) as (_, http):
        w.say("fine")
        left = 1_000_000
        for path, body in TOO_LONG:
            async with http.post(path, json={"model": MODEL, **body}, headers=bearer(ALICE)) as response:
                assert response.status == 400, (path, await response.text())
                assert re.search("more than 204[89] tokens", await response.text()), path
                now = int(response.headers["x-ratelimit-remaining-tokens"])
            assert now <= left - CONTEXT + FILLED, path
            left = now
        for operation, body in (("chat", {**CHAT, "messages": LONG_CHAT}), ("completions", {**BODY, "prompt": LONG})):
            answer, headers = await ask_nats(w, operation, body, bearer(ALICE))
            assert answer["error"]["code"] == "context_length_exceeded"
            assert int(headers["x-ratelimit-remaining-tokens"]) <= left - CONTEXT + FILLED
            left = int(headers["x-ratelimit-remaining-tokens"])
        assert w.router.asked.all == []
        for kind in ("prompt", "output"):
            assert w.metric("headrace_key_tokens_total", key="alice", kind=kind) == 0, "nothing was computed"


async def test_a_request_that_is_refused_after_it_was_tokenised_pays_and_one_that_is_counted_does_not(
    directory: Path, keys: KeysFile
) -> None:
    access, text = keys.write(tokens_per_minute=100_000), "7" * 1000
    async with world(directory, access=access) as w, clients(w) as (_, http):
        async with http.post("/tokenize", json={"model": MODEL, "prompt": text}, headers=bearer(ALICE)) as response:
            assert (response.status, response.headers["x-ratelimit-remaining-tokens"]) == (200, "100000")
        refused = {**BODY, "prompt": text, "max_tokens": 2000}
        async with http.post("/v1/completions", json=refused, headers=bearer(ALICE)) as response:
            assert response.status == 400
            left = int(response.headers["x-ratelimit-remaining-tokens"])
            assert 0 <= left - (100_000 - 1000) < FILLED


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "7" * 1000, "max_tokens": 1}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "7" * 1000}], "max_tokens": 1}),
        ("/v1/responses", {"input": "7" * 1000, "max_output_tokens": 1}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "7" * 1000}], "max_tokens": 1}),
        ("/v1/embeddings", {"input": "7" * 1000}),
    ],
)
async def test_a_key_over_its_limit_pays_for_what_is_tokenised_until_nothing_of_it_is_read(
    directory: Path, keys: KeysFile, path: str, body: dict[str, Any]
) -> None:
    access = keys.write(tokens_per_minute=1800)
    async with world(directory, access=access, embedding_size=8) as w, clients(w) as (_, http):
        w.say("fine")
        for status in (200, 429):
            async with http.post(path, json={"model": MODEL, **body}, headers=bearer(ALICE)) as response:
                assert response.status == status, await response.text()
        assert int(response.headers["Retry-After"]) > 30, "until the prompt that was refused is paid for, too"
        async with http.post(path, data=b"not read", headers=bearer(ALICE)) as response:
            assert (response.status, response.headers["x-ratelimit-remaining-tokens"]) == (429, "0")
        assert w.metric("headrace_key_refused_requests_total", key="alice", reason="tokens") == 2


async def test_a_request_that_the_frontend_has_no_room_for_pays_only_if_it_was_tokenised(
    directory: Path, keys: KeysFile
) -> None:
    access, limits = keys.write(tokens_per_minute=1500), LimitsConfig(tokens=1000, drain_s=0.0)
    async with world(directory, access=access, limits=limits) as w, clients(w) as (_, http):
        w.workers[0].output = None
        running = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer(BOB)))
        await w.workers[0].generates.at_least(1)
        for prompt, most, cost in (("hello", 1000, 0), ("7" * 1000, 1, 1000)):
            body = {**BODY, "prompt": prompt, "max_tokens": most}
            async with http.post("/v1/completions", json=body, headers=bearer(ALICE)) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (429, "overloaded")
                left = int(response.headers["x-ratelimit-remaining-tokens"])
            assert 1500 - cost <= left < 2250 - cost, "less what comes back meanwhile"
        running.cancel()


async def test_requests_at_once_are_bounded_and_a_client_that_goes_makes_room(directory: Path, keys: KeysFile) -> None:
    async with world(directory, access=keys.write(concurrency=2)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        running = [
            asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer(ALICE))) for _ in range(2)
        ]
        await w.workers[0].generates.at_least(2)
        async with http.post("/v1/completions", json=BODY, headers=bearer(ALICE)) as response:
            error = (await response.json())["error"]
            assert (response.status, response.headers["Retry-After"]) == (429, "1")
            assert error["message"] == "2 requests of the key alice are running already; wait for one to end"
        running[0].cancel()
        await w.counted("headrace_inflight_requests", 1)
        third = asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer(ALICE)))
        generates = await w.workers[0].generates.at_least(3)
        for generate in generates[1:]:
            await w.workers[0].send(generate, 0, [5, 2], "stop")
        for task in (running[1], third):
            async with await task as response:
                assert response.status == 200


async def test_one_key_that_sends_all_it_can_does_not_fill_the_frontend(directory: Path, keys: KeysFile) -> None:
    limits = LimitsConfig(requests=18, drain_s=0.0)
    async with world(directory, access=keys.write(), limits=limits) as w, clients(w) as (_, http):
        w.workers[0].output = None
        flood = [asyncio.create_task(http.post("/v1/completions", json=BODY, headers=bearer(ALICE))) for _ in range(40)]
        await w.workers[0].generates.at_least(16)
        done, running = set[asyncio.Task[aiohttp.ClientResponse]](), set(flood)
        while len(running) > 16:
            more, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            done |= more
        assert {task.result().status for task in done} == {429}
        w.say("bob is served")
        async with http.post("/v1/completions", json=BODY, headers=bearer(BOB)) as response:
            assert (await response.json())["choices"][0]["text"] == "bob is served"
        assert w.metric("headrace_key_refused_requests_total", key="alice", reason="share") == 24
        for task in running:
            task.cancel()


async def test_a_request_that_no_worker_took_costs_its_key_no_tokens(directory: Path, keys: KeysFile) -> None:
    async with world(directory, access=keys.write(tokens_per_minute=100)) as w, clients(w) as (_, http):
        w.router.answer = lambda one: SelectRefused(one.request, one.attempt, "overloaded", "busy")
        for _ in range(5):
            async with http.post("/v1/completions", json=BODY, headers=bearer(ALICE)) as response:
                assert (response.status, (await response.json())["error"]["code"]) == (429, "overloaded")
            assert w.metric("headrace_key_tokens_total", key="alice", kind="prompt") == 0


async def test_a_request_with_a_short_deadline_pays_for_the_prompt_that_was_computed(
    directory: Path, keys: KeysFile
) -> None:
    async with world(directory, access=keys.write(tokens_per_minute=1000)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        async with http.post("/v1/completions", json={**BODY, "deadline_s": 1.0}, headers=bearer(ALICE)) as response:
            assert response.status == 504
        [generate] = w.workers[0].generates.all
        assert w.metric("headrace_key_tokens_total", key="alice", kind="prompt") == generate.prompt_tokens


async def test_a_client_that_goes_in_the_middle_pays_for_its_prompt_and_for_what_it_got(
    directory: Path, keys: KeysFile
) -> None:
    async with world(directory, access=keys.write(tokens_per_minute=1000)) as w, clients(w) as (_, http):
        w.workers[0].output = None
        body = {**BODY, "stream": True, "max_tokens": 500}
        asking = asyncio.create_task(http.post("/v1/completions", json=body, headers=bearer(ALICE)))
        [generate] = await w.workers[0].generates.at_least(1)
        await w.workers[0].send(generate, 0, [5] * 7)
        response = await asking
        await response.content.readany()
        response.close()
        await w.counted("headrace_inflight_requests", 0)
        for kind, tokens in (("prompt", generate.prompt_tokens), ("output", 7)):
            assert w.metric("headrace_key_tokens_total", key="alice", kind=kind) == tokens
        async with http.get("/v1/models", headers=bearer(ALICE)) as response:
            assert int(response.headers["x-ratelimit-remaining-tokens"]) >= 1000 - generate.prompt_tokens - 7


async def test_series_by_key_are_those_of_keys_in_the_file(
    directory: Path, keys: KeysFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_reload, "POLL_S", 0.01)
    async with world(directory, access=keys.write()) as w, clients(w) as (_, http):
        w.say("x")
        async with http.post("/v1/completions", json=BODY, headers=bearer(ALICE)) as response:
            assert response.status == 200
        assert w.metric("headrace_key_requests_total", key="alice") == 1
        keys.path.write_text("")
        labels = {"key": "alice"}
        await w.until("/health", lambda _: w.registry.get_sample_value("headrace_key_requests_total", labels) is None)


# --- names, and headers of every answer


async def test_over_nats_too_a_request_may_name_itself(directory: Path) -> None:
    async with world(directory) as w:
        w.say("x")
        for body in (BODY, {**BODY, "stream": True}, {"prompt": 3}):
            _, headers = await ask_nats(w, "completions", body, {"X-Request-Id": "mine.7"})
            assert headers["X-Request-Id"] == "mine.7"
        assert w.router.asked.all[0].request.startswith("mine.7-")
        _, headers = await ask_nats(w, "completions", BODY, {"X-Request-Id": "not fit"})
        assert headers["X-Request-Id"] == w.router.asked.all[-1].request
