"""deploy/local/route/route.py: the servers that are wanted. tests/integration/test_route.py has the rest."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from deploy.local.route import names, route
from deploy.local.route.route import FILE_LIMIT_BYTES, Keeper, WantedServers
from deploy.local.route.servers import Servers
from deploy.local.terminal import Terminal
from deploy.local.usage import RouteFlags
from shared.errors import ConfigError, Unavailable
from tests.servers import free_port
from tests.tiny_model import write_tiny_model
from tests.worker.attached.peer import Peer, answering

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

    wanted = WantedServers(RouteFlags(servers=[url]), look_up)
    keeper = Keeper(wanted, Servers({"tiny"}), None, Terminal())
    async with answering(peer, "127.0.0.3"):
        addresses.append("127.0.0.3")
        join = await keeper.first()
    assert (join.target.name, join.target.url) == (f"{url} at 127.0.0.3", url)
    assert {headers["Host"] for headers in peer.seen} == {url.removeprefix("http://")}
    assert f"{url} at 127.0.0.2: left out: does not answer: Connection refused\n" in capsys.readouterr().err


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
