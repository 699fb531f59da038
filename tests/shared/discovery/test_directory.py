"""shared/discovery/directory.py: the typed view of discovery, over the in-process fakes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Mapping

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from shared import subjects
from shared.bus.contract import Message
from shared.discovery.directory import (
    CardDown,
    CardRefused,
    CardUp,
    Directory,
    DirectoryChange,
    InstanceDown,
    InstanceUp,
)
from shared.errors import BusDown
from shared.hashing import self_test
from shared.messages.cards import INSTANCE, MODEL_CARD, Instance, KvLayout, ModelCard, ServiceName
from shared.messages.codec import JSON_HEADER
from shared.messages.control import PING, PONG, Pong
from tests.fakes.memory_bus import MemoryBroker, MemoryBus
from tests.fakes.memory_discovery import MemoryDiscovery, MemoryStore

NAMESPACE = "test"


def instance(name: str, epoch: int = 1, service: ServiceName = "worker") -> Instance:
    return Instance(NAMESPACE, service, name, epoch, "machine", 1, 0.0, "0.1.0")


def card(name: str, block_size: int = 16) -> ModelCard:
    return ModelCard(
        model="org/m",
        instance=name,
        path="/models/m",
        tokenizer_digest="t",
        hash_self_test=self_test(block_size),
        context_length=2048,
        vocab_size=1000,
        block_size=block_size,
        capacity_blocks=100,
        kv_layout=KvLayout("float32", 2, 1, 8, block_size),
    )


def published(*entries: Instance | ModelCard) -> dict[str, bytes]:
    """Keys and values as services publish them."""
    values: dict[str, bytes] = {}
    for entry in entries:
        if isinstance(entry, Instance):
            key = subjects.instance_key(NAMESPACE, entry.service, entry.instance)
            values[key] = INSTANCE.encode(entry, JSON_HEADER)
        else:
            values[subjects.model_key(NAMESPACE, entry.model, entry.instance)] = MODEL_CARD.encode(entry, JSON_HEADER)
    return values


class WatchedBus(MemoryBus):
    """A bus that tells when it could not ask."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.refused = asyncio.Event()

    async def request(
        self, subject: str, payload: bytes, *, timeout_s: float, headers: Mapping[str, str] | None = None
    ) -> Message:
        try:
            return await super().request(subject, payload, timeout_s=timeout_s, headers=headers)
        except BusDown:
            self.refused.set()
            raise


class World:
    """A store, a bus, and a directory that follows, with all the changes that it reported."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.discovery = MemoryDiscovery(self.store)
        self.broker = MemoryBroker()
        self.bus = WatchedBus(self.broker)
        self.registry = CollectorRegistry()
        self.directory = Directory(self.discovery, self.bus, NAMESPACE, registry=self.registry)
        self.reported: list[DirectoryChange] = []
        self._changed = asyncio.Event()
        self.directory.subscribe(self.hear)

    def hear(self, change: DirectoryChange) -> None:
        self.reported.append(change)
        self._changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():
                self._changed.clear()
                await self._changed.wait()

    async def answer_pings(self, one: Instance, publishes: bool | None = None, *, unanswered: int = 0) -> list[Message]:
        """Let an instance answer on its control subject all pings but the first `unanswered`, as one that says nothing
        of keys does where `publishes` is not given; returns where its pings gather."""
        peer = MemoryBus(self.broker)
        pings: list[Message] = []

        async def receive(message: Message) -> None:
            pings.append(message)
            if len(pings) > unanswered:
                await peer.publish(message.reply, PONG.encode(Pong(one.instance, one.epoch, 0, publishes)))

        await peer.subscribe(subjects.control(NAMESPACE, one.service, one.instance), receive)
        return pings

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0


@pytest.fixture
async def world() -> AsyncIterator[World]:
    made = World()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(made.directory.run())
        yield made
        following.cancel()


async def test_a_directory_of_one_service_knows_no_others_and_no_cards(world: World) -> None:
    only = Directory(MemoryDiscovery(world.store), world.bus, NAMESPACE, service="frontend")
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(only.run())
        frontend = msgspec.structs.replace(instance("f1"), service="frontend")
        await world.discovery.register(lambda epoch: published(instance("a1"), card("a1"), frontend))
        await world.until(lambda: len(world.reported) == 3)
        await only.synced()
        await world.until(lambda: bool(only.instances))
        assert only.instances.keys() == {"f1"}
        assert not only.cards
        following.cancel()


async def test_published_entries_are_reported_in_order_and_closed_ones_are_removed(world: World) -> None:
    registration = await world.discovery.register(lambda epoch: published(instance("a1"), card("a1")))
    await world.directory.synced()
    await world.until(lambda: len(world.reported) == 2)
    assert world.reported == [InstanceUp(instance("a1")), CardUp(card("a1"))]
    assert world.directory.instances == {"a1": instance("a1")}
    assert world.directory.cards == {("org/m", "a1"): card("a1")}
    await registration.close()
    await world.until(lambda: not world.directory.instances and not world.directory.cards)
    assert InstanceDown(instance("a1")) in world.reported
    assert CardDown(card("a1")) in world.reported


async def test_a_late_subscriber_hears_what_is_known_at_once(world: World) -> None:
    await world.discovery.register(lambda epoch: published(instance("a1"), card("a1"), card("b2", block_size=32)))
    await world.until(lambda: len(world.reported) == 3)
    late: list[DirectoryChange] = []
    world.directory.subscribe(late.append)
    assert late == world.reported


async def test_an_instance_that_registers_again_comes_up_with_its_next_epoch(world: World) -> None:
    registration = await world.discovery.register(lambda epoch: published(instance("a1", epoch)))
    await world.until(lambda: "a1" in world.directory.instances)
    world.store.expire(registration)
    await world.until(lambda: InstanceUp(instance("a1", 2)) in world.reported)


async def test_a_value_that_does_not_parse_is_left_out_until_a_good_one_comes(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    good = published(instance("a1"), card("a1"))
    entries = good | {subjects.instance_key(NAMESPACE, "worker", "b2"): b"{", "/headrace/test/x": b"1"}
    registration = await world.discovery.register(lambda epoch: entries)
    await world.until(lambda: len(world.reported) == 2)
    assert world.directory.instances.keys() == {"a1"}
    assert world.count("headrace_directory_unreadable_values_total") == 2
    assert [record.levelname for record in caplog.records if "is left out" in record.message] == ["WARNING"]
    entries = good | published(instance("b2"))
    await registration.publish()
    await world.until(lambda: "b2" in world.directory.instances)


async def test_a_flood_of_unreadable_values_is_one_line_in_the_log_and_all_are_counted(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    junk = {subjects.instance_key(NAMESPACE, "worker", f"{n:04d}"): b"junk" for n in range(1000)}
    flood = await world.discovery.register(lambda epoch: junk)
    await world.discovery.register(lambda epoch: published(instance("a1")))
    await world.until(lambda: "a1" in world.directory.instances)
    assert world.count("headrace_directory_unreadable_values_total") == 1000
    junk = dict.fromkeys(junk, b"other junk")
    await flood.publish()
    await world.discovery.register(lambda epoch: published(instance("b2")))
    await world.until(lambda: "b2" in world.directory.instances)
    assert world.count("headrace_directory_unreadable_values_total") == 2000
    assert len([record for record in caplog.records if "is left out" in record.message]) == 1


async def test_a_good_value_that_is_replaced_by_a_bad_one_is_gone(world: World) -> None:
    entries = published(instance("a1"))
    registration = await world.discovery.register(lambda epoch: entries)
    await world.until(lambda: "a1" in world.directory.instances)
    entries = dict.fromkeys(entries, b"nonsense")
    await registration.publish()
    await world.until(lambda: world.reported[-1] == InstanceDown(instance("a1")))


async def test_a_refused_card_is_logged_counted_and_visible_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    first = await world.discovery.register(lambda epoch: published(instance("a1"), card("a1")))
    await world.until(lambda: len(world.reported) == 2)
    await world.discovery.register(lambda epoch: published(instance("b2"), card("b2", block_size=32)))
    await world.until(lambda: bool(world.directory.refused))
    [reason] = world.directory.refused.values()
    assert reason == "block_size: the card has 32, a1 came first with 16"
    assert world.reported[-1] == CardRefused(card("b2", block_size=32), reason)
    assert world.count("headrace_directory_refused_cards_total", field="block_size") == 1
    errors = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert errors == [f"model org/m at b2 is refused: {reason}"]
    await first.close()
    await world.until(lambda: world.directory.cards.keys() == {("org/m", "b2")})
    assert not world.directory.refused


@pytest.mark.parametrize("service", ["worker", "router"])
async def test_after_a_wipe_an_instance_that_answers_stays_and_a_silent_one_goes(
    world: World, service: ServiceName
) -> None:
    living, dead = instance("a1", service=service), instance("b2")
    registrations = [
        await world.discovery.register(lambda epoch: published(living, card("a1"))),
        await world.discovery.register(lambda epoch: published(dead, card("b2"))),
    ]
    pings = await world.answer_pings(living)
    await world.until(lambda: len(world.reported) == 4)
    world.store.outage()
    for registration in registrations:
        world.store.kill(registration)  # none of them will publish again
    world.store.recover()
    await world.until(lambda: len(world.reported) == 6)
    assert {type(change) for change in world.reported[4:]} == {InstanceDown, CardDown}
    assert world.directory.instances.keys() == {"a1"}
    assert world.directory.cards.keys() == {("org/m", "a1")}
    assert len(pings) >= 2


async def test_an_instance_whose_keys_are_deleted_under_it_stays_while_it_says_that_it_publishes_them(
    world: World,
) -> None:
    registration = await world.discovery.register(lambda epoch: published(instance("a1", epoch), card("a1")))
    pings = await world.answer_pings(instance("a1"), publishes=True)
    await world.until(lambda: len(world.reported) == 2)
    world.store.expire(registration)
    await world.until(lambda: InstanceUp(instance("a1", 2)) in world.reported)
    assert [type(change) for change in world.reported] == [InstanceUp, CardUp, InstanceUp]
    assert {PING.decode(ping.payload).key for ping in pings} == published(instance("a1"), card("a1")).keys()


async def test_an_instance_that_stands_still_while_its_keys_are_deleted_stays_if_it_answers_later(world: World) -> None:
    registration = await world.discovery.register(lambda epoch: published(instance("a1")))
    pings = await world.answer_pings(instance("a1"), publishes=True, unanswered=1)
    await world.until(lambda: len(world.reported) == 1)
    world.store.kill(registration)  # it will not publish again, so only what it answers counts
    async with asyncio.timeout(60):
        while len(pings) < 3:  # noqa: ASYNC110 - nothing is called for a ping
            await asyncio.sleep(0.01)
    assert [type(change) for change in world.reported] == [InstanceUp]


@pytest.mark.parametrize("publishes", [False, None])
async def test_an_instance_that_took_its_keys_away_or_says_nothing_of_them_goes_though_it_answers(
    world: World, publishes: bool | None
) -> None:
    registration = await world.discovery.register(lambda epoch: published(instance("a1"), card("a1")))
    pings = await world.answer_pings(instance("a1"), publishes)
    await world.until(lambda: len(world.reported) == 2)
    await registration.close()
    await world.until(lambda: not world.directory.instances and not world.directory.cards)
    assert len(pings) == 2


async def test_while_the_bus_is_away_too_no_instance_is_removed(world: World) -> None:
    registration = await world.discovery.register(lambda epoch: published(instance("a1")))
    await world.until(lambda: len(world.reported) == 1)
    world.store.outage()
    world.store.kill(registration)
    world.broker.disconnect(world.bus)
    world.store.recover()
    async with asyncio.timeout(60):
        await world.bus.refused.wait()
    assert world.directory.instances.keys() == {"a1"}
    world.broker.reconnect(world.bus)
    await world.until(lambda: not world.directory.instances)


async def test_after_an_outage_an_instance_whose_answer_cannot_be_read_has_answered_all_the_same(world: World) -> None:
    registrations = [
        await world.discovery.register(lambda epoch: published(instance("a1"))),
        await world.discovery.register(lambda epoch: published(instance("b2"))),
    ]
    peer = MemoryBus(world.broker)

    async def receive(message: Message) -> None:
        await peer.publish(message.reply, b"of a later version")

    await peer.subscribe(subjects.control(NAMESPACE, "worker", "a1"), receive)
    await world.until(lambda: len(world.reported) == 2)
    world.store.outage()
    for registration in registrations:
        world.store.kill(registration)
    world.store.recover()
    await world.until(lambda: "b2" not in world.directory.instances)
    assert world.directory.instances.keys() == {"a1"}


async def test_after_an_outage_a_missing_key_that_names_no_instance_is_gone_and_the_rest_followed(world: World) -> None:
    strange = {"/headrace/test/a note": b"1", "/headrace/test/instances/worker/a b": b"2"}
    registration = await world.discovery.register(lambda epoch: strange | published(instance("a1")))
    await world.until(lambda: len(world.reported) == 1)
    world.store.outage()
    world.store.kill(registration)
    world.store.recover()
    await world.until(lambda: not world.directory.instances)
    await world.discovery.register(lambda epoch: published(instance("b2")))
    await world.until(lambda: "b2" in world.directory.instances)


async def test_a_value_nested_without_end_is_left_out_and_the_rest_followed(world: World) -> None:
    key = subjects.instance_key(NAMESPACE, "worker", "b2")
    await world.discovery.register(lambda epoch: {key: b'{"later":' + b"[" * 100_000} | published(instance("a1")))
    await world.until(lambda: "a1" in world.directory.instances)
    assert world.count("headrace_directory_unreadable_values_total") == 1


async def test_one_id_under_two_services_is_left_out_and_the_rest_followed(world: World) -> None:
    both = published(instance("a1")) | published(instance("a1", service="router"))
    registration = await world.discovery.register(lambda epoch: both)
    await world.until(lambda: "a1" in world.directory.instances)
    await registration.close()
    await world.until(lambda: not world.directory.instances)
    assert world.count("headrace_directory_unreadable_values_total") == 1
    await world.discovery.register(lambda epoch: published(instance("b2")))
    await world.until(lambda: "b2" in world.directory.instances)
