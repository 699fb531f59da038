"""A router with a real kvbm, with a real pool and a real disk tier: the router knows the blocks that engines store
there."""

from __future__ import annotations

from pathlib import Path

import msgspec

from shared.blocks import Content
from shared.bus.memory_bus import MemoryBus
from shared.hashing import content_keys, pack_tokens, root_key
from shared.messages.cards import KvLayout
from shared.messages.kvbm import StoreLayout
from shared.messages.select import Overlap
from tests.kvbm.store_rig import World, running, settings
from tests.router.fleet import BLOCK_SIZE, MODEL, NO_SPECULATION, RouterFleet, fleet, tokens_of, until

LAYOUT = StoreLayout(MODEL, "weights-1", KvLayout("float32", layers=1, kv_heads=2, head_dim=125, block_size=BLOCK_SIZE))
"""Blocks of two pages."""
X = tokens_of("x", 12)
OFTEN = msgspec.structs.replace(
    NO_SPECULATION, source=msgspec.structs.replace(NO_SPECULATION.source, digest_s=0.001, snapshot_idle_timeout_s=0.5)
)


def contents_of(tokens: list[int]) -> list[Content]:
    packed = pack_tokens(tokens)
    found: list[Content] = []
    for number, key in enumerate(content_keys(root_key(MODEL), packed, BLOCK_SIZE)):
        block = packed[4 * BLOCK_SIZE * number : 4 * BLOCK_SIZE * (number + 1)]
        found.append(Content(key, found[-1].key if found else None, block))
    return found


async def chosen(world: RouterFleet, request: str, *, blocks: int) -> Overlap:
    """Return the overlap of a choice once `blocks` blocks are found; the prompt continues after them."""
    await world.finds("a", X, blocks)
    return (await world.chosen([*X, 1, 2], request)).overlap


async def test_blocks_that_engines_store_count_for_attached_workers_through_evictions_and_a_restart(
    tmp_path: Path,
) -> None:
    async with fleet(OFTEN) as world:
        stores = World(settings(tmp_path, size_bytes=1 << 17, disk=True))
        stores.broker, stores.store, stores.bus = world.broker, world.store, MemoryBus(world.broker)
        engine = stores.engine("e", worker="a", layout=LAYOUT)
        worker = await world.worker("a", kvbm="b1", kvbm_layout=LAYOUT.digest)
        try:
            async with running(stores, "b1") as store:
                await engine.attach()
                contents = contents_of(X)
                assert await engine.store(contents[:2]) == 2
                assert await chosen(world, "first", blocks=2) == Overlap(0, 2, 0)
                for number in range(2, 12):
                    assert await engine.store(contents[number : number + 1]) == 1
                    await store.spilled(LAYOUT)  # otherwise it may leave memory before it is on disk
                slots = (await store.layout(LAYOUT)).host.capacity_blocks
                assert slots < 12, "some blocks are on disk alone"
                found = await chosen(world, "second", blocks=12)
                assert found.host <= slots
                assert found.disk == 12 - found.host
                feed = world.router.feeds[f"b1/{LAYOUT.digest}"]
                agreed = feed.status().digests["agreed"]
                await until(lambda: feed.status().digests["agreed"] > agreed + 1)
                assert feed.status().digests["differed"] == feed.status().digests["exempt"] == 0
                assert (feed.source.partial, feed.source.resyncs) == (False, 1)
            await world.finds("a", X, 0)
            engine.unmap()
            async with running(stores, "b2"):
                await engine.attach()
                await worker.attaches("b2", LAYOUT.digest)
                await until(lambda: f"b2/{LAYOUT.digest}" in world.router.feeds)
                assert (await chosen(world, "third", blocks=12)) == Overlap(0, 0, 12)
        finally:
            engine.die()
