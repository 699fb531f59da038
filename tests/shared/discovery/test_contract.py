"""The contract of shared/discovery/contract.py, over every back end."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import etcd3
import pytest

from shared.config import DiscoveryConfig
from shared.discovery.backends import open_discovery
from shared.discovery.contract import Discovery, KeyAdded, KeyRemoved, Registration, Synced
from shared.discovery.etcd import EtcdDiscovery
from shared.discovery.file import FileDiscovery
from shared.discovery.intake import DEFAULT, IntakeLimits
from shared.discovery.memory import MemoryDiscovery, MemoryRegistration, MemoryStore
from shared.errors import ConfigError, ProtocolError
from tests.shared.watched import Watched, watching


class Backend:
    """One back end: endpoints at it, and a lease lost though its owner lives."""

    def __init__(
        self, open_one: Callable[[IntakeLimits], Discovery], lose: Callable[[Registration, str], None]
    ) -> None:
        self.prefix = f"/headrace/{secrets.token_hex(6)}/"
        self.lose = lose
        self._open_one = open_one
        self._opened: list[Discovery] = []

    def open(self, limits: IntakeLimits = DEFAULT) -> Discovery:
        self._opened.append(self._open_one(limits))
        return self._opened[-1]

    async def close(self) -> None:
        for discovery in self._opened:
            await discovery.close()


def _memory() -> Backend:
    store = MemoryStore()

    def lose(registration: Registration, key: str) -> None:
        assert isinstance(registration, MemoryRegistration)
        store.expire(registration)

    return Backend(lambda limits: MemoryDiscovery(store, limits=limits), lose)


def _file(directory: Path) -> Backend:
    def lose(registration: Registration, key: str) -> None:
        for file in directory.glob("*.json"):
            if key in file.read_text():
                file.with_suffix(".lock").unlink()
                file.unlink()

    return Backend(lambda limits: FileDiscovery(directory, limits=limits), lose)


def _etcd(endpoint: str) -> Backend:
    host, port = endpoint.split(":")

    def lose(registration: Registration, key: str) -> None:
        with etcd3.client(host, int(port), timeout=60) as client:
            _, about = client.get(key)
            assert about is not None
            client.revoke_lease(about.lease_id)

    return Backend(
        lambda limits: EtcdDiscovery(DiscoveryConfig(endpoints=(endpoint,), lease_ttl_s=5.0), limits=limits), lose
    )


@pytest.fixture(params=["memory", "file", "etcd"])
async def backend(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Backend]:
    match request.param:
        case "memory":
            made = _memory()
        case "file":
            made = _file(tmp_path / "discovery")
        case _:
            made = _etcd(request.getfixturevalue("etcd_endpoint"))
    yield made
    await made.close()


async def test_a_watch_tells_what_is_there_then_synced_then_changes(backend: Backend) -> None:
    discovery, prefix = backend.open(), backend.prefix
    first = await discovery.register(lambda epoch: {f"{prefix}a": b"1", f"{prefix}b": b"2"})
    async with watching(backend.open(), prefix) as watched:
        assert watched.reported == [KeyAdded(f"{prefix}a", b"1"), KeyAdded(f"{prefix}b", b"2"), Synced()]
        second = await discovery.register(lambda epoch: {f"{prefix}c": b"3"})
        await watched.until_entries({f"{prefix}a": b"1", f"{prefix}b": b"2", f"{prefix}c": b"3"})
        await second.close()
        await watched.until_entries({f"{prefix}a": b"1", f"{prefix}b": b"2"})
        assert watched.reported[3:] == [KeyAdded(f"{prefix}c", b"3"), KeyRemoved(f"{prefix}c")]
    await first.close()


async def test_a_watch_of_nothing_is_synced_at_once(backend: Backend) -> None:
    async with watching(backend.open(), backend.prefix) as watched:
        assert watched.reported == [Synced()]


async def test_a_listing_shows_what_was_registered(backend: Backend) -> None:
    discovery, prefix = backend.open(), backend.prefix
    registration = await discovery.register(lambda epoch: {f"{prefix}a": "ü".encode()})
    assert await backend.open().list(prefix) == {f"{prefix}a": "ü".encode()}
    await registration.close()
    assert await discovery.list(prefix) == {}


async def test_publish_tells_new_values_and_deletes_keys_no_longer_named(backend: Backend) -> None:
    discovery, prefix = backend.open(), backend.prefix
    entries = {f"{prefix}a": b"1", f"{prefix}b": b"1"}
    registration = await discovery.register(lambda epoch: entries)
    async with watching(backend.open(), prefix) as watched:
        entries = {f"{prefix}a": b"2", f"{prefix}c": b"1"}
        await registration.publish()
        await watched.until_entries({f"{prefix}a": b"2", f"{prefix}c": b"1"})
        assert registration.epoch == 1
    await registration.close()


async def test_what_entries_raise_is_raised_by_register(backend: Backend) -> None:
    discovery = backend.open()

    def entries(epoch: int) -> dict[str, bytes]:
        raise LookupError(epoch)

    with pytest.raises(LookupError):
        await discovery.register(entries)
    assert await discovery.list(backend.prefix) == {}


async def test_close_takes_the_keys_away_and_may_be_called_twice(backend: Backend) -> None:
    discovery, prefix = backend.open(), backend.prefix
    registration = await discovery.register(lambda epoch: {f"{prefix}a": b"1"})
    async with watching(discovery, prefix) as watched:
        await registration.close()
        await registration.close()
        assert await discovery.list(prefix) == {}
        await watched.until_entries({})


async def test_an_endpoint_publishes_what_its_registrations_name_and_nothing_once_they_are_closed(
    backend: Backend,
) -> None:
    discovery, prefix = backend.open(), backend.prefix
    entries = {f"{prefix}a": b"1", f"{prefix}b": b"1"}
    registration = await discovery.register(lambda epoch: entries)
    other = await discovery.register(lambda epoch: {f"{prefix}c": b"1"})
    assert [discovery.publishes(prefix + name) for name in "abcd"] == [True, True, True, False]
    backend.lose(registration, f"{prefix}a")
    assert discovery.publishes(f"{prefix}a")
    entries = {f"{prefix}b": b"1"}
    await registration.publish()
    assert [discovery.publishes(prefix + name) for name in "abc"] == [False, True, True]
    await registration.close()
    assert [discovery.publishes(prefix + name) for name in "abc"] == [False, False, True]
    await other.close()


async def test_two_watchers_see_the_same(backend: Backend) -> None:
    discovery, prefix = backend.open(), backend.prefix
    async with watching(discovery, prefix) as one, watching(discovery, prefix) as other:
        registration = await backend.open().register(lambda epoch: {f"{prefix}a": b"1"})
        await one.until_entries({f"{prefix}a": b"1"})
        await other.until_entries({f"{prefix}a": b"1"})
        await registration.close()
        await one.until_entries({})
        await other.until_entries({})


async def test_a_watch_sees_nothing_outside_its_prefix(backend: Backend) -> None:
    discovery, prefix = backend.open(), backend.prefix
    async with watching(discovery, f"{prefix}in/") as watched:
        outside = await discovery.register(lambda epoch: {f"{prefix}out/a": b"1", f"{prefix}in": b"1"})
        inside = await discovery.register(lambda epoch: {f"{prefix}in/a": b"1"})
        await watched.until_entries({f"{prefix}in/a": b"1"})
        assert await discovery.list(f"{prefix}in/") == {f"{prefix}in/a": b"1"}
    await outside.close()
    await inside.close()


async def test_a_lost_lease_is_granted_again_under_the_next_epoch(backend: Backend) -> None:
    discovery, prefix = backend.open(), backend.prefix
    registration = await discovery.register(lambda epoch: {f"{prefix}a": b"%d" % epoch, f"{prefix}b": b"card"})
    bystander = await discovery.register(lambda epoch: {f"{prefix}c": b"%d" % epoch})
    async with watching(backend.open(), prefix) as watched:
        backend.lose(registration, f"{prefix}a")
        await watched.until_entries({f"{prefix}a": b"2", f"{prefix}b": b"card", f"{prefix}c": b"1"})
        assert registration.epoch == 2
        assert bystander.epoch == 1
        assert not watched.removed(f"{prefix}c")
    await registration.close()
    await bystander.close()


async def test_many_instances_come_and_go(backend: Backend) -> None:
    prefix = backend.prefix
    discoveries = [backend.open() for _ in range(4)]
    expected = {f"{prefix}{n:02d}": b"%d" % n for n in range(40)}

    def entries(key: str) -> Callable[[int], dict[str, bytes]]:
        return lambda epoch: {key: expected[key]}

    async with watching(backend.open(), prefix) as watched:
        registrations = await asyncio.gather(
            *(discoveries[n % 4].register(entries(key)) for n, key in enumerate(expected))
        )
        await watched.until_entries(expected)
        await asyncio.gather(*(registration.close() for registration in registrations))
        await watched.until_entries({})


def read_number(key: str, value: bytes) -> int:
    """A watcher's `read`."""
    if not value.isdigit():
        raise ProtocolError("no number")
    return int(value)


async def test_what_a_watcher_cannot_read_is_counted_and_takes_no_place(backend: Backend) -> None:
    discovery, prefix = backend.open(IntakeLimits(entries=3, page=7)), backend.prefix
    junk = {f"{prefix}a{n:02d}": b"junk" for n in range(40)}
    flood = await discovery.register(lambda epoch: junk)
    numbers = {f"{prefix}b{n}": b"%d" % n for n in range(3)}
    registration = await discovery.register(lambda epoch: numbers)
    async with watching(discovery, prefix, read=read_number) as watched:
        assert watched.entries == numbers
        assert watched.left_out == 40
        junk |= {f"{prefix}c{n:02d}": b"junk" for n in range(5)}
        await flood.publish()
        await watched.until(lambda watched: watched.left_out == 45)
        numbers[f"{prefix}b0"] = b"junk"
        await registration.publish()
        await watched.until(lambda watched: watched.removed(f"{prefix}b0"))
        numbers[f"{prefix}b0"] = b"7"
        await registration.publish()
        await watched.until_entries(numbers)
    await flood.close()
    await registration.close()


async def test_beyond_the_limit_the_oldest_keys_are_taken_in_and_a_free_place_is_filled(backend: Backend) -> None:
    discovery, prefix = backend.open(IntakeLimits(entries=3, page=2)), backend.prefix
    old = {f"{prefix}z{n}": b"%d" % n for n in range(3)}
    first = await discovery.register(lambda epoch: old)
    young = {f"{prefix}a{n}": b"%d" % n for n in range(10)}
    second = await discovery.register(lambda epoch: young)
    async with watching(discovery, prefix) as watched:
        assert watched.entries == old
        assert watched.left_out == 10
        assert await discovery.list(prefix) == old
        await first.close()
        await watched.until(lambda watched: len(watched.entries) == 3 and watched.entries.items() <= young.items())
        late = await discovery.register(lambda epoch: {f"{prefix}b": b"1"})
        await watched.until(lambda watched: watched.left_out > 10)
        assert f"{prefix}b" not in watched.entries
        await second.close()
        await watched.until_entries({f"{prefix}b": b"1"})
        await late.close()


async def test_a_value_over_the_limit_is_left_out_of_a_watch_and_of_a_listing(
    backend: Backend, caplog: pytest.LogCaptureFixture
) -> None:
    discovery, prefix = backend.open(IntakeLimits(value_bytes=8)), backend.prefix
    entries = {f"{prefix}a": b"12345678", f"{prefix}b": b"123456789", f"{prefix}c": b"123456789"}
    registration = await discovery.register(lambda epoch: entries)
    async with watching(discovery, prefix) as watched:
        assert watched.entries == {f"{prefix}a": b"12345678"}
        assert watched.left_out == 2
        assert await discovery.list(prefix) == {f"{prefix}a": b"12345678"}
        assert await discovery.list(prefix) == {f"{prefix}a": b"12345678"}
        [line] = [record.message for record in caplog.records if "left out of a listing" in record.message]
        assert "its value has 9 bytes, more than 8" in line
        entries = {f"{prefix}b": b"1"}
        await registration.publish()
        await watched.until_entries(entries)
    await registration.close()


async def test_a_closed_discovery_ends_its_watches(backend: Backend) -> None:
    discovery = backend.open()
    watched = Watched()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(watched.follow(discovery, backend.prefix, None))
        await watched.until(lambda watched: watched.synced)
        await discovery.close()


@pytest.mark.parametrize("kind", ["file", "etcd"])
async def test_a_killed_owners_keys_are_gone_within_its_lease(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    endpoint = request.getfixturevalue("etcd_endpoint") if kind == "etcd" else "-:1"
    config = DiscoveryConfig(backend=kind, endpoints=(endpoint,), path=str(tmp_path / "discovery"), lease_ttl_s=2.0)
    prefix = f"/headrace/{secrets.token_hex(6)}/"
    program = f"""
import asyncio
from shared.config import DiscoveryConfig
from shared.discovery.backends import open_discovery
async def main():
    discovery = open_discovery({config!r})
    registration = await discovery.register(lambda epoch: {{"{prefix}a": b"1"}})
    await asyncio.Event().wait()
asyncio.run(main())
"""
    discovery = open_discovery(config)
    async with watching(discovery, prefix) as watched:
        owner = await asyncio.create_subprocess_exec(sys.executable, "-c", program)
        try:
            await watched.until_entries({f"{prefix}a": b"1"})
        finally:
            owner.kill()
            await owner.wait()
        await watched.until_entries({})
    await discovery.close()


def test_an_unknown_back_end_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="'zookeeper'; known: etcd, file"):
        open_discovery(DiscoveryConfig(backend="zookeeper"))
