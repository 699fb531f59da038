"""A router that starts next to others has their reservations before it answers; it also starts if none of them
answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import pytest

from services.router import replica_sync
from shared import subjects
from shared.bus.contract import LAST_HEADER, Message
from shared.bus.memory_bus import MemoryBus
from shared.discovery.memory import MemoryDiscovery
from shared.errors import NoResponders
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from shared.messages.select import (
    RESERVATIONS,
    RESERVATIONS_REQUEST,
    Finished,
    Prefilled,
    Reservations,
    ReservationsRequest,
    Reserved,
)
from tests.router.fleet import LIMIT_S, MODEL, NAMESPACE, RouterFleet, fleet, tokens_of, until

Answer = Callable[[Message], Awaitable[None]]


def reserved(request: str, tokens: int = 100) -> Reserved:
    return Reserved(request, 1, "f", "a", 0, tokens, 5, router="old")


class OldRouter:
    """Another router as seen by one that starts: its address and its answers."""

    def __init__(self, world: RouterFleet, name: str, *, started: float = 0.0) -> None:
        self.world = world
        self.name = name
        self.started = started
        self.bus = MemoryBus(world.broker)
        self.asked = asyncio.Event()
        self.open = asyncio.Event()

    async def start(self, *parts: Reservations | bytes) -> None:
        """Answer with `parts`, the last one marked as the last message, once `open` is set."""

        async def answer(message: Message) -> None:
            assert RESERVATIONS_REQUEST.decode(message.payload) == ReservationsRequest(MODEL)
            self.asked.set()
            await self.open.wait()
            for number, part in enumerate(parts, 1):
                payload = part if isinstance(part, bytes) else RESERVATIONS.encode(part)
                headers = {LAST_HEADER: "true"} if number == len(parts) else None
                await self.bus.publish(message.reply, payload, headers=headers)

        await self.bus.subscribe(subjects.reservations(NAMESPACE, self.name), answer)
        await self.register()

    async def register(self) -> None:
        entry = Instance(NAMESPACE, "router", self.name, 1, "m", 1, self.started, "0")
        key = subjects.instance_key(NAMESPACE, "router", self.name)
        await MemoryDiscovery(self.world.store).register(lambda _: {key: INSTANCE.encode(entry, JSON_HEADER)})


async def test_a_router_that_starts_copies_the_reservations_and_their_progress() -> None:
    async with fleet() as world:
        for name in ("a", "b"):
            await world.worker(name)
        for number in range(5):
            await world.chosen(tokens_of(f"x{number}", 4), f"r{number}")
        await world.tell(Prefilled("r0", 1, 0), Finished("r1", 1))
        load = world.router.models[MODEL].load
        await until(lambda: load.statistics().reservations == 4)
        async with fleet(instance="0b", beside=world) as replica:
            copied = replica.router.models[MODEL].load
            assert {each.reserved.request: each.prefilled for each in copied.reservations()} == {
                "r0": True,
                "r2": False,
                "r3": False,
                "r4": False,
            }
            assert [copied.load_of((name, 0)) for name in "ab"] == [load.load_of((name, 0)) for name in "ab"]
            assert replica.metric("headrace_router_joins_total", outcome="told") == 1
            await world.tell(*(Finished(f"r{number}", 1) for number in range(5)))
            await until(lambda: not load.reservations() and not copied.reservations())


async def test_many_reservations_come_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_sync, "RESERVATIONS_PER_MESSAGE", 2)
    async with fleet() as world:
        await world.worker("a")
        for number in range(5):
            await world.chosen(tokens_of(f"x{number}", 4), f"r{number}")
        question = RESERVATIONS_REQUEST.encode(ReservationsRequest(MODEL))
        subject = subjects.reservations(NAMESPACE, world.runtime.instance)
        async with world.bus.stream(subject, question, idle_timeout_s=LIMIT_S) as answers:
            parts = [RESERVATIONS.decode(message.payload) async for message in answers]
        assert [[each.request for each in part.reserved] for part in parts] == [["r0", "r1"], ["r2", "r3"], ["r4"]]
        async with fleet(instance="0b", beside=world) as replica:
            assert len(replica.router.models[MODEL].load.reservations()) == 5


async def test_an_unknown_model_has_no_reservations() -> None:
    async with fleet() as world:
        question = RESERVATIONS_REQUEST.encode(ReservationsRequest("unheard of"))
        subject = subjects.reservations(NAMESPACE, world.runtime.instance)
        async with world.bus.stream(subject, question, idle_timeout_s=LIMIT_S) as answers:
            assert [RESERVATIONS.decode(message.payload) async for message in answers] == [
                Reservations("unheard of", [], [])
            ]


async def test_a_request_in_json_is_answered_in_json() -> None:
    async with fleet() as world:
        await world.worker("a")
        await world.chosen(tokens_of("x", 4), "r")
        question = RESERVATIONS_REQUEST.encode(ReservationsRequest(MODEL), JSON_HEADER)
        subject = subjects.reservations(NAMESPACE, world.runtime.instance)
        async with world.bus.stream(subject, question, idle_timeout_s=LIMIT_S, headers=JSON_HEADER) as answers:
            (message,) = [message async for message in answers]
        (reserved,) = RESERVATIONS.decode(message.payload, message.headers).reserved
        assert (reserved.request, message.headers["Content-Type"]) == ("r", "application/json")


async def test_an_end_that_is_received_before_the_answer_counts() -> None:
    async with fleet() as world:
        await world.worker("a")
        old = OldRouter(world, "old")
        await old.start(Reservations(MODEL, [reserved("ended"), reserved("lives")], [("ended", 1)]))
        starting = asyncio.create_task(_living(world, meanwhile=old))
        await old.asked.wait()
        await world.tell(Finished("ended", 1))
        old.open.set()
        assert await starting == ["lives"]


async def _living(world: RouterFleet, *, meanwhile: OldRouter) -> list[str]:
    async with fleet(instance="0b", beside=world) as replica:
        assert meanwhile.open.is_set(), "it counted as started before it had the reservations"
        return [each.reserved.request for each in replica.router.models[MODEL].load.reservations()]


async def test_a_starting_router_neither_answers_nor_registers_before_it_has_the_reservations() -> None:
    async with fleet() as world:  # lends its broker and worker, and stops listening itself
        await world.worker("a")
        for subscription in world.router._model_subscriptions[MODEL]:
            await subscription.unsubscribe()
        old = OldRouter(world, "old")
        await old.start(Reservations(MODEL, [reserved("r", tokens=5000)], []))
        starting = asyncio.create_task(_living(world, meanwhile=old))
        await old.asked.wait()
        with pytest.raises(NoResponders):
            await world.ask(tokens_of("x", 2))
        assert "0b" not in world.runtime.directory.instances
        old.open.set()
        assert await starting == ["r"]


@pytest.mark.parametrize("wrong", [b"\xc1", b"", RESERVATIONS.encode(Reservations(MODEL, [reserved("r", -1)], []))])
async def test_if_a_router_is_gone_silent_or_invalid_the_next_one_is_asked(
    wrong: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replica_sync, "ANSWER_TIMEOUT_S", 0.5)
    monkeypatch.setattr(replica_sync, "ROUTERS_ASKED", 4)
    async with fleet() as world:
        await world.worker("a")
        gone, silent = OldRouter(world, "gone"), OldRouter(world, "silent", started=1.0)
        senseless, good = OldRouter(world, "senseless", started=2.0), OldRouter(world, "good", started=3.0)
        await gone.register()
        await silent.start()
        await senseless.start(wrong)
        await good.start(Reservations(MODEL, [reserved("r")], []))
        for old in (silent, senseless, good):
            old.open.set()
        assert await _living(world, meanwhile=good) == ["r"]
        assert all(old.asked.is_set() for old in (silent, senseless))


async def test_if_no_router_answers_it_starts_without_reservations_and_logs_an_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(replica_sync, "ANSWER_TIMEOUT_S", 0.02)
    async with fleet() as world:
        await world.worker("a")
        olds = [OldRouter(world, f"old{number}", started=float(number)) for number in range(5)]
        for old in olds:
            await old.start()
        with caplog.at_level(logging.ERROR):
            async with fleet(instance="0b", beside=world) as replica:
                assert replica.metric("headrace_router_joins_total", outcome="failed") == 1
                assert (await replica.chosen(tokens_of("x", 2))).instance == "a"
        assert "no router sent its reservations; starting without them: old0: " in caplog.text
        assert [old.asked.is_set() for old in olds] == [True, True, True, False, False]


async def test_a_router_that_stops_while_it_waits_for_reservations_closes_its_subscriptions() -> None:
    async with fleet() as world, fleet(instance="0b", beside=world) as replica:
        old = OldRouter(world, "old")
        await old.start()
        await until(lambda: "old" in replica.runtime.directory.instances)
        await world.worker("a", awaited=False)
        await old.asked.wait()
        assert MODEL in replica.router.models
        await replica.router.stop()
        assert isinstance(replica.runtime.bus, MemoryBus)
        assert not world.broker.subscriptions(replica.runtime.bus)


async def test_a_request_that_cannot_be_read_is_counted() -> None:
    async with fleet() as world:
        subject = subjects.reservations(NAMESPACE, world.runtime.instance)
        await world.bus.publish(subject, b"\xc1")
        await world.bus.publish(
            subject, RESERVATIONS_REQUEST.encode(ReservationsRequest(MODEL))
        )  # without a reply subject
        await until(lambda: world.metric("headrace_malformed_messages_total", channel="reservations") == 1)
