"""deploy/compose/etcd_users.py on a real etcd, run as its container runs it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from shared.config import DiscoveryConfig
from shared.discovery.etcd import EtcdDiscovery
from shared.errors import DiscoveryDown
from tests.servers import EtcdServer

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "compose" / "etcd_users.py"
PREFIX = "/headrace/default/"
PASSWORDS = {"ETCD_ROOT_PASSWORD": "0042", "SERVICES_PASSWORD": "12e4"}


def run(etcd: EtcdServer, **passwords: str) -> tuple[int, str]:
    ended = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT), f"http://{etcd.endpoint}"],
        env=os.environ | PASSWORDS | passwords,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert not ended.stderr
    return ended.returncode, ended.stdout


@asynccontextmanager
async def discovery(etcd: EtcdServer, user: str = "services", password: str = "12e4") -> AsyncIterator[EtcdDiscovery]:
    opened = EtcdDiscovery(DiscoveryConfig(endpoints=(etcd.endpoint,), lease_ttl_s=2.0, user=user, password=password))
    try:
        yield opened
    finally:
        await opened.close()


async def test_services_publish_and_read_and_a_stranger_does_neither(own_etcd: EtcdServer) -> None:
    assert run(own_etcd) == (0, "etcd has its users and requires authentication now\n")
    async with discovery(own_etcd) as services:
        registration = await services.register(lambda _epoch: {f"{PREFIX}instances/worker/a1": b"{}"})
        await registration.publish()
        assert await services.list(PREFIX) == {f"{PREFIX}instances/worker/a1": b"{}"}
        with pytest.raises(DiscoveryDown, match="permission denied"):
            await services.list("/")
        await registration.close()
        assert not await services.list(PREFIX)
    for user, password, said in (("", "", "user name is empty"), ("services", "0042", "invalid user ID or password")):
        async with discovery(own_etcd, user, password) as stranger:
            with pytest.raises(DiscoveryDown, match=said):
                await stranger.list(PREFIX)


async def test_it_changes_nothing_the_second_time_and_mends_what_was_done_by_half(own_etcd: EtcdServer) -> None:
    run(own_etcd)
    assert run(own_etcd) == (0, "etcd has its users already\n")
    assert run(own_etcd, SERVICES_PASSWORD="another") == (0, "etcd has its users and requires authentication now\n")
    async with discovery(own_etcd, password="another") as services:
        assert not await services.list(PREFIX)


def test_it_says_what_to_do_where_it_may_do_nothing(own_etcd: EtcdServer) -> None:
    run(own_etcd)
    status, said = run(own_etcd, SERVICES_PASSWORD="another", ETCD_ROOT_PASSWORD="another")
    assert status == 1
    assert "ETCD_ROOT_PASSWORD was changed" in said
    own_etcd.stop()
    assert run(own_etcd)[0] == 1


def test_no_proxy_of_the_containers_environment_is_asked_or_hears_the_passwords(own_etcd: EtcdServer) -> None:
    """Docker gives every container the proxies of its client's settings."""
    nowhere = "http://127.0.0.1:1"
    assert run(own_etcd, http_proxy=nowhere, HTTP_PROXY=nowhere, no_proxy="")[0] == 0


async def test_services_go_on_after_etcd_has_forgotten_their_logins(own_etcd: EtcdServer) -> None:
    """Its tokens are in memory alone."""
    run(own_etcd)
    async with discovery(own_etcd) as services:
        registration = await services.register(lambda _epoch: {f"{PREFIX}instances/worker/a1": b"{}"})
        await registration.publish()
        own_etcd.restart()
        await registration.publish()
        while True:
            try:
                assert await services.list(PREFIX) == {f"{PREFIX}instances/worker/a1": b"{}"}
                break
            except DiscoveryDown:
                continue
        await registration.close()
