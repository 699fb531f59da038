"""Engines of vLLM's shape over a kvbm that is damaged, silent, full or strange, and requests that are aborted: all
requests are computed, and nothing is left behind."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from services.kvbm.doors.replies import Request as KvbmRequest
from services.kvbm.tickets.results import TicketLimits
from services.worker.kv_connector.pool_attachment import MappedPool
from services.worker.vllm.connector import scheduler_half
from services.worker.vllm.connector.chain import TokenChain
from shared.pool.format import PoolUnfit
from shared.pool.lock import SOCKET
from shared.pool.socket_frames import Hello, encode_frame
from tests.kvbm.store_rig import LIMIT_S, Store, World, running, serving, settings, until
from tests.worker.vllm.connector.engines import PROMPT, answer, attached, engine, no_ticket, steps
from tests.worker.vllm.connector.vllm_shaped import BLOCK, MODEL, Request


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


async def test_a_full_kvbm_costs_a_request_nothing_and_takes_its_blocks_once_there_is_room(tmp_path: Path) -> None:
    full = settings(tmp_path, size_bytes=1 << 17, tickets=TicketLimits(owner_share=1.0))
    async with running(World(full)) as store, engine(tmp_path, "a") as one, engine(tmp_path, "b") as other:
        await attached(one)
        await attached(other)
        [layout] = store.service.layouts.open.values()
        writer = await store.world.attached("writer", layout=one.half._layout())
        slots = layout.slots.arena.slots
        chain = TokenChain([9] * BLOCK * slots, BLOCK, MODEL)
        granted = await writer.grant([chain.content(index) for index in range(slots)])
        assert len(granted.blocks) == slots, "every slot is being written to"
        assert (await answer(one, "r1")).loaded_blocks == 0
        assert (await answer(other, "r2")).loaded_blocks == 0
        assert one.half.link.kvbm
        assert other.half.link.kvbm
        writer.die()
        await until(lambda: not layout.tiers.statistics().host.writing)
        one.pool.clear()
        assert (await answer(one, "r3")).loaded_blocks == 0
        other.pool.clear()
        assert (await answer(other, "r4")).loaded_blocks == 4
        await no_ticket(store)


async def test_an_engine_of_the_native_layout_has_the_pool_so_nothing_is_exchanged(tmp_path: Path) -> None:
    """One arena, and the native engine's blocks of the same model and shape have another layout."""
    async with running(World(settings(tmp_path))) as store, engine(tmp_path, "a") as one:
        await attached(one)
        ours = one.half._layout()
    native = msgspec.structs.replace(ours, kv=msgspec.structs.replace(ours.kv, dtype="float32", form="", form_bytes=0))
    assert native.digest != ours.digest
    async with running(World(settings(tmp_path))) as store, engine(tmp_path, "a") as one:
        await store.world.attached("native", layout=native)
        await steps(one, lambda: bool(one.half.link.reason))
        assert "no_arena" in one.half.link.reason
        assert (await answer(one, "r1")).loaded_blocks == 0
        await no_ticket(store)


@pytest.mark.parametrize("lost", ["store", "commit"])
@pytest.mark.parametrize("ranks", [1, 2])
async def test_blocks_whose_store_was_not_answered_are_stored_by_the_next_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str, ranks: int
) -> None:
    monkeypatch.setattr(scheduler_half, "KEEP_S", 0.0)
    async with running(World(settings(tmp_path))) as store, engine(tmp_path, "a", ranks=ranks) as one:
        await attached(one)
        handle, losses = store.service.door._handle, 0

        async def lose(request: KvbmRequest) -> None:
            nonlocal losses
            if request.operation == lost and not losses:
                losses += 1
                return
            await handle(request)

        store.service.door._handle = lose
        await answer(one, "r1")
        assert losses
        if lost == "commit":  # for which vLLM does not step
            async with asyncio.timeout(LIMIT_S):
                while not one.half.link.reason:
                    one.half.keep_link_now()
                    await asyncio.sleep(0.001)
            await attached(one)
            await steps(one, lambda: not one.has_work)
        [layout] = store.service.layouts.open.values()
        assert layout.tiers.statistics().host.ready == 5
