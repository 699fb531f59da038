"""`headrace route` as processes: servers that run already, are away, are others, and come and go."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.authority import Authority, needs_openssl, serving
from tests.deploy.route.kube_server import PODS, POOLS, TOKEN, KubeServer, kube_serving, pod, pool, token_file
from tests.integration.stack import Up, eventually, started
from tests.picker.gateway import connected, destination
from tests.servers import free_port
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering
from tests.worker.attached.vllm_server import KEY, VllmServer
from tests.worker.vllm.environment import LIMIT_S as VLLM_LIMIT_S
from tests.worker.vllm.environment import needs_vllm

LIMIT_S = 240.0
BIND = 'mount --bind "$0" /etc/hosts && exec "$@"'
"""Gives a program another file of hosts."""
MOUNTS = bool(shutil.which("unshare")) and not (
    subprocess.run(["unshare", "-m", "sh", "-c", BIND, "/etc/hosts", "true"], capture_output=True).returncode
)


def post(url: str, body: dict[str, Any], limit_s: float = LIMIT_S, key: str = "") -> dict[str, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    asked = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(asked, timeout=limit_s) as answer:
        return dict(json.loads(answer.read()))


async def said(up: Up, *lines: str) -> None:
    """Wait until it has said all of these, each somewhere in its output."""

    def all_said() -> bool:
        assert up.process.poll() is None, "".join(up.output)
        return all(line in "".join(up.output) for line in lines)

    await asyncio.to_thread(eventually, all_said, limit_s=LIMIT_S, what=str(lines))


async def answered(up: Up, model: str = "tiny") -> dict[str, Any]:
    try:
        return await asyncio.to_thread(post, up.url, {"model": model, "prompt": "hello", "max_tokens": 2})
    except urllib.error.HTTPError as wrong:
        raise AssertionError(wrong.read().decode() + "".join(up.output) + up.logs()) from None


def listed(up: Up) -> list[str]:
    with urllib.request.urlopen(f"{up.url}/models", timeout=LIMIT_S) as answer:
        return [str(model["id"]) for model in json.loads(answer.read())["data"]]


async def test_servers_that_are_away_or_others_are_named_and_come_in_by_themselves(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", context_length=512)
    one, other, strange = (Peer(model, free_port()) for _ in range(3))
    one.models = strange.models = [{"id": "org/tiny", "root": str(model), "max_model_len": 100}]
    other.models = [{"id": "large"}]
    strange.tokens = [1, 2]
    file = tmp_path / "servers"
    file.write_text(f"{one.url}\n{other.url}\n{strange.url}\n")
    async with AsyncExitStack() as servers:
        with started(tmp_path / "state", "route", "--frontends", "1", "--routers", "1", "--file", str(file)) as up:
            await said(
                up,
                *(f"{peer.url}: left out: does not answer: Connection refused\n" for peer in (one, other, strange)),
                "waiting: none of the servers (3) serves",
            )
            await servers.enter_async_context(answering(one))
            await said(
                up, f"{one.url}: vLLM 0.32.0, model org/tiny, 64 blocks of 32 tokens, routed by what was sent; it pub"
            )
            await said(up, f"{one.url}: serves\n", "\nready ")
            for name in ("tiny", "org/tiny"):
                assert (await answered(up, name))["model"] == "tiny"
            assert await asyncio.to_thread(listed, up) == ["tiny"]
            assert {str(body["model"]) for body in one.bodies} == {"org/tiny"}
            for peer in (other, strange):
                await servers.enter_async_context(answering(peer))
            await said(
                up,
                f"{other.url}: left out: has no model {model} or org/tiny or tiny; it has large\n",
                f"{strange.url}: left out: serves another model: its tokenizer is not that of {model}\n",
            )
            other.models = one.models
            await said(up, f"{other.url}: serves\n")
            file.write_text(f"{other.url}\n")
            await said(up, f"{one.url}: not wanted any more\n", f"{strange.url}: not wanted any more\n")
            gone = f"worker-{one.url.replace('://', '-')}"
            await asyncio.to_thread(
                eventually, lambda: gone not in up.record["programs"], limit_s=LIMIT_S, what="its worker has ended"
            )
            before = len(other.bodies)
            await answered(up)
            assert len(other.bodies) == before + 1
            up.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(up.process.wait, LIMIT_S) == 0


@needs_openssl
@pytest.mark.skipif(not MOUNTS, reason="no right to mount, so that a name could have other addresses")
async def test_each_address_of_a_name_is_a_server_that_comes_and_goes_also_over_https(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny", context_length=512)
    authority, hosts, port = Authority(tmp_path), tmp_path / "hosts", free_port()
    tls, url = serving(*authority.sign("vllm.test")), f"https://vllm.test:{port}"
    peers = {address: Peer(model, port) for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4")}

    def name(*addresses: str) -> None:
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{address} vllm.test\n" for address in addresses))

    name("127.0.0.2", "127.0.0.3")
    with_hosts = ("unshare", "-m", "sh", "-c", BIND, str(hosts))
    flags = ("--model", str(model), "--ca-file", str(authority.pem))
    async with AsyncExitStack() as servers:
        for address, peer in peers.items():
            await servers.enter_async_context(answering(peer, address, tls))
        with started(tmp_path / "state", "route", url, *flags, within=with_hosts) as up:
            await said(up, f"{url} at 127.0.0.2: serves\n", f"{url} at 127.0.0.3: serves\n", "\nready ")
            name("127.0.0.3", "127.0.0.4")
            await said(up, f"{url} at 127.0.0.4: serves\n", f"{url} at 127.0.0.2: not wanted any more\n")
            gone = f"worker-https-vllm.test:{port}-127.0.0.2"
            await asyncio.to_thread(
                eventually, lambda: gone not in up.record["programs"], limit_s=LIMIT_S, what="its worker has ended"
            )
            before = {address: len(peer.bodies) for address, peer in peers.items()}
            for _ in range(4):
                assert (await answered(up))["usage"]["completion_tokens"] == 2
            assert len(peers["127.0.0.2"].bodies) == before["127.0.0.2"]
            up.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(up.process.wait, LIMIT_S) == 0


async def test_pods_of_an_inference_pool_come_and_go_and_a_gateway_is_sent_to_those_that_are_ready(
    tmp_path: Path,
) -> None:
    model, port, picker = write_tiny_model(tmp_path / "tiny", context_length=512), free_port(), free_port()
    labels = {"app": "vllm"}
    peers = {address: Peer(model, port) for address in ("127.0.0.2", "127.0.0.3")}
    server = KubeServer(role_of_the_document())
    server.token = TOKEN
    async with AsyncExitStack() as servers:
        await servers.enter_async_context(kube_serving(server))
        for address, peer in peers.items():
            peer.models = [{"id": "org/tiny", "root": str(model), "max_model_len": 512}]
            await servers.enter_async_context(answering(peer, address))
        api = ("--kube-api", server.url, "--kube-token-file", str(token_file(tmp_path)))
        flags = ("--inference-pool", "default/vllm", *api, "--picker", str(picker))
        with started(tmp_path / "state", "picker", *flags) as up:
            await said(up, "InferencePool default/vllm: there is no such InferencePool; it is waited for\n")
            await server.put(POOLS, pool("vllm", labels, port))
            await server.put(PODS, pod("one", "127.0.0.2", labels))
            await said(up, f"http://127.0.0.2:{port}: serves\n", "\nready ", f"\npicker:  127.0.0.1:{picker}, for")
            assert await _sent_to(picker, f"127.0.0.2:{port}") == {f"127.0.0.2:{port}"}
            for name in ("tiny", "org/tiny"):
                await _routed_by_blocks(up, picker, name)
            await server.put(PODS, pod("two", "127.0.0.3", labels))
            await said(up, f"http://127.0.0.3:{port}: serves\n")
            await server.put(PODS, pod("one", "127.0.0.2", labels, ready=False))
            await said(up, f"http://127.0.0.2:{port}: not wanted any more\n")
            await _sent_to(picker, f"127.0.0.3:{port}")
            server.cut()
            await server.delete(PODS, "two")
            await said(up, "InferencePool default/vllm: none of its Pods (1) is ready\n")
            up.process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(up.process.wait, LIMIT_S) == 0


def role_of_the_document() -> list[dict[str, list[str]]]:
    """Return what the Role in docs/picker.md allows."""
    page = Path(__file__).resolve().parents[2] / "docs" / "picker.md"
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(), re.DOTALL)
    [role] = [each for block in blocks for each in yaml.safe_load_all(block) if each.get("kind") == "Role"]
    return list(role["rules"])


async def _sent_to(picker: int, endpoint: str) -> set[str]:
    """Ask the picker until it sends a request to this endpoint, and return all to which it sent one."""
    body, found = json.dumps({"model": "tiny", "prompt": "hello"}).encode(), set()
    async with asyncio.timeout(LIMIT_S), connected(f"127.0.0.1:{picker}") as gateway:
        while endpoint not in found:
            stream = gateway.ask()
            await stream.headers({":method": "POST", ":path": "/v1/completions"})
            await stream.body(body)
            found.add(destination(await stream.read())[0])
            await stream.end()
    return found


async def _routed_by_blocks(up: Up, picker: int, model: str) -> None:
    """Ask the picker about one prompt until routers know that its beginning was sent somewhere."""
    body, asked = json.dumps({"model": model, "prompt": f"{model} has read " * 20}).encode(), 0
    async with asyncio.timeout(LIMIT_S), connected(f"127.0.0.1:{picker}") as gateway:
        while True:
            stream, asked = gateway.ask(), asked + 1
            name = f"{model.replace('/', '-')}-{asked}"
            await stream.headers({":method": "POST", ":path": "/v1/completions", "x-request-id": name})
            await stream.body(body)
            assert destination(await stream.read())[0]
            await stream.answer({":status": "200", "content-type": "application/json"})
            await stream.end()
            explained = await asyncio.to_thread(up.explained, "tiny", name)
            if any(decision["predicted_cached_tokens"] for decision in explained["decisions"]):
                return


async def test_a_model_whose_files_are_not_here_ends_it_with_one_line(tmp_path: Path) -> None:
    peer = Peer(write_tiny_model(tmp_path / "tiny"))
    peer.models = [{"id": "prod", "root": "/models/gone"}]
    async with answering(peer):
        with started(tmp_path / "state", "route", peer.url) as up:
            assert await asyncio.to_thread(up.process.wait, LIMIT_S) == 2
            assert await asyncio.to_thread(up.ready.wait, LIMIT_S)
    assert up.output[-1] == (
        f"error: {peer.url} serves prod from /models/gone, which is not here: name a directory with its tokenizer and "
        "config.json with --model\n"
    )


@pytest.fixture
def vllm(tmp_path: Path) -> Iterator[VllmServer]:
    directory = tmp_path / "tiny"
    write_tiny_model(directory, hidden=128, heads=2, context_length=1024, tied=False, seed=3)
    server = VllmServer(directory, tmp_path / "server.log")
    try:
        server.start()
        yield server
    finally:
        server.kill()


@needs_vllm
def test_a_real_server_is_found_with_its_events_and_comes_back_by_itself(tmp_path: Path, vllm: VllmServer) -> None:
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": [5 + index * 7 % 250 for index in range(100)],
        "max_tokens": 8,
        "temperature": 0,
    }
    post(f"{vllm.url}/v1", body | {"model": str(tmp_path / "tiny")}, VLLM_LIMIT_S, KEY)  # a client of the server's own
    key = str(vllm.settings["api_key_file"])
    limits = ("--set", "worker.attached.limit_s=60", "--set", "worker.health.limit_s=300")
    with started(tmp_path / "state", "route", vllm.url, "--api-key-file", key, *limits) as up:

        def has_said(line: str) -> Callable[[], bool]:
            def said_by_now() -> bool:
                assert up.process.poll() is None, "".join(up.output)
                return line in "".join(up.output)

            return said_by_now

        for line in ("\nready ", f"{vllm.url}: serves\n"):
            eventually(has_said(line), limit_s=VLLM_LIMIT_S, what=line)
        found = next(line for line in up.output if line.startswith(vllm.url))
        assert found.startswith(f"{vllm.url}: vLLM 0.3")
        assert found.endswith(
            f", model {tmp_path}/tiny, 64 blocks of 32 tokens, KV events at {vllm.settings['events']}\n"
        )

        def predicted() -> int:
            decision = up.explained("tiny", post(up.url, body, VLLM_LIMIT_S)["id"])["decisions"][-1]
            return int(decision["predicted_cached_tokens"])

        eventually(lambda: predicted() == 96, limit_s=VLLM_LIMIT_S, what="the router knows the other client's blocks")
        whole = post(up.url, body, VLLM_LIMIT_S)
        assert whole["usage"]["completion_tokens"] == 8
        vllm.kill()
        eventually(has_said(f"{vllm.url}: left out: "), limit_s=LIMIT_S, what="the server is away")
        up.output.clear()
        vllm.start()
        eventually(has_said(f"{vllm.url}: serves\n"), limit_s=VLLM_LIMIT_S, what="the server is back")
        again = eventually(lambda: _answer_now(up, body), limit_s=VLLM_LIMIT_S, what="an answer")
        assert again["choices"][0]["text"] == whole["choices"][0]["text"]


def _answer_now(up: Up, body: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return post(up.url, body, VLLM_LIMIT_S)
    except urllib.error.HTTPError:
        return None
