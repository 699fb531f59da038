"""Blocks of kvbms count for the workers that can fetch them: a router, scripted workers and scripted kvbms."""

from __future__ import annotations

import msgspec
import pytest

from services.router.sync import follower
from shared import subjects
from shared.hashing import pack_tokens, sequence_hashes
from shared.messages.codec import JSON_HEADER
from shared.messages.kv_events import BlockStored
from shared.messages.kvbm import KVBM_REPORT, KvbmReport, LayoutReport
from shared.messages.people import ROUTER_STATE, RouterState
from shared.messages.select import Overlap
from tests.router.fleet import (
    BLOCK_SIZE,
    LIMIT_S,
    MODEL,
    NAMESPACE,
    NO_SPECULATION,
    RouterFleet,
    fleet,
    tokens_of,
    until,
)
from tests.router.scripted_kvbm import ScriptedKvbm, kvbm

X, Y = tokens_of("x", 6), tokens_of("y", 3)


def overlap(world: RouterFleet, worker: str, tokens: list[int] = X) -> Overlap:
    hashes = sequence_hashes(pack_tokens(tokens), BLOCK_SIZE)
    return world.router.models[MODEL].index.find(hashes).get((worker, 0), Overlap())


async def finds(world: RouterFleet, worker: str, *blocks: int, tokens: list[int] = X) -> None:
    """Wait until exactly these numbers of leading blocks are found on the device, in host memory and on disk."""
    await until(lambda: overlap(world, worker, tokens) == Overlap(*blocks))


async def follows(world: RouterFleet, store: str = "k/l") -> None:
    await until(lambda: store in world.router.feeds and world.router.feeds[store].source.state == "live")


async def attached(world: RouterFleet, *workers: str) -> ScriptedKvbm:
    """Start a kvbm that is followed, and workers attached to it."""
    store = await kvbm(world)
    for worker in workers:
        await world.worker(worker, kvbm="k", kvbm_layout="l")
    await follows(world)
    return store


async def state(world: RouterFleet) -> RouterState:
    subject = subjects.router_state(NAMESPACE, world.runtime.instance)
    answer = await world.bus.request(subject, b"", timeout_s=LIMIT_S)
    return ROUTER_STATE.decode(answer.payload, JSON_HEADER)


async def test_a_kvbms_blocks_count_for_the_workers_attached_to_it_and_for_no_others() -> None:
    async with fleet() as world:
        store = await attached(world, "a", "b")
        await world.worker("c")
        store.layouts["l"].stores(X, range(4), "host")
        store.layouts["l"].stores(X, [4, 5], "disk")
        await finds(world, "a", 0, 4, 2)
        await finds(world, "b", 0, 4, 2)
        await finds(world, "c", 0)
        store.layouts["l"].drops(X, [2, 3], "host")
        await finds(world, "a", 0, 2)


async def test_each_batch_is_applied_once_however_many_workers_are_attached() -> None:
    async with fleet() as world:
        store = await attached(world, "a", "b", "c")
        store.layouts["l"].stores(X, range(6), "host")
        await finds(world, "c", 0, 6)
        assert world.metric("headrace_kv_events_total", outcome="applied") == 6
        assert world.router.models[MODEL].index.statistics().pairs == {"device": 0, "host": 6, "disk": 0}


async def test_leading_blocks_that_only_a_device_still_holds_do_not_hide_the_kvbms_blocks_after_them() -> None:
    async with fleet() as world:
        store = await attached(world, "a", "b")
        store.layouts["l"].stores(X, range(6), "host")
        await world.workers[0].stores(X[: 3 * BLOCK_SIZE])
        await finds(world, "a", 3, 3)
        store.layouts["l"].drops(X, [0, 1], "host")
        await finds(world, "b", 0)
        await finds(world, "a", 3, 3)


async def test_a_choice_counts_host_and_disk_blocks_as_cached_and_names_no_store() -> None:
    async with fleet() as world:
        store = await attached(world, "a")
        await world.worker("b")
        store.layouts["l"].stores(X, [0, 1], "host")
        store.layouts["l"].stores(X, [2], "disk")
        await finds(world, "a", 0, 2, 1)
        selected = await world.chosen(X, explain=True)
        assert (selected.instance, selected.overlap) == ("a", Overlap(0, 2, 1))
        assert {each.instance: each.overlap for each in selected.candidates} == {"a": Overlap(0, 2, 1), "b": Overlap()}
        load = world.router.models[MODEL].load.load_of(("a", 0))
        assert load.queued_tokens == 3 * BLOCK_SIZE
        assert load.active_blocks == 6, "what comes from the kvbm takes room on the device"


async def test_a_kvbm_may_register_before_or_after_its_workers() -> None:
    async with fleet() as world:
        await world.worker("a", kvbm="k", kvbm_layout="l")
        store = await kvbm(world)
        await follows(world)
        store.layouts["l"].stores(X, range(6), "disk")
        await finds(world, "a", 0, 0, 6)
        await world.worker("b", kvbm="k", kvbm_layout="l")
        await finds(world, "b", 0, 0, 6)


async def test_blocks_stored_before_the_router_started_come_in_a_snapshot_of_both_tiers() -> None:
    async with fleet() as world:
        store = await kvbm(world)
        store.layouts["l"].stores(X, range(4), "host", silently=True)
        store.layouts["l"].stores(X, range(6), "disk", silently=True)
        await world.worker("a", kvbm="k", kvbm_layout="l")
        await finds(world, "a", 0, 4, 2)


@pytest.mark.parametrize("tier", ["host", "disk"])
async def test_a_kvbm_that_left_out_an_event_is_detected_by_that_tiers_digest_and_asked_again(tier: str) -> None:
    async with fleet() as world:
        store = await attached(world, "a")
        layout = store.layouts["l"]
        layout.stores(X, range(6), "disk" if tier == "disk" else "host", silently=True)
        layout.stores(Y, range(3), "host")
        await finds(world, "a", 0, 3, tokens=Y)
        await store.reports()
        await until(lambda: overlap(world, "a").blocks == 6)
        assert layout.snapshots == 2
        assert world.router.feeds["k/l"].status().digests == {"agreed": 0, "differed": 1, "exempt": 0}


async def test_a_kvbm_and_a_router_whose_digests_agree_exchange_no_snapshot() -> None:
    async with fleet() as world:
        store = await attached(world, "a")
        store.layouts["l"].stores(X, range(6), "host")
        store.layouts["l"].stores(X, range(3), "disk")
        await finds(world, "a", 0, 6)
        await until(lambda: world.router.feeds["k/l"].source.applied == 8)
        await store.reports()
        await until(lambda: world.router.feeds["k/l"].status().digests["agreed"] == 1)
        assert store.layouts["l"].snapshots == 1


async def test_the_loss_of_the_last_batches_is_detected_by_the_report_and_they_are_replayed() -> None:
    async with fleet() as world:
        store = await attached(world, "a")
        layout = store.layouts["l"]
        layout.stores(X, [0], "host")
        await finds(world, "a", 0, 1)
        world.broker.events.mute(layout.publisher.source)
        layout.stores(X, range(1, 6), "host")
        world.broker.events.unmute(layout.publisher.source)
        await store.reports()
        await store.reports()
        await finds(world, "a", 0, 6)
        assert layout.snapshots == 1


async def test_the_state_of_a_kvbm_that_leaves_is_removed() -> None:
    async with fleet() as world:
        store = await attached(world, "a")
        store.layouts["l"].stores(X, range(6), "host")
        await world.workers[0].stores(X[:BLOCK_SIZE])
        await finds(world, "a", 1, 5)
        assert [source.instance for source in (await state(world)).sources] == ["a", "k/l"]
        await store.stop()
        await finds(world, "a", 1)
        assert [source.instance for source in (await state(world)).sources] == ["a"]
        index = world.router.models[MODEL].index
        await until(lambda: index.statistics().pairs == {"device": 1, "host": 0, "disk": 0})
        assert not world.router.models[MODEL].caches.stores


async def test_a_kvbm_that_restarts_has_a_new_id_and_workers_attach_again() -> None:
    async with fleet() as world:
        await (await attached(world, "a")).stop()
        await until(lambda: "k/l" not in world.router.feeds)
        again = await kvbm(world, "k2")
        await world.workers[0].attaches("k2", "l")
        again.layouts["l"].stores(X, range(2), "disk")
        await finds(world, "a", 0, 0, 2)


async def test_a_worker_that_attaches_keeps_its_blocks_and_reservations() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        store = await kvbm(world)
        store.layouts["l"].stores(X, range(5), "host", silently=True)
        await worker.stores(X[: 2 * BLOCK_SIZE])
        await finds(world, "a", 2)
        await world.chosen(X)
        await worker.attaches("k", "l")
        await finds(world, "a", 2, 3)
        assert world.router.models[MODEL].load.load_of(("a", 0)).requests == 1
        await worker.attaches("", "")
        await finds(world, "a", 2)
        assert worker.snapshots == 1
        assert "k/l" not in world.router.feeds, "no card names it any longer"
        assert world.router.models[MODEL].load.load_of(("a", 0)).requests == 1


async def test_a_layout_is_followed_once_a_card_names_it_and_its_kvbm_has_it() -> None:
    async with fleet() as world:
        store = await kvbm(world, layouts=["l", "other"])
        await world.worker("a", kvbm="k", kvbm_layout="l")
        await world.worker("b", kvbm="k", kvbm_layout="to come")
        await world.worker("c", kvbm="never heard of", kvbm_layout="l")
        await follows(world)
        assert sorted(world.router.feeds) == ["a", "b", "c", "k/l"]
        await store.adds("to come")
        await follows(world, "k/to come")
        store.layouts["to come"].stores(X, [0], "host")
        await finds(world, "b", 0, 1)
        assert overlap(world, "a") == Overlap()


async def test_a_bounded_number_of_layouts_of_one_kvbm_is_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follower, "STORES_LIMIT", 1)
    async with fleet() as world:
        await kvbm(world, layouts=["l", "m"])
        first = await world.worker("a", kvbm="k", kvbm_layout="l")
        await world.worker("b", kvbm="k", kvbm_layout="m")
        await follows(world)
        assert "k/m" not in world.router.feeds
        await first.stop()
        await follows(world, "k/m")


async def test_a_kvbm_that_contradicts_the_card_is_refused_and_shown_as_refused() -> None:
    async with fleet() as world:
        store = await attached(world, "a")
        store.layouts["l"].stores(X, [0], "host")
        await finds(world, "a", 0, 1)
        store.layouts["l"].tells(BlockStored([1], None, [1, 2], 2, medium="disk"))
        await until(lambda: world.router.feeds["k/l"].status().state == "refused")
        await finds(world, "a", 0)
        assert (await state(world)).sources[1].reason.startswith("events have blocks of 2 tokens")
        assert not world.router.models[MODEL]._without_events, "the worker's own events are as good as before"


async def test_invalid_reports_and_reports_of_unfollowed_layouts_are_ignored() -> None:
    async with fleet() as world:
        await attached(world, "a")
        subject = subjects.kvbm(NAMESPACE, "k", "load")
        await world.bus.publish(subject, b"no report")
        await world.bus.publish(subject, KVBM_REPORT.encode(KvbmReport("k", [LayoutReport("?", 0, 0, 0)] * 1025)))
        await until(lambda: world.metric("headrace_malformed_messages_total", channel="kvbm report") == 2)
        strange = [LayoutReport("never heard of", 5, 1, 2)]
        for name in ("k", "another"):
            await world.bus.publish(subject, KVBM_REPORT.encode(KvbmReport(name, strange)))
        await world.chosen(X)
        assert world.router.feeds["k/l"].status().gaps == 0


async def test_without_events_no_source_is_followed_and_the_prompts_sent_there_are_what_is_known() -> None:
    async with fleet(msgspec.structs.replace(NO_SPECULATION, events="off")) as world:
        worker = await world.worker("a", kvbm="k", kvbm_layout="l", awaited=False)
        await kvbm(world, layouts=["l"])
        await until(lambda: "k" in world.runtime.directory.instances)
        await until(lambda: len(world.router._model_subscriptions.get(MODEL, ())) == 3)
        prompt = tokens_of("x", 6)
        await worker.stores(prompt)
        assert (await world.chosen([*prompt, 1], "first")).overlap.blocks == 0
        assert (await world.chosen([*prompt, 2], "second")).overlap.device == 6
        assert world.router.feeds == {}
        assert world.router.models[MODEL].caches.stores == {}
        told = await state(world)
        assert (told.events, told.sources) == ("off", [])
