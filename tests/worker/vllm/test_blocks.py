"""The blocks of a vLLM engine, from events that a real one published, and from events that are drawn."""

from __future__ import annotations

from functools import reduce
from operator import xor

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.router.index.kv_events import StoredEvent, decode
from services.worker.vllm.blocks import EngineBlocks
from shared.hashing import image_extras, pack_tokens
from shared.messages.kv_events import EVENT_BATCH, AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent
from tests.router.captured import BLOCK_SIZE, SESSIONS, payloads, requests


def published_set(events: list[KvEvent], held: set[int]) -> None:
    """Apply published events to a set of hashes, as a router does; each must change it."""
    for event in events:
        match event:
            case BlockStored():
                names = {name for name in event.block_hashes if isinstance(name, int)}
                assert len(names) == len(event.block_hashes)
                assert not names & held
                held |= names
            case BlockRemoved():
                assert held.issuperset(event.block_hashes)
                held.difference_update(name for name in event.block_hashes if isinstance(name, int))
            case AllBlocksCleared():
                assert held
                held.clear()


@pytest.mark.parametrize("session", SESSIONS)
def test_what_a_real_engine_published(session: str) -> None:
    blocks, held = EngineBlocks(BLOCK_SIZE), set[int]()
    decoder = msgspec.msgpack.Decoder(EventBatch)
    for payload in payloads(session):
        published_set(blocks.apply(decoder.decode(payload).events), held)
        blocks.validate()
        assert {block.hash for block in blocks.snapshot()} == held
        assert blocks.digest == reduce(xor, held, 0)
    assert blocks.left_out == 0


@pytest.mark.parametrize("session", SESSIONS)
def test_salts_and_loras_of_a_real_engine_are_those_of_its_requests(session: str) -> None:
    blocks, seen = EngineBlocks(BLOCK_SIZE), set[tuple[str, str]]()
    decoder = msgspec.msgpack.Decoder(EventBatch)
    for payload in payloads(session):
        blocks.apply(decoder.decode(payload).events)
        seen |= {(block.lora, block.salt) for block in blocks.snapshot() if block.parent is None}
    asked = {(request.lora, request.salt) for request in requests(session) if len(request.tokens) >= BLOCK_SIZE}
    assert seen <= asked
    assert {lora for lora, _ in seen} == {lora for lora, _ in asked}


def stored(*names: int | bytes, parent: int | None = None, **fields: object) -> BlockStored:
    tokens = list(range(4 * len(names)))
    given = {"block_size": 4, "medium": "GPU", "group_idx": 0, "kv_cache_spec_kind": "full_attention"} | fields
    return BlockStored(list(names), parent, tokens, **given)  # type: ignore[arg-type]


def removed(*names: int | bytes, **fields: object) -> BlockRemoved:
    return BlockRemoved(list(names), **({"medium": "GPU", "group_idx": 0} | fields))  # type: ignore[arg-type]


def test_a_block_that_is_stored_twice_stays_until_it_is_removed_twice() -> None:
    blocks = EngineBlocks(4)
    assert len(blocks.apply([stored(1, 2)])) == 1
    assert blocks.apply([stored(1)]) == []
    assert blocks.apply([removed(1)]) == []
    assert blocks.apply([removed(1)]) == [BlockRemoved([1], "GPU")]
    assert blocks.digest == 2


def test_what_is_known_of_a_block_is_where_it_is_and_what_the_events_said() -> None:
    blocks = EngineBlocks(4)
    blocks.notes.now_s = 5.0
    blocks.apply([stored(7)])
    name = (7).to_bytes(8, "big")
    explained = blocks.explain(16 * b"x" + name, 3, 6.0)
    assert explained.ticket == 3
    assert explained.places[0].startswith("in vLLM's cache, 1 times")
    assert [(note.age_s, note.text) for note in explained.notes] == [(1.0, "stored by vLLM")]
    blocks.apply([removed(7)])
    blocks.apply([stored(8), AllBlocksCleared()])
    explained = blocks.explain(name, 4, 6.0)
    assert explained.places[0].startswith("not in vLLM's cache")
    assert [note.text.partition(",")[0] for note in explained.notes] == [
        "stored by vLLM",
        "removed by vLLM",
        "forgotten with all other blocks: vLLM's cache was cleared",
    ]


def test_the_known_part_of_a_chain_is_not_published_again() -> None:
    blocks = EngineBlocks(4)
    blocks.apply([stored(1, 2)])
    (event,) = blocks.apply([stored(1, 2, 3)])
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash, event.token_ids) == ([3], 2, [8, 9, 10, 11])


@pytest.mark.parametrize(
    "event",
    [
        stored(1, medium="CPU"),
        stored(1, kv_cache_spec_kind="sliding_window"),
        stored(1, kv_cache_spec_kind="mamba"),
        stored(1, block_size=8),
        stored(1, extra_keys=[["image", 3]]),
        stored(1, lora_id=3),
    ],
)
def test_blocks_that_tokens_alone_do_not_decide_are_left_out(event: BlockStored) -> None:
    blocks = EngineBlocks(4)
    assert blocks.apply([event]) == []
    assert blocks.apply([removed(1)]) == []
    assert (len(blocks), blocks.left_out) == (0, 1)


def test_a_second_group_of_layers_is_not_counted() -> None:
    blocks = EngineBlocks(4)
    blocks.apply([stored(1), stored(1, group_idx=1)])
    assert blocks.apply([removed(1, group_idx=1)]) == []
    assert blocks.digest == 1


def test_salt_and_lora_are_published_as_workers_do() -> None:
    blocks = EngineBlocks(4)
    (event,) = blocks.apply([stored(1, 2, lora_id=1, lora_name="a", extra_keys=[["a", "salt"], ["a"]])])
    assert isinstance(event, BlockStored)
    assert (event.lora_name, event.extra_keys) == ("a", [["salt"], None])
    assert [(block.lora, block.salt, block.tokens) for block in blocks.snapshot()] == [
        ("a", "salt", pack_tokens([0, 1, 2, 3])),
        ("a", "salt", pack_tokens([4, 5, 6, 7])),
    ]


def test_images_are_published_as_workers_do_and_told_apart_by_their_keys() -> None:
    blocks, one, two = EngineBlocks(4), 32 * b"\x01", 32 * b"\x02"
    keys: list[list[object]] = [
        ["a", [one.hex(), 1], "salt"],
        ["a", [one.hex(), -3], [two.hex(), 2]],
        ["a", [two.hex(), -2]],
        ["a"],
    ]
    (event,) = blocks.apply([stored(1, 2, 3, 4, lora_id=1, lora_name="a", extra_keys=keys)])
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [
        [[one.hex(), 1], "salt"],
        [[one.hex(), -3], [two.hex(), 2]],
        [[two.hex(), -2]],
        None,
    ]
    extras = image_extras([(one, 1, 4), (two, 6, 4)], 4)
    assert {at: block.extra for at, block in enumerate(blocks.snapshot()) if block.extra} == extras
    (read,) = decode(EVENT_BATCH.encode(EventBatch(0.0, [event]))).events
    assert isinstance(read, StoredEvent)
    assert (read.extras, read.routable, read.salt, read.lora) == (extras, 4, "salt", "a")
    (event,) = blocks.apply([stored(5, 6, parent=4, extra_keys=[[[two.hex(), 0]], [["an image", 0]]])])
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.extra_keys, blocks.left_out) == ([5], [[[two.hex(), 0]]], 1)


def test_a_salt_may_be_the_word_that_names_the_lora() -> None:
    blocks = EngineBlocks(4)
    blocks.apply([stored(1, lora_id=1, lora_name="a", extra_keys=[["a", "a"]])])
    assert [(block.lora, block.salt) for block in blocks.snapshot()] == [("a", "a")]


def test_a_hash_of_bytes_is_its_last_64_bits() -> None:
    blocks = EngineBlocks(4)
    blocks.apply([stored((1 << 200 | 7).to_bytes(32, "big"))])
    assert blocks.digest == 7


_NAMES = st.integers(1, 6)
_EVENTS = st.one_of(
    st.lists(_NAMES, min_size=1, max_size=4, unique=True).map(lambda names: stored(*names)),
    st.tuples(_NAMES, st.integers(1, 6)).map(lambda pair: stored(pair[0], parent=pair[1])),
    _NAMES.map(removed),
    st.just(AllBlocksCleared()),
)


@given(st.lists(_EVENTS, max_size=40))
def test_published_events_and_snapshot_agree(events: list[KvEvent]) -> None:
    blocks, held, copies = EngineBlocks(4), set[int](), dict[int, int]()
    for event in events:
        published_set(blocks.apply([event]), held)
        match event:
            case BlockStored():
                for name in event.block_hashes:
                    assert isinstance(name, int)
                    copies[name] = copies.get(name, 0) + 1
            case BlockRemoved(names):
                for name in names:
                    assert isinstance(name, int)
                    copies[name] = max(0, copies.get(name, 0) - 1)
            case AllBlocksCleared():
                copies.clear()
        blocks.validate()
        assert {name for name, count in copies.items() if count} == held
        assert {block.hash for block in blocks.snapshot()} == held
        assert len(blocks) == len(held)


def test_a_cycle_of_parents_does_not_hang_the_snapshot() -> None:
    blocks = EngineBlocks(4)
    blocks.apply([stored(1, parent=2), stored(2, parent=1)])
    assert {block.hash for block in blocks.snapshot()} == {1, 2}


def test_blocks_after_an_unknown_one_are_left_out_where_events_may_have_been_missed() -> None:
    blocks, tokens = EngineBlocks(2, orphans=False), [1, 2]
    lost = BlockStored([7, 8], 6, [*tokens, *tokens], 2, medium="GPU")
    assert blocks.apply([lost, BlockStored([9], 8, tokens, 2, medium="GPU")]) == []
    assert (blocks.left_out, blocks.digest, len(blocks)) == (3, 0, 0)
    root = BlockStored([1], None, tokens, 2, medium="GPU")
    assert len(blocks.apply([root, BlockStored([2], 1, tokens, 2, medium="GPU")])) == 2
    assert blocks.apply([BlockRemoved([7], medium="GPU")]) == []
    blocks.validate()


def test_blocks_whose_hashes_cover_the_tokens_after_them_are_told_apart_by_vllm_and_held_by_their_own() -> None:
    """vLLM 0.33 with an EAGLE or MTP drafter, and without a connector: two prompts differ after their first block."""
    fields = {"parent_block_hash": None, "token_ids": [7, 8], "block_size": 2, "medium": "GPU"}
    stored = [
        {"type": "BlockStored", "block_hashes": [name], "lookahead_token_ids": [[after]], **fields}
        for name, after in ((1, 9), (2, 10))
    ]
    blocks = EngineBlocks(2)
    batch = msgspec.msgpack.decode(msgspec.msgpack.encode([0.0, stored, 0]), type=EventBatch)
    assert len(blocks.apply(batch.events)) == 2
    assert [block.tokens for block in blocks.snapshot()] == [pack_tokens([7, 8])] * 2
    assert blocks.apply([BlockRemoved(block_hashes=[1])]) == [BlockRemoved(block_hashes=[1], medium="GPU")]
    assert [block.hash for block in blocks.snapshot()] == [2]
    blocks.validate()
