"""Several routers on one broker: all of them know a reservation of any one, and the router that made it explains it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec
import pytest

from services.router import queries
from services.router.config import RouterConfig
from shared import subjects
from shared.bus.contract import Message
from shared.bus.memory_bus import MemoryBus
from shared.bus.outbox import EVENTS_A_MESSAGE
from shared.messages.people import EXPLANATIONS, ROUTER_STATE, Explanations, RouterState
from shared.messages.select import (
    LOAD_EVENTS,
    RESERVATIONS_REQUEST,
    SELECT,
    Finished,
    LoadEvents,
    Prefilled,
    ReservationsRequest,
    Reserved,
    Selected,
)
from tests.router.fleet import LIMIT_S, MODEL, NAMESPACE, NO_SPECULATION, RouterFleet, fleet, select, tokens_of, until


@asynccontextmanager
async def two(
    config: RouterConfig = NO_SPECULATION, *, workers: int = 4
) -> AsyncIterator[tuple[RouterFleet, RouterFleet]]:
    """Run two routers that both route to the workers w0 …"""
    async with fleet(config, instance="0a") as first, fleet(config, instance="0b", beside=first) as second:
        for number in range(workers):
            await second.knows(await first.worker(f"w{number}"))
        for world in (first, second):
            await until(lambda: world.metric("headrace_router_joins_total", outcome="told") == 1)  # noqa: B023
        yield first, second


def own_bus(world: RouterFleet) -> MemoryBus:
    """The router's end of the bus, which is the in-memory twin."""
    assert isinstance(world.runtime.bus, MemoryBus)
    return world.runtime.bus


async def explained(world: RouterFleet, subject: str, request: str) -> Explanations:
    answer = await world.bus.request(subject, request.encode(), timeout_s=LIMIT_S)
    assert answer.headers == {"Content-Type": "application/json"}
    return EXPLANATIONS.decode(answer.payload, answer.headers)


# --- reservations


async def test_a_burst_over_two_routers_is_known_to_both_and_spread() -> None:
    async with two() as (first, second):
        chosen = await asyncio.gather(*(first.chosen(tokens_of(f"{n:04}", 5), f"r{n}") for n in range(64)))
        assert {each.router for each in chosen} == {"0a", "0b"}
        loads = [world.router.models[MODEL].load for world in (first, second)]
        await until(lambda: [len(load.reservations()) for load in loads] == [64, 64])
        for number in range(4):
            here = [load.load_of((f"w{number}", 0)) for load in loads]
            assert here[0] == here[1]
        counts = Counter(each.instance for each in chosen)
        assert max(counts.values()) <= 24, "one router would give each of four 16"
        await first.tell(*(Finished(each.request, 1) for each in chosen))
        await until(lambda: [len(load.reservations()) for load in loads] == [0, 0])


def question(number: int) -> bytes:
    return SELECT.encode(select(tokens_of(f"{number:04}", 5), f"r{number}"))


async def test_another_routers_reservations_are_received_in_the_middle_of_a_burst() -> None:
    async with fleet() as world, fleet(instance="0b", beside=world):
        for name in ("a", "b"):
            await world.worker(name)
        await until(lambda: "0b" in world.runtime.directory.instances)
        asked = [asyncio.create_task(world.ask_raw(question(n), router=True)) for n in range(60)]
        elsewhere = asyncio.create_task(world.tell(Reserved("elsewhere", 1, "f", "a", 0, 100_000, 300, router="0b")))
        await elsewhere
        chosen = [await each for each in asked]
        # Much later `b` is as busy with these requests.
        assert all(isinstance(each, Selected) and each.instance == "b" for each in chosen[10:25])


async def test_a_question_finds_the_document_that_waits_at_a_worker_whichever_router_it_comes_to() -> None:
    async with two(RouterConfig(), workers=2) as (first, second):
        for worker in (*first.workers, *second.workers):
            await worker.reports(prefill_tokens_per_s=1000.0, waiting_tokens=50_000)
        for world in (first, second):
            await until(lambda: len(world.router.models[MODEL].load.speeds) == 2)  # noqa: B023
        document = tokens_of("long", 500)
        there = await first.ask_raw(SELECT.encode(select(document, "document")), router=True)
        await until(lambda: second.router.models[MODEL].speculation.bytes > 0)
        found = await second.ask_raw(SELECT.encode(select([*document, 1, 2, 3, 4], "question")), router=True)
        assert isinstance(there, Selected)
        assert isinstance(found, Selected)
        assert (found.router, found.instance, found.overlap.device) == ("0b", there.instance, 500)


async def test_reservations_of_one_moment_are_published_together_and_the_answers_do_not_wait() -> None:
    published: list[LoadEvents] = []

    async def hear(message: Message) -> None:
        published.append(LOAD_EVENTS.decode(message.payload))

    async with two(workers=1) as (world, _):
        await world.bus.subscribe(subjects.router_load(NAMESPACE, MODEL), hear)
        questions = [SELECT.encode(select(tokens_of(f"{n:04}", 5), f"r{n}")) for n in range(50)]
        await asyncio.gather(*(world.ask_raw(each, router=True) for each in questions))
        await until(lambda: sum(len(batch.events) for batch in published) == 50)
        assert len(published) <= 12, "a turn of the loop for four"
        events = [event for batch in published for event in batch.events]
        assert [event.request for event in events] == [f"r{n}" for n in range(50)]
        assert all(isinstance(event, Reserved) and event.router == "0a" for event in events)


async def test_a_single_router_publishes_no_reservations_until_another_one_asks() -> None:
    published: list[str] = []

    async def hear(message: Message) -> None:
        published.extend(event.request for event in LOAD_EVENTS.decode(message.payload).events)

    async with fleet() as world:
        await world.worker("a")
        await world.bus.subscribe(subjects.router_load(NAMESPACE, MODEL), hear)
        await world.chosen(tokens_of("x", 5), "alone")
        # It is not in the directory yet: it registers once it has the reservations.
        question = RESERVATIONS_REQUEST.encode(ReservationsRequest(MODEL))
        await world.bus.request(subjects.reservations(NAMESPACE, world.runtime.instance), question, timeout_s=LIMIT_S)
        await world.chosen(tokens_of("y", 5), "joined")
        await until(lambda: bool(published))
        assert published == ["joined"]


async def test_a_stopping_router_still_publishes_its_last_reservations() -> None:
    async with fleet(instance="0a") as first:
        await first.worker("a")
        async with fleet(instance="0b", beside=first) as second:
            await until(lambda: MODEL in second.router.models)
            await second.ask_raw(SELECT.encode(select(tokens_of("x", 5))), router=True)
        load = first.router.models[MODEL].load
        await until(lambda: load.statistics().reservations == 1)


@pytest.mark.parametrize("fault", ["lost", "no subject", "too large"])
async def test_an_answer_that_cannot_be_sent_reserves_nothing_anywhere(fault: str) -> None:
    async with two() as (first, second):
        question = SELECT.encode(select(tokens_of("x", 5)))
        if fault == "lost":
            own_bus(first).disconnect()
        if fault == "too large":
            own_bus(first)._payload_limit_bytes = 1
        reply = "no subject" if fault == "no subject" else "inbox"
        await first.router._select(Message("", question, reply))
        loads = [world.router.models[MODEL].load for world in (first, second)]
        assert not loads[0].reservations()
        if fault == "lost":
            own_bus(first).reconnect()
        own_bus(first)._payload_limit_bytes = 1 << 20
        assert first.metric("headrace_selects_total", outcome="selected") == 0
        await first.ask_raw(question, router=True)
        await until(lambda: [len(load.reservations()) for load in loads] == [1, 1])
        assert [each.reserved.request for load in loads for each in load.reservations()] == ["r", "r"], "asked again"


@asynccontextmanager
async def two_with_roles() -> AsyncIterator[tuple[RouterFleet, RouterFleet]]:
    """Run two routers, with one worker that computes prompts and one that decodes for eight requests."""
    config = NO_SPECULATION
    async with fleet(config, instance="0a") as first, fleet(config, instance="0b", beside=first) as second:
        for name, role in (("p", "prefill"), ("d", "decode")):
            await second.knows(await first.worker(name, role=role, kvbm="k", kvbm_layout="l"))
        for world in (first, second):
            await until(lambda: world.metric("headrace_router_joins_total", outcome="told") == 1)  # noqa: B023
        await first.workers[-1].reports(*(f"old{number}" for number in range(8)))
        for world in (first, second):
            load = world.router.models[MODEL].load
            await until(lambda: load.load_of(("d", 0)).requests == 8)  # noqa: B023
        yield first, second


def reserved_at(world: RouterFleet) -> dict[int, tuple[str, float]]:
    """Attempt → the worker where it is reserved, and the delay; there is one request."""
    reservations = world.router.models[MODEL].load.reservations()
    return {one.reserved.attempt: (one.reserved.instance, one.reserved.delay_s) for one in reservations}


async def test_all_routers_hear_both_reservations_of_a_pair_and_answer_the_same_pair() -> None:
    async with two_with_roles() as (first, second):
        question = SELECT.encode(select(tokens_of("x", 200), time_left_s=30.0))
        here = await first.ask_raw(question, router=True)
        assert isinstance(here, Selected)
        assert (here.instance, here.decode) == ("p", "d")
        await until(lambda: reserved_at(second) == {1: ("p", 0.0), 2: ("d", 30.0)})
        there = await second.ask_raw(question, router=True)
        assert isinstance(there, Selected)
        assert (there.instance, there.decode) == ("p", "d")
        await first.tell(Finished("r", 1))
        await until(lambda: all(reserved_at(world) == {2: ("d", 30.0)} for world in (first, second)))
        explained_here = await explained(first, subjects.explain(NAMESPACE, first.runtime.instance), "r")
        assert [(each.attempt, each.instance) for each in explained_here.decisions] == [(1, "p"), (2, "d")]


async def test_if_the_answer_with_a_pair_is_lost_both_reservations_are_withdrawn() -> None:
    async with two_with_roles() as (first, second):
        question = SELECT.encode(select(tokens_of("x", 200)))
        own_bus(first).disconnect()
        await first.router._select(Message("", question, "inbox"))
        own_bus(first).reconnect()
        assert reserved_at(first) == {}
        await first.ask_raw(question, router=True)
        await until(lambda: [sorted(reserved_at(world)) for world in (first, second)] == [[1, 2], [1, 2]])


async def test_a_select_repeated_to_another_router_gets_the_same_answer_and_ends_once() -> None:
    async with two() as (first, second):
        loads = [world.router.models[MODEL].load for world in (first, second)]
        for number in range(8):
            question = SELECT.encode(select(tokens_of(f"{number:04}", 5), f"r{number}"))
            here = await first.ask_raw(question, router=True)
            await until(lambda: [len(load.reservations()) for load in loads] == [number + 1] * 2)  # noqa: B023
            there = await second.ask_raw(question, router=True)
            assert isinstance(here, Selected)
            assert isinstance(there, Selected)
            assert here.instance == there.instance
        await first.tell(*(Finished(f"r{number}", 1) for number in range(8)))
        await until(lambda: [len(load.reservations()) for load in loads] == [0, 0])


async def test_reservations_made_while_nats_is_away_are_published_when_it_is_back() -> None:
    async with two() as (first, second):
        own_bus(first).disconnect()
        reserved = Reserved("r", 1, "f", "w0", 0, 5000, 300, router="0a")
        first.router._outbox.publish_load(MODEL, reserved)
        assert not await first.router._outbox.flush()
        own_bus(first).reconnect()
        load = second.router.models[MODEL].load
        await until(lambda: load.load_of(("w0", 0)).queued_tokens == 5000)


async def test_events_that_waited_for_nats_and_come_at_once_do_not_block_the_loop() -> None:
    async with fleet() as world:
        await world.worker("a")
        load = world.router.models[MODEL].load
        events = [Reserved(f"r{number}", 1, "f", "a", 0, 1, 1, router="0b") for number in range(EVENTS_A_MESSAGE)]
        await world.tell(*events)
        grown: set[int] = set()
        while len(load.reservations()) < EVENTS_A_MESSAGE:
            await asyncio.sleep(0)
            grown.add(len(load.reservations()))
        assert len(grown) >= 8


async def test_load_events_of_an_unknown_model_are_counted() -> None:
    async with fleet() as world:
        await world.worker("a")
        payload = LOAD_EVENTS.encode(LoadEvents("unheard of", [Finished("r", 1)]))
        await world.bus.publish(subjects.router_load(NAMESPACE, MODEL), payload)
        await until(lambda: world.metric("headrace_malformed_messages_total", channel="load events") == 1)


# --- explain and state


async def test_the_router_that_knows_a_request_explains_it_first() -> None:
    async with two() as (first, _):
        chosen = await asyncio.gather(*(first.chosen(tokens_of(f"{n:04}", 5), f"r{n}") for n in range(8)))
        for each in chosen:
            answer = await explained(first, subjects.explain(NAMESPACE, MODEL), f"chatcmpl-{each.request}")
            assert answer.router == each.router
            (decision,) = answer.decisions
            assert (decision.request, decision.instance, decision.router) == (each.request, each.instance, each.router)
            assert {row.instance for row in decision.candidates} == {"w0", "w1", "w2", "w3"}


async def test_each_router_explains_its_own_choices_under_its_own_name() -> None:
    async with two() as (first, second):
        for world, attempt in ((first, 1), (second, 2)):
            question = msgspec.structs.replace(select(tokens_of("x", 5)), attempt=attempt)
            await world.ask_raw(SELECT.encode(question), router=True)
        await first.tell(Prefilled("r", 2, 8, first_token_s=0.5), Finished("r", 2))
        for world, attempt in ((first, 1), (second, 2)):
            subject = subjects.explain(NAMESPACE, world.runtime.instance)
            while True:
                answer = await explained(first, subject, "r")
                if attempt == 1 or answer.decisions[0].ended_s is not None:
                    break
            (decision,) = answer.decisions
            assert (decision.router, decision.attempt) == (world.runtime.instance, attempt)
        assert (decision.actual_cached_tokens, decision.first_token_s) == (8, 0.5)


async def test_without_a_request_id_the_latest_decisions_are_returned() -> None:
    async with fleet() as world:
        await world.worker("a")
        for number in range(3):
            await world.chosen(tokens_of("x", 5), f"r{number}")
        for subject in (MODEL, world.runtime.instance):
            answer = await explained(world, subjects.explain(NAMESPACE, subject), "")
            assert [each.request for each in answer.decisions] == ["r0", "r1", "r2"]


async def test_an_unknown_request_is_answered_with_no_decision_even_if_many_ask(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(queries, "DELAYED_LIMIT", 3)
    async with two() as (first, _):
        subject = subjects.explain(NAMESPACE, MODEL)
        answers = await asyncio.gather(*(explained(first, subject, "unheard of") for _ in range(10)))
        assert [each.decisions for each in answers] == [[]] * 10
        await first.bus.publish(subject, b"nobody to answer")


async def test_a_router_may_stop_while_a_client_waits_for_its_answer() -> None:
    async with fleet() as world:
        await world.worker("a")
        asking = asyncio.create_task(explained(world, subjects.explain(NAMESPACE, MODEL), "unheard of"))
        await until(lambda: bool(world.router._queries._pausing))
    asking.cancel()


async def test_a_router_answers_with_its_state() -> None:
    async with fleet() as world:
        await world.worker("a")
        worker = await world.worker("b")
        await worker.stores(tokens_of("x", 5))
        await world.finds("b", tokens_of("x", 5), 5)
        await world.chosen(tokens_of("y", 5))
        subject = subjects.router_state(NAMESPACE, world.runtime.instance)
        answer = await world.bus.request(subject, b"", timeout_s=LIMIT_S)
        state: RouterState = ROUTER_STATE.decode(answer.payload, answer.headers)
        assert (state.router, state.policy) == ("0a", "kv")
        (model,) = state.models
        assert (model.model, model.instances, model.reservations, model.index_blocks) == (MODEL, 2, 1, 5)
        assert model.index_bytes > 0
        assert [(each.instance, each.state) for each in state.sources] == [("a", "live"), ("b", "live")]
        await world.bus.publish(subject, b"nobody to answer")
