"""deploy/local/check/discovery.py: against real etcd servers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from deploy.local.check import discovery
from deploy.local.check.measurements import DiscoveryMeasured, Unmeasured
from deploy.local.check.verdicts import verdicts
from shared.config import DiscoveryConfig
from shared.discovery.etcd_client import EtcdClient, EtcdConnection, rpc
from shared.errors import ConfigError
from tests.authority import Authority, needs_openssl
from tests.deploy.check.measured import WELL
from tests.servers import EtcdServer, etcd_server, free_port


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow this machine is; a call of etcd has its own limit."""
    monkeypatch.setattr(discovery, "LIMIT_S", 60.0)


def measured(endpoint: str, user: str = "", password: str = "") -> DiscoveryMeasured | Unmeasured:
    return discovery.measure(DiscoveryConfig(endpoints=(endpoint,), user=user, password=password))


def ask(endpoint: str, *requests: tuple[str, str, object]) -> list[Any]:
    """The answers of etcd to requests of (stub, method, message)."""

    async def run() -> list[Any]:
        client = EtcdClient(DiscoveryConfig(endpoints=(endpoint,)), lambda: None)

        async def all_of_them(etcd: EtcdConnection) -> list[Any]:
            return [await etcd.ask(getattr(getattr(etcd, stub), method), message) for stub, method, message in requests]

        try:
            return await client.call(all_of_them)
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_server_of_this_machine_is_measured_and_keeps_nothing(own_etcd: EtcdServer) -> None:
    found = measured(own_etcd.endpoint)
    assert isinstance(found, DiscoveryMeasured)
    assert found.read_s > 0
    assert found.write_s > 0
    assert (found.version, found.value_bytes, found.faults) == ("3.5.1", 64 << 10, ())
    assert found.database_bytes > 0
    assert found.clock is not None
    assert found.clock.least_s <= 0 <= found.clock.most_s
    all_keys = rpc.RangeRequest(key=b"\0", range_end=b"\0")
    [keys] = ask(own_etcd.endpoint, ("kv", "Range", all_keys))
    assert list(keys.kvs) == []


def test_a_server_at_a_socket_is_measured_without_its_clock(tmp_path: Path) -> None:
    with etcd_server(tmp_path, socket=True) as server:
        found = measured(server.endpoint)
    assert isinstance(found, DiscoveryMeasured)
    assert found.clock is None


def test_an_alarm_is_found(own_etcd: EtcdServer) -> None:
    raised = rpc.AlarmRequest(action=1, alarm=rpc.AlarmType.Value("NOSPACE"))
    ask(own_etcd.endpoint, ("maintenance", "Alarm", raised))
    found = measured(own_etcd.endpoint)
    assert isinstance(found, Unmeasured), "no key can be written"
    assert "space exceeded" in found.reason
    assert "defragment" in found.advice
    assert found.wanted


def test_a_server_with_users_says_which_settings_are_wrong(own_etcd: EtcdServer) -> None:
    root = rpc.AuthUserAddRequest(name="root", password="right")
    ask(
        own_etcd.endpoint,
        ("auth", "UserAdd", root),
        ("auth", "RoleAdd", rpc.AuthRoleAddRequest(name="root")),
        ("auth", "UserGrantRole", rpc.AuthUserGrantRoleRequest(user="root", role="root")),
        ("auth", "UserAdd", rpc.AuthUserAddRequest(name="stranger", password="right")),
        ("auth", "AuthEnable", rpc.AuthEnableRequest()),
    )
    for user, password in (("", ""), ("root", "very-wrong"), ("stranger", "right")):
        found = measured(own_etcd.endpoint, user, password)
        assert isinstance(found, Unmeasured), user
        assert "discovery.password" in found.advice, found
        assert "very-wrong" not in found.reason
    assert isinstance(measured(own_etcd.endpoint, "root", "right"), DiscoveryMeasured)


def test_a_server_that_is_frozen_or_gone_is_said(own_etcd: EtcdServer) -> None:
    own_etcd.freeze()
    frozen = measured(own_etcd.endpoint)
    own_etcd.kill()
    gone = measured(own_etcd.endpoint)
    for found in (frozen, gone):
        assert isinstance(found, Unmeasured)
        assert found.wanted
        assert own_etcd.endpoint in found.reason
        assert "--etcd" in found.advice


def test_what_is_no_endpoint_is_wrong_usage() -> None:
    with pytest.raises(ConfigError, match="none of host:port"):
        measured("somewhere")


def test_of_two_endpoints_the_one_that_is_away_is_named_and_the_other_measured(own_etcd: EtcdServer) -> None:
    away = f"127.0.0.1:{free_port()}"
    found = discovery.measure(DiscoveryConfig(endpoints=(away, own_etcd.endpoint)))
    assert isinstance(found, DiscoveryMeasured)
    assert found.address == own_etcd.endpoint
    [down] = found.down
    assert down.startswith(f"etcd at {away}: ")
    assert (
        next(each for each in verdicts(replace(WELL, discovery=found)) if each.name == "etcd servers").state == "warn"
    )


@needs_openssl
def test_a_server_with_tls_is_measured_without_its_clock(tmp_path: Path) -> None:
    ours = Authority(tmp_path)
    server = EtcdServer(tmp_path, tls=(*ours.sign("127.0.0.1"), None))
    server.start()
    try:
        found = discovery.measure(DiscoveryConfig(endpoints=(server.endpoint,), tls_ca=str(ours.pem)))
        assert isinstance(found, DiscoveryMeasured)
        assert found.clock is None
    finally:
        server.kill()
