"""The frontend as a process of its own, on a real NATS server and the file back end of discovery."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import re
import signal
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import nats
import pytest
from tokenizers import Tokenizer

from services.frontend.__main__ import check_files, drain_limit_s
from services.frontend.config import AccessConfig, FrontendConfig, HttpConfig, LimitsConfig, PickerConfig
from shared import subjects
from shared.bus.contract import LAST_HEADER
from shared.bus.nats_bus import connect
from shared.config import NatsConfig
from shared.discovery.file import FileDiscovery
from shared.errors import ConfigError
from tests.frontend.peers import DEADLINE_S, MODEL, ScriptedRouter, ScriptedWorker, card_entry, instance_entry
from tests.servers import free_port

NAMESPACE = "test"
CERTIFICATES = Path(__file__).parent / "certificates"


@asynccontextmanager
async def process(
    tmp_path: Path, nats_url: str, more: str = "", http: str = ""
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A frontend process and its base URL; `more` is TOML, and `http` is of that table."""
    port = free_port()
    config = tmp_path / "frontend.toml"
    config.write_text(
        f'namespace = "{NAMESPACE}"\n[nats]\nurl = "{nats_url}"\n[http]\nport = {port}\n{http}'
        f'[discovery]\nbackend = "file"\npath = "{tmp_path / "discovery"}"\n{more}'
    )
    running = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "services.frontend", "--config", str(config), cwd=Path(__file__).parents[2]
    )
    try:
        yield running, f"http://127.0.0.1:{port}"
    finally:
        if running.returncode is None:
            running.kill()
            await running.wait()


async def healthy(http: aiohttp.ClientSession) -> None:
    while True:
        try:
            async with http.get("/health") as response:
                if response.status == 200:
                    return
        except aiohttp.ClientConnectorError:
            pass
        await asyncio.sleep(0.05)  # another process: there is nothing to wait on


async def frontend_keys(discovery: FileDiscovery) -> list[str]:
    return [key for key in await discovery.list(f"/headrace/{NAMESPACE}/") if "/instances/frontend/" in key]


async def registered(discovery: FileDiscovery) -> None:
    """Wait until a frontend is in discovery: it answers before that, since it need not wait for etcd."""
    while True:
        if await frontend_keys(discovery):
            return
        await asyncio.sleep(0.05)


async def test_a_process_answers_over_http_and_to_a_plain_nats_client_and_drains(
    directory: Path, tmp_path: Path, nats_url: str
) -> None:
    bus = await connect(NatsConfig(url=nats_url), "peers")
    router, worker = ScriptedRouter(bus, "r1", ["w1"]), ScriptedWorker(bus, "w1")
    await router.start()
    await worker.start()
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    worker.output = [*tokenizer.encode("grüße 🚰", add_special_tokens=False).ids, 2]
    discovery = FileDiscovery(tmp_path / "discovery")
    entries = instance_entry("router", "r1") | instance_entry("worker", "w1") | card_entry("w1", directory)
    registration = await discovery.register(lambda _epoch: entries)
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    async with (
        asyncio.timeout(3 * DEADLINE_S),
        process(tmp_path, nats_url) as (running, url),
        aiohttp.ClientSession(url) as http,
    ):
        await healthy(http)
        async with http.post("/v1/chat/completions", json=body) as response:
            assert (await response.json())["choices"][0]["message"]["content"] == "grüße 🚰"
        async with http.get("/metrics") as response:
            assert "headrace_requests_total{" in await response.text()

        client = await nats.connect(nats_url)
        inbox = client.new_inbox()
        replies = await client.subscribe(inbox)
        payload = json.dumps(body | {"stream": True}).encode()
        await client.publish(subjects.client(NAMESPACE, "chat"), payload, reply=inbox)
        text = ""
        async for message in replies.messages:
            [choice] = json.loads(message.data)["choices"]
            text += choice["delta"].get("content", "")
            if message.headers is not None and LAST_HEADER in message.headers:
                break
        assert text == "grüße 🚰"
        await client.close()

        await registered(discovery)
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0
        assert not await frontend_keys(discovery)
    await registration.close()
    await discovery.close()
    await bus.drain()


async def test_a_process_asks_for_keys_over_tls_and_over_a_real_nats(
    directory: Path, tmp_path: Path, nats_url: str
) -> None:
    bus = await connect(NatsConfig(url=nats_url), "peers")
    router, worker = ScriptedRouter(bus, "r1", ["w1"]), ScriptedWorker(bus, "w1")
    await router.start()
    await worker.start()
    worker.output = [5, 6, 2]
    discovery = FileDiscovery(tmp_path / "discovery")
    entries = instance_entry("router", "r1") | instance_entry("worker", "w1") | card_entry("w1", directory)
    registration = await discovery.register(lambda _epoch: entries)
    keys = tmp_path / "keys.json"
    keys.write_text(json.dumps({"alice": {"sha256": hashlib.sha256(b"a key").hexdigest(), "concurrency": 1}}))
    tls = f'tls_cert = "{CERTIFICATES / "one.pem"}"\ntls_key = "{CERTIFICATES / "one.key"}"\n'
    trusting = ssl.create_default_context(cafile=str(CERTIFICATES / "one.pem"))
    body = {"model": MODEL, "prompt": "hello"}
    good, wrong = {"Authorization": "Bearer a key"}, {"Authorization": "Bearer another"}
    async with (
        asyncio.timeout(3 * DEADLINE_S),
        process(tmp_path, nats_url, f'[access]\nkeys_file = "{keys}"\n', http=tls) as (running, url),
        aiohttp.ClientSession(url.replace("http:", "https:"), connector=aiohttp.TCPConnector(ssl=trusting)) as http,
    ):
        await healthy(http)
        for headers, status in ((good, 200), (wrong, 401), ({}, 401)):
            async with http.post("/v1/completions", json=body, headers=headers) as response:
                assert response.status == status
        client = await nats.connect(nats_url)
        for headers, refused in ((good, None), (wrong, "401")):
            subject = subjects.client(NAMESPACE, "completions")
            reply = await client.request(subject, json.dumps(body).encode(), timeout=DEADLINE_S, headers=headers)
            assert reply.headers is not None
            assert reply.headers.get("Headrace-Status") == refused
            assert LAST_HEADER in reply.headers
        await client.close()
        running.send_signal(signal.SIGTERM)
        assert await running.wait() == 0
    await registration.close()
    await discovery.close()
    await bus.drain()


@pytest.mark.parametrize(("file", "said"), [("", ""), ("alice = 1", "alice: Expected `object`, got `int`")])
async def test_a_process_whose_keys_file_is_broken_at_the_start_ends_and_says_so(
    tmp_path: Path, nats_url: str, capfd: pytest.CaptureFixture[str], file: str, said: str
) -> None:
    keys = tmp_path / "keys.toml"
    if file:
        keys.write_text(file)
    async with (
        asyncio.timeout(3 * DEADLINE_S),
        process(tmp_path, nats_url, f'[access]\nkeys_file = "{keys}"\n') as (running, _),
    ):
        assert await running.wait() == 2
    told = capfd.readouterr().err
    assert f"access.keys_file {keys}" in told
    assert (said or "No such file or directory") in told


async def test_a_frontend_that_ends_tells_balancers_and_serves_until_its_delay_is_over(
    tmp_path: Path, nats_url: str
) -> None:
    """The delay is longer than any test, and a second signal ends it."""
    async with (
        asyncio.timeout(3 * DEADLINE_S),
        process(tmp_path, nats_url, http="drain_delay_s = 3600\n") as (one, url),
    ):
        await says(url, "no router is there")
        one.send_signal(signal.SIGTERM)
        await says(url, "draining")
        closes = False
        while not closes:  # the process leaves NATS first
            async with aiohttp.ClientSession(url) as http, http.get("/v1/models") as response:
                assert response.status == 200
                closes = response.headers.get("Connection") == "close"
        one.send_signal(signal.SIGTERM)
        assert await one.wait() == 1


async def says(url: str, reason: str) -> None:
    """Until /health has it, each time on a connection of its own."""
    while True:
        try:
            async with aiohttp.ClientSession(url) as http, http.get("/health") as response:
                if reason in (await response.json())["reasons"]:
                    return
        except aiohttp.ClientConnectorError:
            pass
        await asyncio.sleep(0.05)  # another process: there is nothing to wait on


def test_a_frontend_is_ended_by_force_only_after_its_delay_and_its_drain() -> None:
    config = FrontendConfig(http=HttpConfig(drain_delay_s=30.0), limits=LimitsConfig(drain_s=100.0))
    assert drain_limit_s(config) > 130.0


def with_files(*, cert: str = "", key: str = "", keys: str = "", host: str = "127.0.0.1") -> FrontendConfig:
    return FrontendConfig(http=HttpConfig(host=host, tls_cert=cert, tls_key=key), access=AccessConfig(keys_file=keys))


def with_picker(tls_cert: str, tls_key: str, tls_ca: str = "") -> FrontendConfig:
    return FrontendConfig(picker=PickerConfig(tls_cert=tls_cert, tls_key=tls_key, tls_ca=tls_ca))


def test_the_check_passes_files_that_the_frontend_can_use(tmp_path: Path) -> None:
    check_files(with_files())
    (keys := tmp_path / "keys.toml").write_text(f'alice = {{ sha256 = "{"0" * 64}" }}\n')
    check_files(with_files(cert=str(CERTIFICATES / "one.pem"), key=str(CERTIFICATES / "one.key"), keys=str(keys)))
    check_files(with_picker(*(str(CERTIFICATES / name) for name in ("one.pem", "one.key", "two.pem"))))


def test_the_check_names_each_file_that_the_frontend_cannot_use(tmp_path: Path) -> None:
    good, key = str(CERTIFICATES / "one.pem"), str(CERTIFICATES / "one.key")
    missing, pipe, text = (str(tmp_path / name) for name in ("missing", "pipe", "text"))
    os.mkfifo(pipe)
    Path(text).write_text("[[[")
    for config, said in (
        (with_files(cert=missing, key=key), f"http.tls_cert {missing}: No such file"),
        (with_files(cert=good, key=pipe), f"http.tls_key {pipe}: not a regular file"),
        (with_files(cert=good, key=str(CERTIFICATES / "two.key")), "not a certificate and its key"),
        (with_files(keys=missing), f"access.keys_file {missing}: No such file"),
        (with_files(keys=pipe), f"access.keys_file {pipe}: not a regular file"),
        (with_files(keys=text), f"access.keys_file {text}: the file is not TOML"),
        (with_files(host="192.0.2.1"), "http.host: 192.0.2.1 is no address of this machine"),
        (
            FrontendConfig(picker=PickerConfig(host="192.0.2.1")),
            "picker.host: 192.0.2.1 is no address of this machine",
        ),
        (with_picker(tls_cert=good, tls_key=missing), f"picker.tls_key {missing}: No such file"),
        (
            with_picker(tls_cert=good, tls_key=key, tls_ca=key),
            f"picker.tls_cert {good}, picker.tls_key {key}, picker.tls_ca {key}: no certificates of authorities in PEM",
        ),
    ):
        with pytest.raises(ConfigError, match=re.escape(said)):
            check_files(config)
