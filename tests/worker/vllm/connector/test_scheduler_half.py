"""Engines of vLLM's shape over one real kvbm: whatever befalls requests, engines and kvbm, no token is computed from
wrong bytes, no request is lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import select
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from services.kvbm.layout.layout import LayoutStore
from services.worker.kv_connector.pool_attachment import MappedPool
from services.worker.vllm.connector import scheduler_half, socket_client
from services.worker.vllm.connector.settings import ConnectorSettings
from shared.pool.format import PoolUnfit
from shared.pool.lock import SOCKET
from shared.pool.socket_frames import Hello, encode_frame
from tests.kvbm.store_rig import LIMIT_S, Store, World, running, serving, settings, until
from tests.worker.vllm.connector.vllm_shaped import Engine, Request

PROMPT = [1, 2, 1, 1, 2, 2, 1, 2, 1]
"""Four blocks can be loaded: the last token is always computed."""


def connector_settings(directory: Path, **fields: Any) -> ConnectorSettings:
    return ConnectorSettings(pool=str(directory / "pool"), timeout_s=1.0, verify=True, **fields)


@asynccontextmanager
async def engine(directory: Path, name: str, draw: Random | None = None, **fields: Any) -> AsyncIterator[Engine]:
    """Run an engine that is attached."""
    options = {key: fields.pop(key) for key in ("blocks", "ranks", "depth", "drafts") if key in fields}
    made = Engine(connector_settings(directory, **fields), draw or Random(0), time.monotonic, name=name, **options)
    try:
        yield made
    finally:
        made.close()


async def steps(engine: Engine, met: Callable[[], bool]) -> None:
    """Step until `met()` holds."""
    async with asyncio.timeout(LIMIT_S):
        while not met():
            engine.step()
            engine.half.blocks.validate()
            await asyncio.sleep(0.0005)


async def attached(engine: Engine) -> None:
    await steps(engine, lambda: bool(engine.half.link.kvbm))


async def answer(engine: Engine, name: str, prompt: list[int] = PROMPT, **fields: Any) -> Request:
    """Have the engine answer a prompt, and come to rest."""
    request = Request(name, prompt, fields.pop("most", 3), fields.pop("salt", ""))
    engine.add(request)
    await steps(engine, lambda: not engine.has_work)
    return request


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
            link = other.half._client._socket
            assert link is not None
            await until(lambda: bool(select.select([link], [], [], 0)[0]))
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


async def no_ticket(store: Store) -> None:
    """Wait until the kvbm holds nothing for anybody."""

    def met() -> bool:
        now = [layout.tickets.statistics() for layout in store.service.layouts.open.values()]
        return not any(each.stores or each.fetches or each.expired for each in now)

    await until(met)


# --- what goes wrong


def damage(store: Store) -> None:
    """Change a byte of every slot of the pool."""
    for layout in store.service.layouts.open.values():
        for slot in range(layout.slots.arena.slots):
            with layout.slots.slot(slot) as memory:
                memory[5] ^= 1


async def test_blocks_with_other_bytes_than_were_stored_are_computed_and_discarded(tmp_path: Path) -> None:
    async with serving(tmp_path) as store, engine(tmp_path, "a", checksums=True) as one:
        await attached(one)
        await answer(one, "r1")
        damage(store)
        async with engine(tmp_path, "b", checksums=True) as other:
            await attached(other)
            await answer(other, "r2")
            assert other.failed_loads == 1
            told = other.half.new_stats()
            assert told is not None
            assert told[0].damaged_blocks > 0
            [layout] = store.service.layouts.open.values()
            await until(lambda: layout.tiers.statistics().host.ready == 5)  # computed and stored again
            async with engine(tmp_path, "c", checksums=True) as third:
                await attached(third)
                assert (await answer(third, "r3")).loaded_blocks == 4
                assert third.failed_loads == 0


async def test_a_rank_that_cannot_map_the_pool_loads_nothing_and_no_request_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path), engine(tmp_path, "a") as one, engine(tmp_path, "b", ranks=1) as other:
        await attached(one)
        await answer(one, "r1")
        monkeypatch.setattr(MappedPool, "map", _unfit)
        await attached(other)
        request = await answer(other, "r2")
        assert request.loaded_blocks == 4
        assert other.failed_loads == 1
        assert not other.half.link.kvbm
        assert "cannot be mapped" in other.half.link.reason
        assert (await answer(other, "r3", salt="s")).loaded_blocks == 0


def _unfit(*_: object) -> None:
    raise PoolUnfit("the pool cannot be mapped")


async def test_requests_are_computed_while_the_kvbm_does_not_answer(tmp_path: Path) -> None:
    world = World(settings(tmp_path))
    async with running(world) as store, engine(tmp_path, "a", wait_s=0.05) as one, engine(tmp_path, "b") as other:
        await attached(one)
        await attached(other)
        await answer(other, "r1")

        async def silent(*_: object) -> None:
            return

        store.service.door._handle = silent  # as frozen: it reads and does not answer
        request = await answer(one, "r2")
        assert request.loaded_blocks == 0
        assert one.half.blocks.late == 1
        assert not one.half.link.kvbm


async def test_a_kvbm_with_another_protocol_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir(mode=0o700)

    async def talk(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(encode_frame(Hello(99, "k")))
        await writer.drain()
        writer.close()
        await writer.wait_closed()

    listening = await asyncio.start_unix_server(talk, tmp_path / "pool" / SOCKET)
    async with listening, engine(tmp_path, "a") as one:
        await steps(one, lambda: "speaks protocol 99" in one.half._client.trouble)
        assert (await answer(one, "r1")).loaded_blocks == 0


@pytest.mark.parametrize("after", range(0, 14, 2))
async def test_a_request_that_is_aborted_at_any_step_leaves_nothing(tmp_path: Path, after: int) -> None:
    async with serving(tmp_path) as store, engine(tmp_path, "a") as one:
        await attached(one)
        await answer(one, "r1")
        one.pool.clear()
        one.add(Request("r2", PROMPT, 9, ""))
        for _ in range(after):
            one.step()
            await asyncio.sleep(0.001)
        one.abort("r2")
        await steps(one, lambda: not one.has_work)
        assert one.pool.held == []
        await no_ticket(store)
