"""deploy/local/route/kube.py with an API server on loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from aiohttp import web

from deploy.local.route import kube, reflector
from deploy.local.route.kube import KubeApi, PoolServers, api_of, pool_of
from deploy.local.usage import RouteFlags
from shared.errors import ConfigError
from tests.authority import Authority, needs_openssl, serving
from tests.deploy.route.kube_server import PODS, POOLS, TOKEN, KubeServer, kube_serving, pod, pool, token_file

LIMIT_S = 60.0
LABELS = {"app": "vllm"}


class Followed:
    """A pool that is followed, and all that was said of it."""

    def __init__(self, servers: PoolServers) -> None:
        self.servers = servers
        self.said: list[str] = []

    @property
    def urls(self) -> list[str]:
        targets, news = self.servers.look()
        self.said += news
        return [target.url for target in targets]

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not holds():  # noqa: ASYNC110 - it is looked at, as `route` does
                await asyncio.sleep(0.005)

    async def become(self, *urls: str) -> None:
        await self.until(lambda: self.urls == list(urls))

    async def say(self, line: str) -> None:
        await self.until(lambda: self.urls is not None and f"InferencePool default/vllm: {line}" in self.said)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask again soon."""
    monkeypatch.setattr(reflector, "FIRST_DELAY_S", 0.01)
    monkeypatch.setattr(reflector, "LAST_DELAY_S", 0.02)


@asynccontextmanager
async def following(server: KubeServer, api: KubeApi | None = None) -> AsyncIterator[Followed]:
    servers = PoolServers("default/vllm", api or KubeApi(server.url))
    async with run(servers) as followed:
        yield followed


@asynccontextmanager
async def run(servers: PoolServers) -> AsyncIterator[Followed]:
    task = asyncio.ensure_future(servers.run())
    try:
        yield Followed(servers)
        assert not task.done()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_pods_of_the_pool_are_servers_that_come_and_go() -> None:
    async with kube_serving(KubeServer()) as server, following(server) as followed:
        await followed.say("there is no such InferencePool; it is waited for")
        assert followed.servers.known
        await server.put(PODS, pod("one", "10.0.0.1", LABELS))
        await server.put(PODS, pod("other", "10.0.0.9", {"app": "other"}))
        await server.put(POOLS, pool("another", {"app": "other"}, 8000))
        await server.put(POOLS, pool("vllm", LABELS, 8000))
        await followed.become("http://10.0.0.1:8000")
        await server.put(PODS, pod("two", "10.0.0.2", LABELS, ready=False))
        await server.put(PODS, pod("done", "10.0.0.3", LABELS, phase="Succeeded"))
        await server.put(PODS, pod("two", "10.0.0.2", LABELS))
        await followed.become("http://10.0.0.1:8000", "http://10.0.0.2:8000")
        await server.put(PODS, pod("two", "10.0.0.2", LABELS, ready=False))
        await followed.become("http://10.0.0.1:8000")
        await server.put(PODS, pod("one", "10.0.0.1", LABELS, phase="Failed"))
        await followed.become()
        assert followed.said[-1] == "InferencePool default/vllm: none of its Pods (1) is ready"


async def test_another_selector_or_port_of_the_pool_counts_at_once_and_a_deleted_pool_has_no_servers() -> None:
    async with kube_serving(KubeServer()) as server, following(server) as followed:
        await server.put(PODS, pod("one", "10.0.0.1", LABELS))
        await server.put(PODS, pod("other", "10.0.0.9", {"app": "other"}))
        await server.put(POOLS, pool("vllm", LABELS, 8000))
        await followed.become("http://10.0.0.1:8000")
        await server.put(POOLS, pool("vllm", LABELS, 8001))
        await followed.become("http://10.0.0.1:8001")
        await server.put(POOLS, pool("vllm", {"app": "other"}, 8001))
        await followed.become("http://10.0.0.9:8001")
        await followed.until(lambda: server.watched == [PODS, POOLS])
        await server.delete(POOLS, "vllm")
        await followed.become()


async def test_a_watch_that_is_cut_off_or_too_old_goes_on_and_nothing_is_missed() -> None:
    server = KubeServer()
    await server.put(POOLS, pool("vllm", LABELS, 8000))
    await server.put(PODS, pod("one", "10.0.0.1", LABELS))
    async with kube_serving(server), following(server) as followed:
        await followed.become("http://10.0.0.1:8000")
        await followed.until(lambda: server.watched == [PODS, POOLS])
        server.cut()
        await server.put(PODS, pod("two", "10.0.0.2", LABELS))
        await followed.become("http://10.0.0.1:8000", "http://10.0.0.2:8000")
        assert followed.said == [], "a watch that breaks off is nothing to be said"
        lists = sum("watch" not in query for _, query in server.seen)
        server.forget()
        await server.put(PODS, pod("three", "10.0.0.3", LABELS))
        await followed.become("http://10.0.0.1:8000", "http://10.0.0.3:8000", "http://10.0.0.2:8000")
        await server.delete(PODS, "one")
        await followed.become("http://10.0.0.3:8000", "http://10.0.0.2:8000")
        assert sum("watch" not in query for _, query in server.seen) > lists


async def test_a_watch_begins_where_the_last_one_ended_or_its_bookmark_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "WATCH_S", 0.2)
    async with kube_serving(KubeServer()) as server, following(server) as followed:
        await server.put(POOLS, pool("vllm", LABELS, 8000))
        await followed.say("none of its Pods (0) is ready")
        await followed.until(lambda: server.watched == [PODS, POOLS])
        lists = [query for _, query in server.seen if "watch" not in query]
        marked = str(await server.bookmark(PODS))
        await followed.until(lambda: (PODS, marked) in [(path, q.get("resourceVersion")) for path, q in server.seen])
        assert [query for _, query in server.seen if "watch" not in query] == lists


async def test_a_server_that_is_away_changes_nothing_and_is_said_once() -> None:
    server = KubeServer()
    async with kube_serving(server):
        await server.put(POOLS, pool("vllm", LABELS, 8000))
        await server.put(PODS, pod("one", "10.0.0.1", LABELS))
        servers = PoolServers("default/vllm", KubeApi(server.url))
        async with run(servers) as followed:
            await followed.become("http://10.0.0.1:8000")
    async with run(servers) as again:  # as `route` does, which follows first to find the model and then for its stack
        await again.say("its API server: Connection refused; its servers (1) stay as they are")
        async with kube_serving(server):
            await again.until(lambda: server.watched == [PODS, POOLS])
            await server.put(PODS, pod("two", "10.0.0.2", LABELS))
            await again.become("http://10.0.0.1:8000", "http://10.0.0.2:8000")
        assert len(again.said) == 1


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda server: server.paths.remove(POOLS), f"its API server has no {POOLS}; is the Gateway API Inference Ext"),
        (lambda server: setattr(server, "rules", ()), f"{POOLS} may not be listed and watched; docs/picker.md has the"),
        (lambda server: setattr(server, "token", "another"), "its API server refuses the token"),
        (
            lambda server: server.said.update({POOLS: lambda: web.Response(text="<html>")}),
            "its list of InferencePools is none: JSON is malformed",
        ),
        (
            lambda server: server.said.update({POOLS: lambda: web.Response(status=302, headers={"Location": "/x"})}),
            f"{POOLS} answers 302",
        ),
        (
            lambda server: server.said.update({POOLS: lambda: web.Response(text="x" * 2000)}),
            f"{POOLS} answers more than 1000 bytes",
        ),
    ],
)
async def test_what_the_server_refuses_or_says_wrong_is_one_line(
    spoil: Callable[[KubeServer], None], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kube, "LIST_LIMIT_BYTES", 1000)
    server = KubeServer()
    spoil(server)
    async with kube_serving(server), following(server) as followed:
        await followed.until(lambda: followed.urls == [] and bool(followed.said))
        await followed.until(lambda: len(server.seen) > 3)
        assert followed.urls == []
        [line] = followed.said
        assert line.startswith(f"InferencePool default/vllm: {said}")
        assert not followed.servers.known


async def test_an_event_that_is_endless_or_none_is_one_line_and_a_list_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "EVENT_LIMIT_BYTES", 1000)
    monkeypatch.setattr(reflector, "FIRST_DELAY_S", 0.5)  # the reason is there until the list
    monkeypatch.setattr(reflector, "LAST_DELAY_S", 0.5)
    async with kube_serving(KubeServer()) as server, following(server) as followed:
        await server.put(POOLS, pool("vllm", LABELS, 8000))
        await server.put(PODS, pod("one", "10.0.0.1", LABELS))
        await followed.become("http://10.0.0.1:8000")
        for text, said in (
            ("x" * 3000, f"{PODS} has an event of more than 1000 bytes"),
            ("what", "its watch of Pods is not understood: JSON is malformed: invalid character (byte 0)"),
        ):
            await followed.until(lambda: PODS in server.watched)
            await server.line(PODS, text)
            await followed.say(f"{said}; its servers (1) stay as they are")
        await server.put(PODS, pod("two", "10.0.0.2", LABELS))
        await followed.become("http://10.0.0.1:8000", "http://10.0.0.2:8000")


@needs_openssl
async def test_it_is_asked_over_https_with_a_token_that_may_be_replaced(tmp_path: Path) -> None:
    authority, server = Authority(tmp_path), KubeServer()
    server.token, file = TOKEN, token_file(tmp_path, "an old one\n".replace(" ", "-"))
    async with kube_serving(server, serving(*authority.sign("localhost"))):
        async with following(server, KubeApi(server.url, file)) as unknown:
            await unknown.say(
                "its API server: its certificate is refused: unable to get local issuer certificate; "
                "--kube-ca-file names an authority"
            )
        async with following(server, KubeApi(server.url, file, authority.pem)) as followed:
            await followed.say("its API server refuses the token")
            await server.put(POOLS, pool("vllm", LABELS, 8000))
            await server.put(PODS, pod("one", "10.0.0.1", LABELS))
            token_file(tmp_path)
            await followed.become("http://10.0.0.1:8000")
            file.unlink()
            server.cut()
            await followed.say(f"--kube-token-file {file}: No such file or directory; its servers (1) stay as they are")


def test_in_a_pod_the_server_is_that_of_its_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kube, "ACCOUNT", tmp_path)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(ConfigError, match=r"^--inference-pool: this is no Pod; name the API server with --kube-api$"):
        api_of(RouteFlags(inference_pool="a/b"))
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    with pytest.raises(ConfigError, match=rf"^--kube-token-file {tmp_path}/token: No such file or directory$"):
        api_of(RouteFlags(inference_pool="a/b"))
    token_file(tmp_path)
    with pytest.raises(ConfigError, match=rf"^--kube-ca-file {tmp_path}/ca\.crt: No such file or directory$"):
        api_of(RouteFlags(inference_pool="a/b"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (RouteFlags(inference_pool="x", kube_api="http://127.0.0.1:1"), "--inference-pool x: not NAMESPACE/NAME"),
        (RouteFlags(inference_pool="a/b", kube_api="127.0.0.1"), "--kube-api 127.0.0.1: not a URL such as https://"),
        (RouteFlags(kube_api="http://127.0.0.1:1"), "--kube-api, --kube-token-file and --kube-ca-file need --inferen"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused(flags: RouteFlags, said: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        pool_of(flags)
    assert str(wrong.value).startswith(said)


def test_a_token_is_sent_over_https_or_to_this_machine_alone(tmp_path: Path) -> None:
    file = token_file(tmp_path)
    KubeApi("http://127.0.0.1:8001", file).check()
    with pytest.raises(ConfigError, match="a token is sent over https alone"):
        KubeApi("http://10.0.0.1:8001", file).check()
