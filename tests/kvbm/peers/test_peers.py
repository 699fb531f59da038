"""Peers are found in the address book, and forgotten when they leave it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from services.kvbm.config import KvbmConfig, PeersConfig
from services.kvbm.peers.messages import PeerAddress
from services.kvbm.peers.peers import parse_address
from shared import subjects
from shared.config import load
from shared.discovery.contract import Registration
from shared.discovery.memory import MemoryDiscovery
from shared.errors import ConfigError
from shared.messages.cards import INSTANCE, EventSource, Instance
from shared.messages.codec import JSON_HEADER
from tests.kvbm.peer_rig import PEERS
from tests.kvbm.store_rig import LAYOUT, LIMIT_S, NAMESPACE, Store, serving, until


@pytest.mark.parametrize(
    ("text", "host", "port"), [("10.0.0.1:70", "10.0.0.1", 70), ("[::1]:70", "::1", 70), (":70", "127.0.0.1", 70)]
)
def test_an_address_has_a_host_and_a_port(text: str, host: str, port: int) -> None:
    assert parse_address("i", text) == PeerAddress("i", host, port)


@pytest.mark.parametrize("text", ["", "host", "host:", "host:0", "host:70000", "host:-1", "host:x"])
def test_what_is_no_address_is_none(text: str) -> None:
    assert parse_address("i", text) is None


def test_a_setting_that_is_no_address_is_refused() -> None:
    for wrong in ("host", "host:70000"):
        with pytest.raises(ValueError, match="HOST:PORT"):
            PeersConfig(listen=wrong)


async def registered(store: Store, instance: str, peers: str) -> Registration:
    entry = Instance(
        *(NAMESPACE, "kvbm", instance, 1, "there", 1, 0.0, "1"),
        subjects={"control": subjects.control(NAMESPACE, "kvbm", instance)},
        layouts={LAYOUT.digest: EventSource("tcp://there:1", "")},
        peers=peers,
    )
    key = subjects.instance_key(NAMESPACE, "kvbm", instance)
    return await MemoryDiscovery(store.world.store).register(lambda _: {key: INSTANCE.encode(entry, JSON_HEADER)})


async def test_kvbms_of_the_address_book_are_peers_until_they_leave_it(tmp_path: Path) -> None:
    async with serving(tmp_path, peers=PEERS) as store:
        assert store.service.peers is not None
        known = store.service.peers.cache.choice.known
        await store.world.attached("a")
        one = await registered(store, "one", "10.0.0.1:70")
        two = await registered(store, "two", "")
        await until(lambda: "two" in store.runtime.directory.instances)
        assert {name: peer.address.host for name, peer in known.items()} == {"one": "10.0.0.1"}
        rates = store.service.peers.rates
        assert (rates.wait_s, rates.least_blocks) == (PEERS.wait_s, PEERS.least_blocks)
        assert rates.bytes_per_s == {"one": known["one"].rate}, "reported to routers"
        await one.close()
        await until(lambda: not known)
        await two.close()


async def test_a_kvbm_without_a_port_has_no_peers(tmp_path: Path) -> None:
    async with serving(tmp_path) as store:
        async with asyncio.timeout(LIMIT_S):
            while (entry := await store.entry()) is None:  # noqa: ASYNC110 - it is in discovery
                await asyncio.sleep(0.002)
        assert store.service.peers is None
        assert entry.peers == ""


@pytest.mark.parametrize(
    ("given", "named"),
    [
        (dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), "file"), "tls_cert, tls_key, tls_ca"),
        ({"backend": "nixl"}, "backend"),
        ({"advertise": "here"}, "advertise"),
        ({"nixl_device": "eth0"}, "nixl_device"),
    ],
)
def test_what_only_other_machines_need_is_refused_without_an_address_for_them(
    given: dict[str, str], named: str
) -> None:
    flags = ["--pool-directory", "/dev/shm/pool", "--pool-size-bytes", "1"]
    flags += [f"--peers-{name}={value}" for name, value in given.items()]
    with pytest.raises(ConfigError, match=f"and {named} would have no effect: set peers.listen to HOST:PORT of this"):
        load(KvbmConfig, flags=flags, environ={})
    load(KvbmConfig, flags=[*flags, "--peers-listen=127.0.0.1:0"], environ={})
