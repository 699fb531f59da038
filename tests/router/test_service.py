"""The router on the in-process twins, among workers that send real messages."""

from __future__ import annotations

import asyncio
import itertools
from functools import partial

import msgspec
import pytest

from services.router.config import RouterConfig
from services.router.selection.model_router import ModelRouter
from shared import subjects
from shared.errors import NoResponders
from shared.messages.cards import INSTANCE, Instance
from shared.messages.codec import JSON_HEADER
from shared.messages.kv_events import BlockStored
from shared.messages.people import ROUTER_STATE
from shared.messages.select import SELECT, Finished, Prefilled, Reserved, SelectRefused
from tests.fakes.memory_discovery import MemoryDiscovery, MemoryRegistration
from tests.router.fleet import (
    BLOCK_SIZE,
    LIMIT_S,
    MODEL,
    NAMESPACE,
    NO_SPECULATION,
    RouterFleet,
    fleet,
    select,
    tokens_of,
    until,
)


async def test_a_prompt_is_routed_to_its_cached_blocks_and_the_answer_says_why() -> None:
    async with fleet() as world:
        workers = [await world.worker(name) for name in ("a", "b", "c")]
        prompt = tokens_of("x", 20)
        await workers[1].stores(prompt)
        await world.finds("b", prompt, 20)
        chosen = await world.chosen([*prompt, 1], explain=True)
        assert chosen.instance == "b"
        assert chosen.overlap.device == 20
        assert chosen.candidates[0].instance == "b"
        assert {row.instance for row in chosen.candidates} == {"a", "b", "c"}
        assert chosen.reason == chosen.candidates[0].reason


async def test_one_token_of_a_prompt_is_always_computed() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        prompt = tokens_of("x", 3)
        await worker.stores(prompt)
        await world.finds("a", prompt, 3)
        assert (await world.chosen(prompt)).overlap.device == 2


async def test_a_second_conversation_goes_to_the_idle_worker_and_a_follow_up_to_its_own_blocks() -> None:
    async with fleet(RouterConfig()) as world:
        workers = {name: await world.worker(name) for name in ("a", "b")}
        common = tokens_of("sys", 2)
        first = [*common, *range(500, 520)]
        second = [*common, *range(600, 620)]
        home = (await world.chosen(first, "first")).instance
        await workers[home].stores(first)
        await world.tell(Prefilled("first", 1, 0))
        await workers[home].reports("first", held_blocks=8)
        other = (await world.chosen(second, "second")).instance
        assert other != home
        await workers[other].stores(second)
        await world.tell(Finished("first", 1), Finished("second", 1))
        for worker in workers.values():
            await worker.reports()
        await until(lambda: world.router.models[MODEL].load.statistics().reservations == 0)
        assert (await world.chosen([*first, *range(100)], "follow-up")).instance == home


async def test_a_choice_is_reserved_at_once_so_that_a_burst_spreads() -> None:
    async with fleet() as world:
        for name in ("a", "b", "c", "d"):
            await world.worker(name)
        chosen = [(await world.chosen(tokens_of(f"x{number}", 5), f"r{number}")).instance for number in range(8)]
        assert sorted(chosen) == ["a", "a", "b", "b", "c", "c", "d", "d"]


async def test_a_burst_of_siblings_stays_together_before_any_event_comes() -> None:
    async with fleet(RouterConfig()) as world:
        for name in ("a", "b"):
            await world.worker(name)
        prompt = tokens_of("x", 200)
        chosen = {(await world.chosen([*prompt, number], f"r{number}")).instance for number in range(4)}
        assert len(chosen) == 1


async def test_reservations_are_published_to_all_routers_and_those_of_other_routers_count() -> None:
    async with fleet() as world:
        for name in ("a", "b"):
            await world.worker(name)
        reserved = Reserved("elsewhere", 1, "f", "a", 0, 5000, 300, router="ff")
        await world.tell(reserved)
        load = world.router.models[MODEL].load
        await until(lambda: load.load_of(("a", 0)).queued_tokens == 5000)
        assert (await world.chosen(tokens_of("x", 2))).instance == "b"
        await world.tell(Finished("elsewhere", 1))
        await until(lambda: load.load_of(("a", 0)).requests == 0)


async def test_the_reservations_of_a_frontend_are_released_when_its_lease_ends() -> None:
    async with fleet() as world:
        await world.worker("a")
        frontend = await _register_frontend(world, "f")
        await world.chosen(tokens_of("x", 2))
        load = world.router.models[MODEL].load
        assert load.statistics().reservations == 1
        world.store.kill(frontend)
        await until(lambda: load.statistics().reservations == 0)


async def test_a_worker_that_leaves_is_not_chosen_and_its_state_is_removed() -> None:
    async with fleet() as world:
        a, _ = await world.worker("a"), await world.worker("b")
        prompt = tokens_of("x", 30)
        await a.stores(prompt)
        await world.finds("a", prompt, 30)
        await world.chosen([*prompt, 1])
        await a.stop()
        model = world.router.models[MODEL]
        await until(lambda: "a" not in model.cards)
        assert (await world.chosen([*prompt, 1], "again")).instance == "b"
        await until(lambda: model.index.statistics().blocks == 0)
        assert model.load.statistics().reservations == 1


# --- recovery


async def test_a_restarted_router_knows_what_was_cached_before_it_started() -> None:
    async with fleet() as world:
        worker = await world.worker("a", sends_events=True)
        prompt = tokens_of("x", 7)
        await worker.stores(prompt)
        worker.drops(prompt, 5)
        await world.finds("a", prompt, 5)
        feed = world.router.feeds["a"]
        feed._run_actions(feed.source.start())  # what a new router does first
        await until(lambda: worker.snapshots == 2 and feed.source.state == "live")
        await world.finds("a", prompt, 5)
        await worker.stores(prompt)
        await world.finds("a", prompt, 7)


async def test_a_lost_batch_is_replayed_when_the_next_one_comes() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        source = worker.publisher.source
        world.broker.mute(source)
        await worker.stores(tokens_of("x", 5))
        world.broker.unmute(source)
        await worker.stores(tokens_of("y", 2))
        await world.finds("a", tokens_of("x", 5), 5)
        await world.finds("a", tokens_of("y", 2), 2)
        assert world.metric("headrace_kv_event_gaps_total") == 1
        assert worker.snapshots == 1


async def test_the_loss_of_the_last_batch_is_detected_by_load_reports() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        world.broker.mute(worker.publisher.source)
        await worker.stores(tokens_of("x", 5))
        for _ in range(2):
            await worker.reports()
        await world.finds("a", tokens_of("x", 5), 5)


async def test_an_engine_that_restarts_is_cleared_and_asked_for_a_new_snapshot() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        await worker.stores(tokens_of("x", 5))
        await worker.reports()
        await world.finds("a", tokens_of("x", 5), 5)
        worker.restarts_engine()
        await worker.reports()
        await world.finds("a", tokens_of("x", 5), 0)
        await until(lambda: world.router.feeds["a"].source.state == "live")
        await worker.stores(tokens_of("y", 2))
        await world.finds("a", tokens_of("y", 2), 2)


async def test_a_cleared_cache_is_gone_at_once() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        await worker.stores(tokens_of("x", 5))
        await world.finds("a", tokens_of("x", 5), 5)
        worker.clears()
        await world.finds("a", tokens_of("x", 5), 0)
        await until(lambda: world.router.models[MODEL].index.bytes == 0)


async def test_a_snapshot_that_does_not_come_is_requested_again() -> None:
    config = msgspec.structs.replace(
        NO_SPECULATION, source=msgspec.structs.replace(NO_SPECULATION.source, snapshot_idle_timeout_s=0.01)
    )
    async with fleet(config) as world:
        worker = await world.worker("a", answers_snapshots=False)
        await until(lambda: worker.snapshots >= 2)
        worker.answers_snapshots = True
        await worker.stores(tokens_of("x", 5))
        await world.finds("a", tokens_of("x", 5), 5)
        assert world.metric("headrace_kv_snapshots_total", outcome="failed") >= 2


async def test_torn_frames_are_counted_and_later_batches_are_applied() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        for payload in (b"", b"\xc1", b"\x93\x01"):
            worker.sequence += 1
            worker.publisher.publish(worker.sequence, payload)
        await worker.stores(tokens_of("x", 5))
        await world.finds("a", tokens_of("x", 5), 5)
        assert world.metric("headrace_kv_events_total", outcome="rejected") == 3


async def test_a_source_with_another_block_size_than_its_card_is_refused_and_the_worker_still_serves() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        worker.tells(BlockStored([1], None, list(range(8)), 8))
        await until(lambda: bool(world.router.feeds["a"].refused))
        assert "blocks of 8 tokens" in world.router.feeds["a"].refused
        assert world.metric("headrace_kv_sources_refused_total") == 1
        assert (await world.chosen(tokens_of("x", 2))).instance == "a"


async def test_the_cache_of_a_worker_without_events_is_known_by_the_prompts_routed_to_it() -> None:
    async with fleet() as world:
        await world.worker("a", sends_events=False)
        prompt = tokens_of("x", 6)
        await world.chosen([*prompt, 1], "first")
        assert (await world.chosen([*prompt, 2], "second")).overlap.device == 6


# --- refused and invalid Selects


async def test_before_any_worker_comes_only_the_routers_own_subject_answers_for_the_model() -> None:
    async with fleet() as world:
        with pytest.raises(NoResponders):
            await world.ask(tokens_of("x", 2))
        reply = await world.ask_raw(SELECT.encode(select(tokens_of("x", 2))), router=True)
        assert isinstance(reply, SelectRefused)
        assert reply.code == "unknown_model"


async def test_a_refusal_says_whether_there_are_no_instances_or_all_are_excluded() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        excluded = await world.ask(tokens_of("x", 2), excluded=("a",))
        assert isinstance(excluded, SelectRefused)
        assert excluded.code == "all_excluded"
        lora = await world.ask(tokens_of("x", 2), lora="nobody-has-it")
        assert isinstance(lora, SelectRefused)
        assert lora.code == "unknown_model"
        await worker.stop()
        await until(lambda: not world.router.models[MODEL].cards)
        gone = await world.ask(tokens_of("x", 2))
        assert isinstance(gone, SelectRefused)
        assert gone.code == "no_instances"
        assert gone.retry_after_s > 0


async def test_a_lora_is_served_by_the_worker_that_has_it() -> None:
    async with fleet() as world:
        await world.worker("a")
        await world.worker("b", lora=("french",))
        for number in range(4):
            assert (await world.chosen(tokens_of("x", 2), f"r{number}", lora="french")).instance == "b"


def _has_loras(model: ModelRouter, loras: tuple[str, ...]) -> bool:
    return model.cards["a"].lora == loras


async def test_a_worker_keeps_its_blocks_and_reservations_when_its_loras_change() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        prompt = tokens_of("x", 4)
        await worker.stores(prompt)
        await world.finds("a", prompt, 4)
        await world.chosen(prompt, "before")
        model, feed = world.router.models[MODEL], world.router.feeds["a"]
        for loras in (("french@1",), ("dutch@1", "french@1"), ()):
            await worker.loads(*loras)
            await until(partial(_has_loras, model, loras))
            assert model.load.candidate_of(("before", 1)) == ("a", 0)
            assert world.router.feeds["a"] is feed
            assert (await world.chosen(prompt, f"with {loras}")).overlap.blocks == 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hashes": b"1234567"}, "multiple of 8"),
        ({"hashes": bytes(8 * 200_000)}, "more than"),
        ({"hashes": bytes(8 * 3)}, "3 hashes for a prompt of 8"),
        ({"hashes": bytes(8 * 2)}, "repeat"),
        ({"prompt_tokens": 0}, "prompt_tokens"),
        ({"prompt_tokens": -5}, "prompt_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"attempt": -1}, "attempt"),
        ({"request": ""}, "request"),
        ({"request": "r" * 10_000}, "request"),
        ({"excluded": ("x",) * 10_000}, "excluded"),
    ],
)
async def test_an_invalid_select_is_refused_with_its_field_and_reserves_nothing(
    changes: dict[str, object], word: str
) -> None:
    async with fleet() as world:
        await world.worker("a")
        question = msgspec.structs.replace(select(tokens_of("x", 2)), **changes)
        reply = await world.ask_raw(SELECT.encode(question))
        assert isinstance(reply, SelectRefused)
        assert reply.code == "bad_request"
        assert word in reply.reason
        assert world.router.models[MODEL].load.statistics().reservations == 0


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"{}", msgspec.msgpack.encode({"type": "select", "attempt": "one"})])
async def test_a_payload_that_is_not_a_select_is_refused_and_counted(payload: bytes) -> None:
    async with fleet() as world:
        await world.worker("a")
        reply = await world.ask_raw(payload)
        assert isinstance(reply, SelectRefused)
        assert reply.code == "bad_request"
        assert world.metric("headrace_malformed_messages_total", channel="select") == 1


async def test_garbage_on_every_channel_is_counted_and_the_router_keeps_running() -> None:
    async with fleet() as world:
        await world.worker("a")
        await world.bus.publish(subjects.router_load(NAMESPACE, MODEL), b"\xc1")
        await world.tell(Reserved("r", 1, "f", "a", 0, -5, 1))
        await world.bus.publish(subjects.worker(NAMESPACE, "a", "load"), b"nonsense")
        await world.bus.publish(subjects.select(NAMESPACE, MODEL), SELECT.encode(select(tokens_of("x", 2))))
        await until(lambda: world.metric("headrace_malformed_messages_total", channel="load report") == 1)
        await until(lambda: world.metric("headrace_malformed_messages_total", channel="load events") == 2)
        await until(lambda: world.metric("headrace_malformed_messages_total", channel="select") == 1)
        assert (await world.chosen(tokens_of("x", 2))).instance == "a"


# --- explanations, metrics and registration


async def test_a_select_in_json_is_answered_in_json() -> None:
    async with fleet() as world:
        await world.worker("a")
        question = SELECT.encode(select(tokens_of("x", 2)), JSON_HEADER)
        answer = await world.bus.request(
            subjects.select(NAMESPACE, MODEL), question, timeout_s=LIMIT_S, headers=JSON_HEADER
        )
        assert msgspec.json.decode(answer.payload)["instance"] == "a"


async def test_a_decision_can_be_explained_with_its_outcome() -> None:
    async with fleet() as world:
        worker = await world.worker("a")
        prompt = tokens_of("x", 5)
        await worker.stores(prompt)
        await world.finds("a", prompt, 5)
        await world.chosen([*prompt, 1], "why")
        await world.tell(Prefilled("why", 1, 4 * BLOCK_SIZE))
        await until(lambda: world.metric("headrace_prompt_tokens_total") == 21)
        answer = await world.bus.request(subjects.explain(NAMESPACE, MODEL), b"chatcmpl-why", timeout_s=LIMIT_S)
        (decision,) = msgspec.json.decode(answer.payload)["decisions"]
        assert decision["instance"] == "a"
        assert decision["predicted_cached_tokens"] == 5 * BLOCK_SIZE
        assert decision["actual_cached_tokens"] == 4 * BLOCK_SIZE
        assert world.metric("headrace_cached_tokens_total", kind="predicted") == 20
        assert world.metric("headrace_cached_tokens_total", kind="actual") == 16
        assert world.metric("headrace_kv_hit_rate_error_sum") == pytest.approx(4 / 21)


@pytest.mark.parametrize(
    ("policy", "errors"),
    [("BrokenPolicy", 1), ("ExitingPolicy", 1), ("FailingReasonPolicy", 1), ("NumpyScorePolicy", 0)],
)
async def test_a_policy_that_fails_is_replaced_for_that_request_and_counted(policy: str, errors: int) -> None:
    config = msgspec.structs.replace(NO_SPECULATION, policy=f"tests.router.broken_policy:{policy}")
    async with fleet(config) as world:
        await world.worker("a")
        assert (await world.chosen(tokens_of("x", 2))).instance == "a"
        assert world.metric("headrace_policy_troubles_total", kind="failed") == errors


async def test_a_frozen_worker_is_passed_over_and_shown() -> None:
    config = msgspec.structs.replace(NO_SPECULATION, load=msgspec.structs.replace(NO_SPECULATION.load, frozen_s=0.3))
    async with fleet(config) as world:
        a, b = [await world.worker(name) for name in ("a", "b")]
        prompt = tokens_of("x", 200)
        await a.stores(prompt)
        await world.finds("a", prompt, 200)
        eligibility = world.router.models[MODEL].eligibility
        await a.reports("long")
        await b.reports()
        await until(lambda: eligibility.frozen == {"a", "b"})
        await until(lambda: world.metric("headrace_workers_standing_still") == 2)
        assert (await world.chosen([*prompt, 1], "nobody else")).instance == "a"
        await world.tell(Finished("nobody else", 1))
        async with asyncio.timeout(LIMIT_S):
            for number in itertools.count():
                await b.reports()
                chosen = await world.chosen([*prompt, 1], f"r{number}")
                await world.tell(Finished(f"r{number}", 1))
                if chosen.instance == "b":  # as soon as a tick has seen the report
                    break
                await asyncio.sleep(0.02)


async def test_workers_that_live_and_get_no_requests_are_counted_and_named() -> None:
    async with fleet() as world:
        stray, _ = await world.worker("stray"), await world.worker("b")
        await stray.stop()
        bare = Instance(NAMESPACE, "worker", "bare", 1, "m", 1, 0.0, "0")
        entry = {subjects.instance_key(NAMESPACE, "worker", "bare"): INSTANCE.encode(bare, JSON_HEADER)}
        await MemoryDiscovery(world.store).register(lambda _epoch: entry)
        await until(lambda: "stray" not in world.runtime.directory.instances)
        await stray.reports()
        await until(lambda: world.metric("headrace_workers_left_out", reason="unregistered") == 1)
        await until(lambda: world.metric("headrace_workers_left_out", reason="no_card") == 1)
        subject = subjects.router_state(NAMESPACE, world.runtime.instance)
        answer = await world.bus.request(subject, b"", timeout_s=LIMIT_S)
        assert ROUTER_STATE.decode(answer.payload, JSON_HEADER).left_out.keys() == {"stray", "bare"}


async def test_a_policy_that_is_slow_too_often_is_disabled() -> None:
    policy = "tests.router.broken_policy:LastPolicy"
    config = msgspec.structs.replace(NO_SPECULATION, policy=policy, policy_budget_ms=0.0, policy_strikes=1)
    async with fleet(config) as world:
        for name in ("a", "b"):
            await world.worker(name)
        prompt = tokens_of("x", 20)
        await world.workers[0].stores(prompt)
        await world.finds("a", prompt, 20)
        chosen = [(await world.chosen([*prompt, 1], f"r{number}")).instance for number in range(3)]
        assert chosen == ["b", "b", "a"]
        assert world.metric("headrace_policy_troubles_total", kind="slow") == 1
        assert world.metric("headrace_policy_troubles_total", kind="off") == 1


async def test_the_router_is_registered_only_while_it_answers() -> None:
    async with fleet(instance="0b") as world:
        key = subjects.instance_key(NAMESPACE, "router", "0b")
        assert key in world.store.found(key)
        store = world.store
    assert not store.found(key)


async def _register_frontend(world: RouterFleet, name: str) -> MemoryRegistration:
    entry = Instance(NAMESPACE, "frontend", name, 1, "m", 1, 0.0, "0")
    key = subjects.instance_key(NAMESPACE, "frontend", name)
    registration = await MemoryDiscovery(world.store).register(lambda _: {key: INSTANCE.encode(entry, JSON_HEADER)})
    await until(lambda: name in world.runtime.directory.instances)
    return registration
