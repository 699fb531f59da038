"""deploy/local/route/route.py: the servers that are wanted. tests/integration/test_route.py has the rest."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from deploy.local.route import names, route
from deploy.local.route.route import FILE_LIMIT_BYTES, Keeper, WantedServers
from deploy.local.route.servers import Servers
from deploy.local.terminal import Terminal
from deploy.local.usage import RouteFlags
from shared.errors import ConfigError, Unavailable
from tests.authority import Authority, needs_openssl, serving
from tests.deploy.route.kube_server import PODS, POOLS, KubeServer, kube_serving, pod, pool
from tests.servers import free_port
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering

LIMIT_S = 120.0
ONE, TWO = "http://127.0.0.1:8001", "http://127.0.0.1:8002"


def urls(wanted: WantedServers) -> list[str]:
    return [target.url for target in wanted.targets]


def test_a_file_is_read_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text(f"{ONE}\n")
    wanted = WantedServers(RouteFlags(file=file))
    assert (wanted.look(), urls(wanted)) == ([], [ONE])
    file.write_text(f"{ONE}\n{TWO}\n")
    assert (wanted.look(), urls(wanted)) == ([], [ONE, TWO])
    file.write_text("")
    assert (wanted.look(), urls(wanted)) == ([], [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"what\n", "what: not a URL such as http://127.0.0.1:8001; the servers stay as they are"),
        (b"http://a\nhttp://a", "http://a: the same server as http://a; the servers stay as they are"),
        (b"\xff", "not UTF-8; the servers stay as they are"),
        (b"#" * (FILE_LIMIT_BYTES + 1), "more than 1048576 bytes; the servers stay as they are"),
        (None, "No such file or directory; the servers stay as they are"),
    ],
)
def test_a_file_that_became_wrong_changes_nothing_and_is_said_once(
    tmp_path: Path, content: bytes | None, said: str
) -> None:
    file = tmp_path / "servers"
    file.write_text(f"{ONE}\n")
    wanted = WantedServers(RouteFlags(file=file))
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    (line,) = wanted.look()
    assert line.endswith(f"{file}: {said}")
    assert (wanted.look(), urls(wanted)) == ([], [ONE])
    file.write_text(f"{TWO}\n")
    assert (wanted.look(), urls(wanted)) == ([], [TWO])


def test_a_file_that_is_wrong_at_first_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "servers"
    file.write_text("what\n")
    with pytest.raises(ConfigError, match=rf"^--file {file}: what: not a URL"):
        WantedServers(RouteFlags(file=file))


async def test_a_name_with_several_addresses_is_several_servers_and_asked_at_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(names, "LOOKUP_S", 0.0)
    peer = Peer(write_tiny_model(tmp_path / "tiny"), free_port())
    url = peer.url.replace("127.0.0.1", "vllm.test")
    addresses = ["127.0.0.2"]

    def look_up(host: str) -> list[str]:
        assert host == "vllm.test"
        return list(addresses)

    flags = RouteFlags(servers=[url])
    keeper = Keeper(WantedServers(flags, look_up), Servers({"tiny"}), flags, Terminal())
    async with answering(peer, "127.0.0.3"):
        addresses.append("127.0.0.3")
        join = await keeper.first()
    assert (join.target.name, join.target.url) == (f"{url} at 127.0.0.3", url)
    assert {headers["Host"] for headers in peer.seen} == {url.removeprefix("http://")}
    assert f"{url} at 127.0.0.2: left out: does not answer: Connection refused\n" in capsys.readouterr().err


async def test_pods_of_an_inference_pool_are_asked_once_it_is_known_which_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    peer = Peer(write_tiny_model(tmp_path / "tiny"), free_port())
    port = int(peer.url.rpartition(":")[2])
    async with kube_serving(KubeServer()) as server, asyncio.timeout(LIMIT_S):
        flags = RouteFlags(inference_pool="default/vllm", kube_api=server.url)
        wanted = WantedServers(flags)
        assert not wanted.known
        first = asyncio.ensure_future(Keeper(wanted, Servers({"tiny"}), flags, Terminal()).first())
        said = ""
        while "waiting: none of the servers (0) serves" not in said:
            await asyncio.sleep(0.01)
            said += capsys.readouterr().err
        assert said.startswith("InferencePool default/vllm: there is no such InferencePool; it is waited for\n")
        await server.put(POOLS, pool("vllm", {"app": "vllm"}, port))
        await server.put(PODS, pod("one", "127.0.0.2", {"app": "vllm"}))
        async with answering(peer, "127.0.0.2"):
            assert (await first).target.name == f"http://127.0.0.2:{port}"
        assert wanted.known


def test_servers_are_named_in_one_way_alone(tmp_path: Path) -> None:
    for flags in (
        RouteFlags(),
        RouteFlags(servers=[ONE], inference_pool="a/b", kube_api=TWO),
        RouteFlags(file=tmp_path / "servers", inference_pool="a/b", kube_api=TWO),
    ):
        with pytest.raises(ConfigError, match=r"^route: give URLs of servers, .* or --inference-pool$"):
            WantedServers(flags)


@needs_openssl
async def test_servers_whose_certificates_are_wrong_are_named_and_come_in_once_mended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours, others = Authority(tmp_path), Authority(tmp_path, "others")
    wrong = {
        "certificate has expired": ours.sign("localhost", "expired", days=-1),
        "Hostname mismatch, certificate is not valid for 'localhost'": ours.sign("other.test", "named"),
        "unable to get local issuer certificate; --ca-file names an authority": others.sign("localhost", "unknown"),
    }
    model = write_tiny_model(tmp_path / "tiny")
    peers = {why: Peer(model) for why in wrong}
    urls = {why: peer.url.replace("http://127.0.0.1", "https://localhost") for why, peer in peers.items()}
    flags = RouteFlags(servers=[*urls.values()], ca_file=ours.pem)
    first = asyncio.ensure_future(Keeper(WantedServers(flags), Servers({"tiny"}), flags, Terminal()).first())
    try:
        async with AsyncExitStack() as before, asyncio.timeout(LIMIT_S):
            for why, pair in wrong.items():
                await before.enter_async_context(answering(peers[why], tls=serving(*pair)))
            said = ""
            while not all(
                f"{url}: left out: does not answer: its certificate is refused: {why}\n" in said
                for why, url in urls.items()
            ):
                assert not first.done()
                said += capsys.readouterr().err
                await asyncio.sleep(0.01)
        why, url = next(iter(urls.items()))
        async with answering(peers[why], tls=serving(*ours.sign("localhost", "mended"))), asyncio.timeout(LIMIT_S):
            assert (await first).target.name == url
    finally:
        first.cancel()


def test_files_of_tls_that_do_not_fit_are_refused_before_anything_starts(tmp_path: Path) -> None:
    for flags, said in (
        (RouteFlags(servers=[ONE], ca_file=tmp_path / "none"), r"^--ca-file .*/none: No such file or directory$"),
        (RouteFlags(servers=[ONE], client_key=tmp_path), r"^--client-cert, --client-key: a certificate and its key "),
    ):
        with pytest.raises(ConfigError, match=said):
            route.route(flags, Terminal())


async def test_a_lookup_that_hangs_or_fails_changes_nothing_and_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(names, "LOOKUP_S", 0.0)
    monkeypatch.setattr(route, "LOOKUP_LIMIT_S", 0.1)
    hangs, answer = threading.Event(), [["127.0.0.2"]]

    def look_up(_: str) -> list[str]:
        if answer:
            return answer.pop()
        if not hangs.is_set():
            assert hangs.wait(60.0)
        raise Unavailable("not known")

    wanted = WantedServers(RouteFlags(servers=["http://vllm.test"]), look_up)
    for said in ("no answer in 0.1 s", "not known"):
        assert wanted.due_names() == ["vllm.test"]
        await wanted.look_up("vllm.test")
        assert wanted.look() == [f"the host vllm.test has no address: {said}; its servers (1) stay as they are"]
        assert [target.address for target in wanted.targets] == ["127.0.0.2"]
        hangs.set()


def test_a_name_without_an_address_is_refused_at_the_start() -> None:
    with pytest.raises(
        ConfigError, match=r"^http://no\.such\.host\.invalid:8001: the host no\.such\.host\.invalid has"
    ):
        WantedServers(RouteFlags(servers=["http://no.such.host.invalid:8001"]))
