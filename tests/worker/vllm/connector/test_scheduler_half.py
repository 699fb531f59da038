"""Engines of vLLM's shape over one real kvbm: whatever befalls requests, engines and kvbm, no token is computed from
wrong bytes, no request is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import time
from itertools import count
from pathlib import Path
from random import Random

import msgspec
import pytest

from services.kvbm.layout.layout import LayoutStore
from services.worker.kv_connector import link_log, socket_client
from services.worker.vllm.connector import scheduler_half
from services.worker.vllm.connector.readable import readable
from tests.kvbm.store_rig import LIMIT_S, World, running, serving, settings, until
from tests.worker.vllm.connector.engines import PROMPT, answer, attached, connector_settings, engine, no_ticket, steps
from tests.worker.vllm.connector.vllm_shaped import IDLE_STEPS, Engine, Request


async def test_what_one_engine_has_computed_another_one_loads(tmp_path: Path) -> None:
    async with serving(tmp_path), engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        await attached(one)
        await attached(other)
        first = await answer(one, "r1")
        second = await answer(other, "r2")
        assert (first.loaded_blocks, second.loaded_blocks) == (0, 4)
        again = await answer(other, "r3")
        assert again.loaded_blocks == 0, "the device has them"
        assert other.half.new_stats() is not None
        salted = await answer(other, "r4", salt="s")
        assert salted.loaded_blocks == 0


async def test_ranks_copy_their_parts_of_each_block(tmp_path: Path) -> None:
    async with serving(tmp_path), engine(tmp_path, "a", ranks=3) as one, engine(tmp_path, "b", ranks=3) as other:
        await attached(one)
        await attached(other)
        await answer(one, "r1")
        assert (await answer(other, "r2")).loaded_blocks == 4


@pytest.mark.parametrize("seed", range(3))
async def test_blocks_with_rejected_drafts_are_stored_with_the_tokens_that_were_kept(tmp_path: Path, seed: int) -> None:
    async with (
        serving(tmp_path),
        engine(tmp_path, "a", Random(seed), drafts=3, blocks=60) as one,
        engine(tmp_path, "b", blocks=60) as other,
    ):
        await attached(one)
        await attached(other)
        asked = [await answer(one, f"r{each}", most=13, salt=f"{each}") for each in range(4)]
        assert one.accepted_drafts
        assert one.rejected_drafts
        for each, request in enumerate(asked):
            again = await answer(other, f"s{each}", request.tokens, salt=f"{each}")
            full = (len(request.tokens) - 1) // 2
            # vLLM does not cache what the drafts of a request's last step have filled: up to two blocks.
            assert full - 2 <= again.loaded_blocks <= full
        assert one.pool.held == other.pool.held == []


async def test_engines_with_other_numbers_of_ranks_share_nothing(tmp_path: Path) -> None:
    async with serving(tmp_path), engine(tmp_path, "a") as one, engine(tmp_path, "b", ranks=2) as other:
        await attached(one)
        await answer(one, "r1")
        async with asyncio.timeout(LIMIT_S):
            for turn in count():
                other.step()
                await asyncio.sleep(0.001)
                if turn > 200:
                    break
        assert not other.half.link.kvbm, "one arena, and it has the other layout"
        assert (await answer(other, "r2")).loaded_blocks == 0


async def test_blocks_come_from_disk_into_the_places_that_vllm_has_allocated(tmp_path: Path) -> None:
    small = settings(tmp_path, size_bytes=1 << 19, disk=True)
    long = [1 + (index * index) % 2 for index in range(31)]
    async with serving(tmp_path, pool=small.pool, disk=small.disk) as store, engine(tmp_path, "a", blocks=60) as one:
        await attached(one)
        [layout] = store.service.layouts.open.values()
        for each in range(7):
            await answer(one, f"r{each}", long, salt=f"{each}")
            await on_disk(layout)
        async with engine(tmp_path, "b", blocks=60) as other:
            await attached(other)
            for each in range(7):
                assert (await answer(other, f"r{each}", long, salt=f"{each}")).loaded_blocks == 15
        assert store.metric("headrace_kvbm_hit_blocks_total", tier="disk") > 0


async def on_disk(layout: LayoutStore) -> None:
    """Wait until nothing is on its way to the disk."""

    def met() -> bool:
        tiers = layout.tiers.statistics()
        return tiers.disk.on and not tiers.disk.writing and not tiers.spills_waiting

    await until(met)


async def test_without_a_kvbm_everything_is_computed(tmp_path: Path) -> None:
    async with engine(tmp_path, "a") as one:
        assert (await answer(one, "r1")).loaded_blocks == 0
        assert not one.half.unsettled


async def test_a_kvbm_that_comes_later_gets_what_is_computed_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_client, "RETRY_S", 0.01)
    async with engine(tmp_path, "a") as one:
        await answer(one, "r1")
        async with serving(tmp_path):
            await attached(one)
            await answer(one, "r2")
            async with engine(tmp_path, "b") as other:
                await attached(other)
                assert (await answer(other, "r3")).loaded_blocks == 4


async def test_a_request_of_an_idle_engine_gets_the_kvbms_answer_in_the_step_that_asks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path), engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        await attached(one)
        await attached(other)
        await answer(one, "r1")
        with monkeypatch.context() as patched:
            patched.setattr(scheduler_half, "ANSWER_S", LIMIT_S)
            patched.setattr(scheduler_half, "ASK_AGAIN_S", 0.0)  # the last look was just now on a fast machine
            for _ in range(IDLE_STEPS):
                other.step()
            other.add(request := Request("r2", PROMPT, 3, ""))
            await asyncio.to_thread(other.step)  # the kvbm answers from here meanwhile
        assert (request.state, request.loaded_blocks) == ("remote", 4)
        await steps(other, lambda: not other.has_work)


async def test_no_request_waits_for_the_kvbms_answer_while_others_compute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path), engine(tmp_path, "a") as one:
        await attached(one)
        one.add(computes := Request("r1", PROMPT, 12, ""))
        await steps(one, lambda: computes.state == "running")
        one.add(request := Request("r2", PROMPT, 3, "salt"))
        monkeypatch.setattr(scheduler_half, "readable", lambda *_: pytest.fail("a step that computes waits"))
        one.step()
        monkeypatch.undo()
        assert request.state == "waiting"
        await steps(one, lambda: not one.has_work)


async def test_an_answer_that_came_during_a_long_step_is_not_late(tmp_path: Path) -> None:
    later_s = 0.0
    async with serving(tmp_path), engine(tmp_path, "a") as one:
        await attached(one)
        await answer(one, "r1")
        other = Engine(connector_settings(tmp_path), Random(0), lambda: time.monotonic() + later_s, name="b")
        try:
            await attached(other)
            other.add(request := Request("r2", PROMPT, 3, ""))
            other.step()
            await until(lambda: readable(other.half._client, 0.0))
            later_s = 1.5  # the step took so long; `wait_s` is 1
            await steps(other, lambda: not other.has_work)
            assert (request.loaded_blocks, other.half.blocks.late) == (4, 0)
        finally:
            other.close()


async def test_an_aborted_load_gives_its_blocks_back_once(tmp_path: Path) -> None:
    async with serving(tmp_path) as store, engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        await attached(one)
        await attached(other)
        await answer(one, "r1")
        other.add(request := Request("r2", PROMPT, 3, ""))
        await steps(other, lambda: request.state == "remote")
        other.abort("r2")
        await steps(other, lambda: not other.has_work)
        assert other.pool.held == []
        assert not other.requests
        await no_ticket(store)


async def test_an_idle_engine_attaches_to_a_kvbm_that_was_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_client, "RETRY_S", 0.01)
    monkeypatch.setattr(scheduler_half, "KEEP_S", 0.0)
    async with engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        async with serving(tmp_path):
            await attached(one)
            await answer(one, "r1")
        async with serving(tmp_path, instance="b2"):
            async with asyncio.timeout(LIMIT_S):
                while one.half.link.kvbm != "b2":
                    one.half.keep_link_now()  # no step is made
                    await asyncio.sleep(0.001)
            await attached(other)
            await answer(one, "r2", salt="s")
            assert (await answer(other, "r3", salt="s")).loaded_blocks == 4


async def test_an_idle_engine_follows_kvbms_that_come_and_go_and_stores_its_blocks_again_with_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket_client, "RETRY_S", 0.01)
    monkeypatch.setattr(scheduler_half, "KEEP_S", 0.0)
    async with engine(tmp_path, "a") as one:
        async with serving(tmp_path):
            await attached(one)
            await answer(one, "r1")
        for instance in ("b2", "b3"):
            async with serving(tmp_path, instance=instance) as store:
                async with asyncio.timeout(LIMIT_S):
                    while one.half.link.kvbm != instance:
                        one.half.keep_link_now()  # no step is made
                        await asyncio.sleep(0.001)
                if instance == "b3":
                    await steps(one, lambda: not one.has_work)
                    [layout] = store.service.layouts.open.values()
                    assert layout.tiers.statistics().host.ready == 5


async def test_each_end_of_a_link_is_in_the_log_however_soon_it_comes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_client, "RETRY_S", 0.01)
    async with engine(tmp_path, "a") as one:
        for life in (1, 2):
            async with serving(tmp_path, instance=f"b{life}"):
                await attached(one)
                caplog.clear()
            await steps(one, lambda: not one.half.link.kvbm)
            assert "no blocks are exchanged: " in caplog.text


async def test_each_reason_is_in_the_log_however_soon_it_follows_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(socket_client, "RETRY_S", 0.01)
    monkeypatch.setattr(link_log, "LOG_AFTER_S", 0.0)
    async with engine(tmp_path, "a") as one:
        await steps(one, lambda: "no blocks are exchanged: there is no " in caplog.text)
        (tmp_path / "pool").mkdir(mode=0o700)
        await steps(one, lambda: "no kvbm listens" in one.half.link.reason)
        one.step()
        assert "no kvbm listens" in caplog.messages[-1]


async def test_why_no_blocks_are_exchanged_is_logged_while_the_engine_is_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(scheduler_half, "KEEP_S", 0.0)
    async with engine(tmp_path, "a") as one:
        await steps(one, lambda: bool(one.half.link.reason))
        assert not caplog.records
        monkeypatch.setattr(link_log, "LOG_AFTER_S", 0.0)
        one.half.keep_link_now()
        assert "no blocks are exchanged: there is no " in caplog.messages[-1]


async def test_a_block_that_was_evicted_before_its_copy_is_stored_when_it_is_computed_again(tmp_path: Path) -> None:
    async with serving(tmp_path), engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        await attached(one)
        await attached(other)
        one.add(request := Request("r1", PROMPT, 3, ""))
        await steps(one, lambda: request.state == "finished")
        for block in one.pool.blocks:
            if not block.ref_cnt:
                one.pool.uncache(block)
        await steps(one, lambda: not one.has_work)
        await answer(one, "r2")
        assert (await answer(other, "r3")).loaded_blocks == 4


async def test_a_reset_gives_the_blocks_another_name(tmp_path: Path) -> None:
    two = settings(tmp_path)
    pool = msgspec.structs.replace(two.pool, arenas=2)
    async with serving(tmp_path, pool=pool), engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        await attached(one)
        await attached(other)
        await answer(one, "r1")
        other.half.rename(msgspec.structs.replace(other.half.identity, weights="w, changed"))
        await steps(other, lambda: not other.half.link.kvbm)
        await attached(other)
        assert (await answer(other, "r2")).loaded_blocks == 0


async def test_blocks_that_were_offered_under_another_name_are_not_offered_to_the_next_link(tmp_path: Path) -> None:
    pool = msgspec.structs.replace(settings(tmp_path).pool, arenas=2)
    async with serving(tmp_path, pool=pool) as store, engine(tmp_path, "a") as one:
        await attached(one)
        await answer(one, "r1")
        one.half.rename(msgspec.structs.replace(one.half.identity, weights="w, changed"))
        await steps(one, lambda: not one.half.link.kvbm)
        await attached(one)
        await steps(one, lambda: not one.has_work)
        before, after = store.service.layouts.open.values()
        assert (before.tiers.statistics().host.ready, after.tiers.statistics().host.ready) == (5, 0)


@pytest.mark.parametrize("seed", range(24))
async def test_whatever_happens_bytes_are_right_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(socket_client, "RETRY_S", 0.01)
    draw = Random(seed)
    world = World(settings(tmp_path, size_bytes=1 << draw.choice((17, 20)), disk=draw.random() < 0.5))
    engines: list[Engine] = []
    names = count()
    over = asyncio.Event()

    def start() -> Engine:
        options = connector_settings(tmp_path, wait_s=draw.choice((0.02, 1.0)), blocks_in_flight=draw.choice((2, 64)))
        blocks, depth = draw.choice((12, 24)), draw.choice((1, 2))
        return Engine(options, draw, time.monotonic, name=f"e{next(names)}", blocks=blocks, ranks=ranks, depth=depth)

    async def live() -> None:
        made = start()
        engines.append(made)
        while not over.is_set():
            if len(made.requests) < 5 and draw.random() < 0.3:
                prompt = [draw.randint(1, 2) for _ in range(draw.randint(1, 13))]
                made.add(Request(f"r{next(names)}", prompt, draw.randint(1, 4), draw.choice(("", "", "s"))))
            if made.requests and draw.random() < 0.05:
                made.abort(draw.choice(list(made.requests)))
            made.step()
            made.half.blocks.validate()
            if draw.random() < 0.003:  # killed: the locks are released, nothing is said
                for rank in made.ranks:
                    rank.half.close()
                made.half.close()
                engines.remove(made)
                made = start()
                engines.append(made)
            await asyncio.sleep(draw.choice((0, 0, 0.001)))

    ranks = draw.choice((1, 2))
    async with asyncio.TaskGroup() as tasks:
        lives = []
        for life in range(3):
            async with running(world, f"b{life}") as store:
                if not life:
                    lives = [tasks.create_task(live()) for _ in range(2)]
                await asyncio.sleep(0.2 + 0.3 * draw.random())
                if life == 2:
                    over.set()
                    await asyncio.gather(*lives)
                    for each in engines:
                        await steps(each, lambda each=each: not each.has_work)  # type: ignore[misc]
                        assert each.pool.held == []
                    await no_ticket(store)
                elif draw.random() < 0.5:
                    store.lose()
    for each in engines:
        each.close()


async def test_what_is_handed_over_is_there_for_another_engine_once_it_is_said_to_be_stored(tmp_path: Path) -> None:
    async with serving(tmp_path), engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        await attached(one)
        await attached(other)
        said: list[str] = []

        def stored() -> bool:
            said.extend((one.half.new_stats() or (None, None, []))[2])
            return bool(said)

        request = Request("r1", PROMPT, 1, "")
        request.hands_over = "17"
        one.add(request)
        await steps(one, stored)
        assert said == ["17"]
        assert request.state == "finished"
        assert (await answer(other, "r2", request.tokens)).loaded_blocks == 4


async def test_blocks_of_an_expected_prompt_are_loaded_while_another_engine_computes_it(tmp_path: Path) -> None:
    long = [1 + (index * index) % 2 for index in range(31)]
    async with (
        serving(tmp_path) as store,
        engine(tmp_path, "a", blocks=60) as one,
        engine(tmp_path, "b", blocks=100, prefetches=True) as other,
    ):
        await attached(one)
        await attached(other)
        expected = Request("expected", long, 1, "")
        expected.expected = True
        other.add(expected)
        await steps(other, lambda: other.asked_again > 3)
        assert not other.pool.held
        request = Request("r1", long, 1, "")
        one.add(request)

        def loaded() -> bool:
            one.step()
            return other.half.blocks.expected.loaded == 15

        await steps(other, loaded)
        assert other.pool.held == [], "what is loaded can be evicted"
        other.abort("expected")
        again = await answer(other, "r1", request.tokens)
        assert again.loaded_blocks == 0, "the device has them"
        await steps(other, lambda: not other.has_work)
        await steps(one, lambda: not one.has_work)
        await no_ticket(store)


async def test_an_expected_prompt_that_never_comes_leaves_nothing_behind(tmp_path: Path) -> None:
    long = [1 + (index * index) % 2 for index in range(31)]
    async with (
        serving(tmp_path) as store,
        engine(tmp_path, "a", blocks=60) as one,
        engine(tmp_path, "b", blocks=20, prefetches=True) as other,
    ):
        await attached(one)
        await attached(other)
        await answer(one, "r1", long)
        expected = Request("expected", [*long, *long], 1, "")
        expected.expected = True
        other.add(expected)
        await steps(other, lambda: other.half.blocks.expected.loaded >= 4)
        other.abort("expected")
        await steps(other, lambda: not other.has_work)
        assert other.pool.held == []
        await no_ticket(store)
