"""deploy/kubernetes/: everything that is rendered is started as processes, with a real NATS and a real etcd. It answers
and drains, and every workload is rolled in turn under load without a lost request."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from deploy.local.key import new
from tests.authority import Authority, needs_openssl, serving
from tests.deploy.route.kube_server import TOKEN, KubeServer, kube_serving, pod
from tests.hub_server import NO_PROXY, HubServer, Repository, files_of
from tests.kubernetes.helm import VALUES, named, render
from tests.kubernetes.pods import SERVERS, Cluster
from tests.picker.gateway import connected, destination
from tests.servers import free_port
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering

LONG = pytest.mark.tier("long")
PASSWORDS = {name: f"12e4-{name}" for name in ("services-password", "client-password", "etcd-root-password")}
PROMPTS = [f"The mill at the {place} turns" for place in ("river", "dam", "bridge", "weir", "sea")]
TOKENS = 60
LIMIT_S = 180.0
NOTICED_S = 0.5
"""Seconds for which the proxies of nodes still send requests to a pod that ends."""
ENGINES = {"cpu": "native", "gpu": "native", "vllm": "echo", "disaggregated": "simulated"}
"""What stands for the engine of each file of values on a machine without a GPU."""


def values_for(name: str) -> dict[str, Any]:
    """Return what differs here: a small model, no GPU, a small pool, and no 10 s until a frontend ends."""
    own = {"engine": ENGINES[name], "model": "/var/lib/headrace/tiny", "modelName": "tiny", "gpus": 0}
    sets = {"disaggregated": ("prefill", "decode")}.get(name, (name,))
    return {
        "models": {"volume": {"hostPath": {"path": "/models"}}},
        "frontend": {"drainDelaySeconds": 4, "settings": {"limits": {"wait_s": 0, "rescue_s": 120, "drain_s": 60}}},
        "kvbm": {"poolBytes": 64 << 20},
        "workers": {each: {**own, "settings": {"threads": 1, "capacity_blocks": 512}} for each in sets},
    }


@contextlib.contextmanager
def cluster(
    name: str,
    folder: Path,
    flags: Mapping[str, Any] | None = None,
    secrets: Mapping[str, Mapping[str, str]] = {},
    prepare: Callable[[Cluster], None] = lambda _: None,
) -> Iterator[Cluster]:
    """Start what a file of values renders, with `flags` in addition; it is ready. `prepare` is called before."""
    values = values_for(name)
    for part, more in (flags or {}).items():
        values[part] = {**values.get(part, {}), **more}
    manifests = named(render(VALUES[name], values=values))
    write_tiny_model(folder / "shared" / "models" / "tiny")
    one = Cluster(manifests, folder, {"headrace-passwords": PASSWORDS, **secrets})
    prepare(one)
    try:
        one.apply()
        one.wait_ready()
        yield one
    finally:
        one.close()


class Clients:
    """Ask one question after the other, each at the next pod of the frontends' Service."""

    def __init__(self, one: Cluster) -> None:
        self.answers: dict[str, set[str]] = {}
        self.answered = 0
        self.stopping = False
        self._cluster = one
        self._turns = count()

    async def ask(self) -> None:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as http:
            while not self.stopping:
                turn = next(self._turns)
                ready = self._cluster.served("headrace-frontend", NOTICED_S)
                prompt = PROMPTS[turn % len(PROMPTS)]
                text = await answer(http, f"http://{ready[turn % len(ready)]}:8000", prompt)
                self.answers.setdefault(prompt, set()).add(text)
                self.answered += 1

    async def answer_more(self, more: int = 8) -> None:
        """Until a few more answers came."""
        due = self.answered + more
        async with asyncio.timeout(LIMIT_S):
            while self.answered < due:  # noqa: ASYNC110 - answers come one by one from many tasks
                await asyncio.sleep(0.01)


async def answer(http: aiohttp.ClientSession, url: str, prompt: str, server_hostname: str | None = None) -> str:
    """Return the text of a whole answer; each request must get one."""
    body: Mapping[str, object] = {
        "model": "tiny",
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    asked = {"json": body, "headers": {"Connection": "close"}, "server_hostname": server_hostname}
    async with http.post(f"{url}/v1/completions", **asked) as response:  # type: ignore[arg-type]
        text = await response.text()
    assert response.status == 200, text
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", text[-500:]
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[-1]["usage"]["completion_tokens"] == TOKENS, text[-500:]
    return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


@pytest.mark.parametrize("name", [name if name == "cpu" else pytest.param(name, marks=LONG) for name in VALUES])
async def test_what_a_file_of_values_renders_answers_and_drains(name: str, tmp_path: Path) -> None:
    with cluster(name, tmp_path) as one:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(LIMIT_S)) as http:
            for address in one.served("headrace-frontend", 0):
                assert await answer(http, f"http://{address}:8000", PROMPTS[0])
        where = ("--nats", "nats://headrace-nats.serving.svc:4222", "--etcd", "headrace-etcd.serving.svc:2379")
        shown = one.pods["Deployment/headrace-frontend"][0].exec("python", "-m", "deploy.local.cli", "status", *where)
        ours = [key for key in one.pods if not key.endswith(SERVERS)]
        assert all(service in shown for service in ("frontend", "router", "worker", "kvbm")), shown
        for pods in one.pods.values():
            for pod in pods:
                for container in pod.containers:
                    assert pod.probed(container.spec, "livenessProbe"), container.spec["name"]
        for pod in [pod for key in ours for pod in one.pods[key]]:
            await asyncio.to_thread(pod.stop)


@LONG
@needs_openssl
async def test_keys_tls_a_disk_and_the_picker_reach_the_processes(tmp_path: Path) -> None:
    cert, key = Authority(tmp_path).sign("headrace-frontend")
    new("alice", {}, tmp_path / "keys.toml", tmp_path / "alice.key")
    secrets = {
        "keys": {"keys.toml": (tmp_path / "keys.toml").read_text()},
        "tls": {"tls.crt": cert.read_text(), "tls.key": key.read_text()},
    }
    flags = {
        "frontend": {"keysSecret": "keys", "tlsSecret": "tls", "drainDelaySeconds": 0},
        "kvbm": {"diskHostPath": "/var/lib/blocks"},
        "picker": {"enabled": True},
    }
    with cluster("cpu", tmp_path / "cluster", flags, secrets) as one:
        [address, _] = one.served("headrace-frontend", 0)
        connector = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=tmp_path / "authority.pem"))
        headers = {"Authorization": f"Bearer {(tmp_path / 'alice.key').read_text().strip()}"}
        url = f"https://{address}:8000"
        async with aiohttp.ClientSession(connector=connector, headers=headers) as http:
            assert await answer(http, url, PROMPTS[0], server_hostname="headrace-frontend")
        async with connected(f"{address}:9002") as gateway:
            assert await gateway.health("liveness") == 1
        assert (tmp_path / "cluster/shared/var/lib/blocks").stat().st_mode & 0o777 == 0o700
        assert list((tmp_path / "cluster/shared/var/lib/blocks").iterdir())


@needs_openssl
async def test_pods_of_an_inference_pool_get_workers_and_gateways_are_sent_to_those_that_are_ready(
    tmp_path: Path,
) -> None:
    flags: dict[str, Any] = {
        "picker": {
            "enabled": True,
            "pool": {"enabled": True, "selector": {"app": "vllm"}, "targetPorts": [port := free_port()]},
            "follow": {"enabled": True, "modelName": "pooled"},
        },
        "settings": {"observe": {"log_format": "json"}},
        "workers": {"cpu": {**values_for("cpu")["workers"]["cpu"], "replicas": 0}},
        "kvbm": {"enabled": False},
    }
    authority = Authority(tmp_path)
    model = write_tiny_model(tmp_path / "tiny", context_length=512)
    kube: list[KubeServer] = []

    def prepare(one: Cluster) -> None:
        role = one.manifests["Role/headrace-pool-workers"]
        kube.append(KubeServer(role["rules"], "serving"))
        kube[0].token = TOKEN
        one.account |= {"token": TOKEN, "ca.crt": authority.pem.read_text()}
        one.api |= {"KUBERNETES_SERVICE_HOST": "localhost", "KUBERNETES_SERVICE_PORT": kube[0].url.rpartition(":")[2]}

    async with contextlib.AsyncExitStack() as opened:
        for address in ("127.0.0.2", "127.0.0.3"):
            peer = Peer(model, port)
            peer.models = [{"id": "pooled", "root": str(model), "max_model_len": 512}]
            await opened.enter_async_context(answering(peer, address))
        with ThreadPoolExecutor(1) as thread:  # it blocks, and the servers are on this loop
            starting = cluster("cpu", tmp_path / "cluster", flags, {}, prepare)
            entered = asyncio.get_running_loop().run_in_executor(thread, starting.__enter__)
            try:
                async with asyncio.timeout(LIMIT_S):
                    while not kube:  # noqa: ASYNC110 - it is made in the thread
                        await asyncio.sleep(0.01)
                [server] = kube
                await opened.enter_async_context(kube_serving(server, serving(*authority.sign("localhost"))))
                made = json.loads(json.dumps(named(render(VALUES["cpu"], values=flags))["InferencePool/headrace-pool"]))
                await server.put(server.pools, made)
                await server.put(server.pods, pod("one", "127.0.0.2", {"app": "vllm"}))
                one = await entered
                frontends = one.served("headrace-picker", 0)
                for address in frontends:
                    await sent_to(f"{address}:9002", f"127.0.0.2:{port}")
                await server.put(server.pods, pod("two", "127.0.0.3", {"app": "vllm"}))
                await server.put(server.pods, pod("one", "127.0.0.2", {"app": "vllm"}, ready=False))
                for address in frontends:
                    await sent_to(f"{address}:9002", f"127.0.0.3:{port}")
                followers, key = one.pods, "Deployment/headrace-pool-workers"
                assert "joined nats://" in followers[key][0].logs()
                rolling = asyncio.ensure_future(asyncio.to_thread(one.roll, key, lambda pod: ": serves" in pod.logs()))
                while not rolling.done():
                    await sent_to(f"{frontends[0]}:9002", f"127.0.0.3:{port}", at_once=True)
                await rolling
                [workers] = followers[key]
                await asyncio.to_thread(workers.stop)
                assert [each.process.returncode for each in workers.containers] == [0]
            finally:
                await asyncio.wrap_future(thread.submit(starting.__exit__, None, None, None))


async def sent_to(picker: str, endpoint: str, *, at_once: bool = False) -> None:
    """Ask a picker until it sends a request to this endpoint; with `at_once` the first one must go there."""
    body = json.dumps({"model": "pooled", "prompt": "hello"}).encode()
    async with asyncio.timeout(LIMIT_S), connected(picker) as gateway:
        while True:
            stream = gateway.ask()
            await stream.headers({":method": "POST", ":path": "/v1/completions"})
            await stream.body(body)
            found = destination(await stream.read())[0]
            await stream.end()
            if found == endpoint:
                return
            assert not at_once, f"{found} in place of {endpoint}"


@LONG
@pytest.mark.parametrize("name", ["cpu", "disaggregated"])
async def test_rolling_each_workload_in_turn_under_load_loses_nothing(name: str, tmp_path: Path) -> None:
    with cluster(name, tmp_path) as one:
        clients = Clients(one)
        async with asyncio.TaskGroup() as tasks:
            asking = [tasks.create_task(clients.ask()) for _ in range(4)]
            for key in one.pods:
                await clients.answer_more()
                await asyncio.to_thread(one.roll, key)
            await clients.answer_more()
            clients.stopping = True
            await asyncio.gather(*asking)
        assert len(clients.answers) == len(PROMPTS)
        assert {len(texts) for texts in clients.answers.values()} == {1}, "greedy answers are alike, whoever gave them"


def test_a_model_that_values_name_is_fetched_to_the_volume_of_models(tmp_path: Path) -> None:
    hub = HubServer()
    there = Repository(files_of(write_tiny_model(tmp_path / "tiny")))
    hub.repositories["org/tiny"] = there
    variables = {"HF_ENDPOINT": hub.elsewhere, "NO_PROXY": NO_PROXY}
    models = {
        "pull": [f"org/tiny@{there.commit}"],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
    }
    manifests = named(render(VALUES["gpu"], values={"models": models}))
    one = Cluster(manifests, tmp_path / "cluster", {})
    with hub.running(), contextlib.closing(one):
        [job] = [key for key in manifests if key.startswith("Job/headrace-pull-")]
        one.run(job)
    snapshot = tmp_path / "cluster/shared/headrace-models/hub/models--org--tiny/snapshots" / there.commit
    assert files_of(snapshot).keys() == there.files.keys()
