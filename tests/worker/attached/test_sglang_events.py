"""SGLang's KV events, as its own publisher encodes them, decoded by ours.

The Structs below have the fields and options of `sglang/srt/disaggregation/kv_events.py` of the wheel sglang 0.5.23,
which cannot be imported without a GPU's packages; its server was not run.
"""

from __future__ import annotations

import enum
from typing import Any

import msgspec
import pytest

from services.worker.attached.sglang_events import read_batch
from services.worker.vllm.blocks import EngineBlocks
from shared.hashing import pack_tokens
from shared.messages.kv_events import AllBlocksCleared as OurCleared
from shared.messages.kv_events import BlockRemoved as OurRemoved
from shared.messages.kv_events import BlockStored as OurStored


class StorageMedium(enum.StrEnum):
    GPU = "GPU"
    CPU = "CPU_PINNED"


class KVEventBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class KVCacheEvent(msgspec.Struct, omit_defaults=True, gc=False, tag=True):
    pass


class BlockStored(KVCacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(KVCacheEvent):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(KVCacheEvent):
    pass


FIRST, SECOND, SALTED, FOLLOWING = -(1 << 62), 77, -5, -6
"""SGLang's hashes are signed 64-bit integers."""


def batch(*events: KVCacheEvent, rank: int | None = 0) -> bytes:
    return msgspec.msgpack.encode(KVEventBatch(1.5, list(events), rank))


def stored(name: int, parent: int | None, token: int, **fields: object) -> BlockStored:
    given: dict[str, Any] = {"medium": StorageMedium.GPU} | fields
    return BlockStored([name], parent, [token] * 4, 4, None, **given)


def blocks_after(*payloads: bytes) -> EngineBlocks:
    blocks = EngineBlocks(4, orphans=False, engine="sglang")
    for payload in payloads:
        blocks.apply(read_batch(payload))
    blocks.validate()
    return blocks


def test_events_become_those_of_vllm() -> None:
    payload = batch(
        stored(FIRST, None, 5, session_id="s"), BlockRemoved([FIRST], StorageMedium.GPU), AllBlocksCleared()
    )
    first, removed, cleared = read_batch(payload)
    assert isinstance(first, OurStored)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids) == ([FIRST], None, [5] * 4)
    assert (first.block_size, first.medium, first.extra_keys) == (4, "GPU", None)
    assert removed == OurRemoved([FIRST], "GPU")
    assert cleared == OurCleared()


def test_a_chain_is_held_until_its_blocks_are_removed_from_the_gpu() -> None:
    lower = BlockStored([FIRST], None, [5] * 4, 4, None, medium=StorageMedium.CPU)
    payload = batch(lower, stored(FIRST, None, 5), stored(SECOND, FIRST, 6), BlockRemoved([FIRST], StorageMedium.CPU))
    blocks = blocks_after(payload)
    first, second = blocks.snapshot()
    assert (first.hash, first.tokens) == (FIRST % (1 << 64), pack_tokens([5] * 4))
    assert (second.hash, second.parent) == (SECOND, FIRST % (1 << 64))
    blocks.apply(read_batch(batch(BlockRemoved([SECOND, FIRST], StorageMedium.GPU))))
    assert len(blocks) == 0


def test_a_salt_is_that_of_its_chain() -> None:
    blocks = blocks_after(
        batch(
            stored(SALTED, None, 5, cache_salt="alice"),
            stored(FOLLOWING, SALTED, 6, cache_salt="alice"),
            stored(FIRST, None, 5),
        )
    )
    salts = {block.hash: block.salt for block in blocks.snapshot() if block.parent is None}
    assert salts == {SALTED % (1 << 64): "alice", FIRST % (1 << 64): ""}
    assert len(blocks) == 3
    (salted,) = read_batch(batch(stored(SALTED, None, 5, cache_salt="poet", lora_name="poet")))
    assert isinstance(salted, OurStored)
    assert salted.extra_keys == [["poet", "poet"]]


def test_blocks_of_another_page_size_are_left_out() -> None:
    page_of_one = BlockStored([FIRST], None, [5], 1, None, medium=StorageMedium.GPU)
    blocks = blocks_after(batch(page_of_one))
    assert (len(blocks), blocks.left_out) == (0, 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        msgspec.msgpack.encode([0.0, [["BlockRemoved", [1]]]]),  # arrays, as before the maps
        batch(BlockStored([FIRST], None, [(5, 6)] * 4, 4, None)),  # pairs of tokens, of speculative decoding
    ],
)
def test_batches_of_another_form_are_refused(payload: bytes) -> None:
    with pytest.raises(msgspec.MsgspecError):
        read_batch(payload)
