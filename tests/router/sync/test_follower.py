"""The models that a router keeps: a bounded number, with or without workers."""

from __future__ import annotations

import msgspec
import pytest

from services.router.sync import follower
from shared import subjects
from shared.bus.memory_bus import MemoryBus
from shared.discovery.memory import MemoryDiscovery
from shared.errors import NoResponders
from shared.messages.cards import MODEL_CARD, ModelCard
from shared.messages.codec import JSON_HEADER
from tests.router.fleet import MODEL, NAMESPACE, RouterFleet, fleet, tokens_of, until


async def _also_serves(world: RouterFleet, card: ModelCard, *names: str) -> None:
    """Add cards of these models for the worker of `card`, and wait until the router has them."""
    entries = {
        subjects.model_key(NAMESPACE, name, card.instance): MODEL_CARD.encode(
            msgspec.structs.replace(card, model=name), JSON_HEADER
        )
        for name in names
    }
    await MemoryDiscovery(world.store).register(lambda _epoch: entries)
    await until(lambda: all((name, card.instance) in world.runtime.directory.cards for name in names))


async def test_models_beyond_the_limit_are_ignored_and_the_others_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MODELS_LIMIT", 1)
    async with fleet() as world:
        worker = await world.worker("a")
        await _also_serves(world, world.router.models[MODEL].cards["a"], "another", "a third")
        assert list(world.router.models) == [MODEL]
        await worker.stores(tokens_of("x", 5))
        await world.finds("a", tokens_of("x", 5), 5)


async def test_a_worker_that_serves_a_second_model_is_known_there_by_history_and_for_the_first_by_events() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        await _also_serves(world, world.router.models[MODEL].cards["a"], "another")
        assert MODEL > "another"
        await until(lambda: "another" in world.router.models)
        models = world.router.models
        assert ["a" in models[name]._without_events for name in (MODEL, "another")] == [False, True]
        await worker.stores(tokens_of("x", 5))
        await world.finds("a", tokens_of("x", 5), 5)


async def test_a_model_without_workers_for_long_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "MODELS_LIMIT", 1)
    async with fleet() as world:
        gone = await world.worker("a")
        await gone.stop()
        await until(lambda: not world.router.models[MODEL].cards)
        too_early = await world.worker("b", model="another", awaited=False)
        await until(lambda: ("another", "b") in world.runtime.directory.cards)
        assert list(world.router.models) == [MODEL]
        await too_early.stop()
        monkeypatch.setattr(follower, "UNSERVED_LIMIT_S", 0.0)
        await world.worker("c", model="another")
        assert list(world.router.models) == ["another"]
        await until(lambda: world.metric("headrace_router_joins_total", outcome="alone") == 2)
        bus, forgotten = world.runtime.bus, subjects.select(NAMESPACE, MODEL)
        assert isinstance(bus, MemoryBus)
        await until(lambda: forgotten not in {each.subject for each in world.broker.subscriptions(bus)})
        with pytest.raises(NoResponders):
            await world.ask(tokens_of("x", 2))
