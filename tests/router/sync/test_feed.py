"""One worker's events on their way into the index: a feed when they are wrong, stop, flood or are invalid."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from services.router.config import RouterConfig
from services.router.sync.feed import EventFeed
from shared.messages.kv_events import BlockStored
from shared.messages.people import SourceState
from shared.messages.select import Prefilled
from tests.router.fleet import BLOCK_SIZE, MODEL, NO_SPECULATION, RouterFleet, fleet, tokens_of, until

X, Y = tokens_of("x", 5), tokens_of("y", 3)


def config(**source: Any) -> RouterConfig:
    return msgspec.structs.replace(NO_SPECULATION, source=msgspec.structs.replace(NO_SPECULATION.source, **source))


def feed(world: RouterFleet, name: str = "a") -> EventFeed:
    return world.router.feeds[name]


def status(world: RouterFleet, name: str = "a") -> SourceState:
    return feed(world, name).status()


# --- digests


async def test_a_worker_that_left_out_an_event_is_detected_by_its_digest_and_asked_again() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        await worker.stores(X, silently=True)
        await worker.stores(Y)
        await world.finds("a", Y, 3)
        await worker.reports()
        await world.finds("a", X, 5)
        await world.finds("a", Y, 3)
        assert worker.snapshots == 2
        assert status(world).digests["differed"] == 1
        assert world.metric("headrace_kv_digests_total", outcome="differed") == 1


async def test_a_worker_and_a_router_whose_digests_agree_exchange_no_snapshot() -> None:
    async with fleet(config(digest_s=0.001)) as world:
        worker = await world.worker("a")
        for number in range(20):
            await worker.stores(tokens_of(f"{number}", 2))
            await worker.reports()
            await world.finds("a", tokens_of(f"{number}", 2), 2)
        await worker.reports()
        await until(lambda: status(world).digests["agreed"] > 3)
        assert status(world).digests["differed"] == 0
        assert worker.snapshots == 1


async def test_a_worker_whose_digest_is_always_wrong_is_asked_again_once_per_comparison() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        worker.lie = 1
        for number in range(5):
            await worker.stores(tokens_of(f"{number}", 2))
            await worker.reports()
            await world.finds("a", tokens_of(f"{number}", 2), 2)
        await until(lambda: status(world).state == "live")
        assert worker.snapshots == 2
        assert status(world).digests["differed"] == 1


async def test_a_source_whose_blocks_were_left_out_at_a_limit_is_exempt() -> None:
    settings = msgspec.structs.replace(
        NO_SPECULATION, index=msgspec.structs.replace(NO_SPECULATION.index, lower_tier_limit_blocks=3)
    )
    async with fleet(settings) as world:
        worker = await world.worker("a", capacity_blocks=3)
        await worker.stores(X)
        await world.finds("a", X, 3)
        await worker.reports()
        await until(lambda: status(world).digests["exempt"] == 1)
        assert not status(world).exact
        assert worker.snapshots == 1


# --- ranks


async def test_every_rank_of_a_worker_has_its_own_blocks_its_own_snapshot_and_its_own_digest() -> None:
    async with fleet() as world:
        worker = await world.worker("a", ranks=2)
        await worker.stores(X, rank=1)
        await worker.stores(Y, rank=0)
        await world.finds("a", X, 5, rank=1)
        await world.finds("a", X, 0, rank=0)
        await worker.stores(tokens_of("z", 2), rank=1, silently=True)
        await worker.reports()
        await world.finds("a", tokens_of("z", 2), 2, rank=1)
        await world.finds("a", X, 5, rank=1)
        await world.finds("a", Y, 3, rank=0)
        assert status(world).digests == {"agreed": 1, "differed": 1, "exempt": 0}
        assert worker.snapshots == 4
        assert (await world.chosen([*X, 1])).rank == 1


async def test_events_of_a_rank_that_is_not_on_the_card_are_counted_and_ignored() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        worker.tells(BlockStored([1], None, list(range(BLOCK_SIZE)), BLOCK_SIZE), rank=7)
        await worker.stores(X)
        await world.finds("a", X, 5)
        assert world.metric("headrace_kv_events_total", outcome="ignored") == 1


# --- silence


async def test_a_silent_source_is_shown_and_its_routing_history_is_used(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with fleet(config(silence_s=0.02)) as world:
        worker = await world.worker("a", plain=True)
        world.broker.events.mute(worker.publisher.source)
        number = 0
        async with asyncio.timeout(60):
            while not status(world).silent:
                number += 1
                await world.chosen([*tokens_of(f"{number}", 4), 1], f"r{number}")
                await world.tell(Prefilled(f"r{number}", 1, 0))
                await asyncio.sleep(0.005)
        assert "though requests compute new blocks" in caplog.text
        await until(lambda: world.metric("headrace_kv_sources_silent") == 1)
        await world.chosen([*X, 1], "first")
        assert (await world.chosen([*X, 2], "second")).overlap.device == 5, "approximate, but better than nothing"
        world.broker.events.unmute(worker.publisher.source)
        await worker.stores(Y)
        await world.finds("a", Y, 3)
        assert not status(world).silent
        await until(lambda: world.metric("headrace_kv_sources_silent") == 0)


async def test_cached_prompts_do_not_make_a_source_silent() -> None:
    async with fleet(config(silence_s=0.001)) as world:
        worker = await world.worker("a")
        await worker.stores(X)
        await world.finds("a", X, 5)
        for number in range(20):
            await world.chosen(X, f"r{number}")
            await world.tell(
                Prefilled(f"r{number}", 1, 4 * BLOCK_SIZE)
            )  # all but the last block, which is always computed
        await until(lambda: world.metric("headrace_prompt_tokens_total") == 20 * len(X))
        assert not status(world).silent


# --- sources without snapshots


async def test_a_plain_source_is_rebuilt_from_its_replay_and_shown_as_partial_if_batches_are_missing() -> None:
    async with fleet() as world:
        worker = await world.worker("a", plain=True)
        await worker.stores(X)
        await world.finds("a", X, 5)
        await until(lambda: world.metric("headrace_kv_sources", state="live") == 1)
        worker.sequence += 50
        worker.publisher.ring._batches.clear()  # type: ignore[attr-defined]
        await worker.stores(Y)
        await world.finds("a", Y, 3)
        await world.finds("a", X, 0)
        assert status(world).partial
        await until(lambda: world.metric("headrace_kv_sources", state="partial") == 1)


# --- refusals


async def test_a_refused_source_is_shown_its_routing_history_is_used_and_a_new_card_is_accepted() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        worker.tells(BlockStored([1], None, [1, 2, 3, 5000], BLOCK_SIZE))
        await until(lambda: status(world).state == "refused")
        assert "5000" in status(world).reason
        await until(lambda: world.metric("headrace_kv_sources", state="refused") == 1)
        await world.chosen([*X, 1], "first")
        assert (await world.chosen([*X, 2], "second")).overlap.device == 5
        worker.capacity_blocks += 1
        worker.restarts_engine()
        assert worker.registration is not None
        await worker.registration.publish()
        await until(lambda: status(world).state == "live")
        await worker.stores(Y)
        await world.finds("a", Y, 3)


async def test_a_snapshot_that_contradicts_the_card_is_refused_like_events() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        await worker.stores([900, 901, 902, 5000], silently=True)
        await worker.reports()
        await until(lambda: status(world).state == "refused")
        assert "token id 5000" in status(world).reason


# --- floods and outages


async def test_batches_beyond_the_limit_are_dropped_and_recovered_later() -> None:
    async with fleet(config(held_limit_batches=8)) as world:
        worker = await world.worker("a")
        world.broker.events.mute(worker.publisher.source)
        for lost in range(300):
            await worker.stores(tokens_of(f"{lost}", 40))
        number = 300
        world.broker.events.unmute(worker.publisher.source)
        async with asyncio.timeout(60):
            while not status(world).dropped:  # while the lost batches are replayed, in slices
                number += 1
                await worker.stores(tokens_of(f"{number}", 1))
                await asyncio.sleep(0)
        for _ in range(2):
            await worker.reports()
        for lost in (0, 150, 299):
            await world.finds("a", tokens_of(f"{lost}", 40), 40)
        await world.finds("a", tokens_of(f"{number}", 1), 1)
        assert worker.snapshots == 1


async def test_a_source_that_restarts_repeatedly_has_one_request_at_a_time() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        before = len(asyncio.all_tasks())
        for _ in range(200):
            worker.restarts_engine()
            worker.tells()
        await until(lambda: feed(world).source.resyncs >= 200)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) <= before + 1


async def test_losing_nats_loses_no_known_block_even_if_events_are_lost_meanwhile() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        await worker.stores(X)
        await world.finds("a", X, 5)
        bus = world.runtime.bus
        world.broker.disconnect(bus)  # type: ignore[arg-type]
        world.broker.events.mute(worker.publisher.source)
        await worker.stores(tokens_of("lost", 2))
        worker.publisher.ring._batches.clear()  # type: ignore[attr-defined]
        world.broker.events.unmute(worker.publisher.source)
        await worker.stores(Y)
        await until(lambda: feed(world).source.state == "syncing" and feed(world).source.resyncs > 2)
        await world.finds("a", X, 5)
        world.broker.reconnect(bus)  # type: ignore[arg-type]
        await world.finds("a", tokens_of("lost", 2), 2)
        await world.finds("a", Y, 3)
        assert world.router.models[MODEL].caches.chains["a", 0].exact
