from __future__ import annotations

import pytest
from msgspec.structs import replace

from shared.blocks import Content, ContentEvicted, ContentStored
from shared.hashing import content_keys, event_hash, join_extra, pack_tokens, root_key, split_extra
from shared.kv_events import in_chunks, to_kv_events, to_snapshot
from shared.messages.kv_events import SNAPSHOT_CHUNK, BlockRemoved, BlockStored, SnapshotChunk

IMAGES = [(b"a" * 32, -1), (b"b" * 32, 1)]


def contents(tokens: list[int], *, salt: str = "", lora: str = "") -> list[Content]:
    packed = pack_tokens(tokens)
    keys = content_keys(root_key("model", lora, salt), packed, 2)
    return [
        Content(
            key=key,
            parent=keys[index - 1] if index else None,
            tokens=packed[8 * index : 8 * index + 8],
            lora=lora,
            salt=salt,
        )
        for index, key in enumerate(keys)
    ]


def test_blocks_of_one_chain_share_an_event() -> None:
    chain = contents([1, 2, 3, 4, 5, 6])
    (event,) = to_kv_events([ContentStored(content) for content in chain], 2)
    assert event == BlockStored(
        block_hashes=[event_hash(content.key) for content in chain],
        parent_block_hash=None,
        token_ids=[1, 2, 3, 4, 5, 6],
        block_size=2,
        medium="GPU",
    )


def test_a_later_block_names_its_parent() -> None:
    chain = contents([1, 2, 3, 4])
    (event,) = to_kv_events([ContentStored(chain[1])], 2)
    assert isinstance(event, BlockStored)
    assert event.parent_block_hash == event_hash(chain[0].key)


def test_order_is_kept_and_neighbours_are_joined() -> None:
    one, other = contents([1, 2, 3, 4]), contents([5, 6])
    events = to_kv_events(
        [
            ContentEvicted(one[1]),
            ContentEvicted(one[0]),
            ContentStored(other[0]),
            ContentStored(one[0]),
            ContentEvicted(other[0]),
        ],
        2,
    )
    assert events == [
        BlockRemoved(block_hashes=[event_hash(one[1].key), event_hash(one[0].key)], medium="GPU"),
        BlockStored([event_hash(other[0].key)], None, [5, 6], 2, medium="GPU"),
        BlockStored([event_hash(one[0].key)], None, [1, 2], 2, medium="GPU"),
        BlockRemoved(block_hashes=[event_hash(other[0].key)], medium="GPU"),
    ]


def test_a_salt_stands_at_the_first_block_of_a_chain_and_a_lora_in_its_field() -> None:
    chain = contents([1, 2, 3, 4], salt="tenant", lora="adapter")
    (event,) = to_kv_events([ContentStored(content) for content in chain], 2)
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [["tenant"], None]
    assert event.lora_name == "adapter"


def test_images_stand_at_their_blocks_before_the_salt() -> None:
    first, second, third = contents([1, 2, 3, 4, 5, 6], salt="tenant")
    chain = [replace(first, extra=join_extra([(b"a" * 32, 1)])), replace(second, extra=join_extra(IMAGES)), third]
    (event,) = to_kv_events([ContentStored(content) for content in chain], 2)
    assert isinstance(event, BlockStored)
    assert event.extra_keys == [[["61" * 32, 1], "tenant"], [["61" * 32, -1], ["62" * 32, 1]], None]
    assert [split_extra(block.extra) for block in to_snapshot(chain)] == [[(b"a" * 32, 1)], IMAGES, []]
    with pytest.raises(ValueError, match="37 bytes"):
        split_extra(bytes(37))


def test_nothing_happened_is_no_event() -> None:
    assert to_kv_events([], 2) == []


def test_a_snapshot_has_hashes_parents_and_tokens() -> None:
    first, second = to_snapshot(contents([1, 2, 3, 4], salt="tenant"))
    assert (first.parent, second.parent) == (None, first.hash)
    assert (first.tokens, second.tokens) == (pack_tokens([1, 2]), pack_tokens([3, 4]))
    assert first.salt == "tenant"


def test_a_snapshots_chunks_keep_its_order_and_stay_within_the_limit() -> None:
    chain = contents(list(range(200)), salt="é" * 50, lora="adapter")
    blocks = to_snapshot([replace(content, extra=join_extra(IMAGES)) for content in chain])
    chunks = in_chunks(blocks, 1000)
    assert [block for chunk in chunks for block in chunk] == blocks
    envelope = len(SNAPSHOT_CHUNK.encode(SnapshotChunk(1, 1, [], False)))
    for chunk in chunks:
        assert len(SNAPSHOT_CHUNK.encode(SnapshotChunk(1, 1, chunk, False))) <= 1000 + envelope
    assert len(chunks) < len(blocks) / 3


def test_a_block_over_the_limit_is_a_chunk_of_its_own_and_nothing_is_one_chunk() -> None:
    blocks = to_snapshot(contents([1, 2, 3, 4, 5, 6]))
    assert in_chunks(blocks, 1) == [[block] for block in blocks]
    assert in_chunks([], 1) == [[]]


def test_a_lower_tiers_events_name_it() -> None:
    one = Content(key=bytes(16), parent=None, tokens=pack_tokens([1, 2]))
    stored, removed = to_kv_events([ContentStored(one), ContentEvicted(one)], 2, "host")
    assert (stored, removed) == (
        BlockStored([event_hash(one.key)], None, [1, 2], 2, medium="host_pinned"),
        BlockRemoved([event_hash(one.key)], medium="host_pinned"),
    )
