"""Payloads of every format, and invalid ones."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from services.router.index.kv_events import (
    BATCH_LIMIT_BLOCKS,
    PAYLOAD_LIMIT_BYTES,
    ClearedEvent,
    DecodedBatch,
    RemovedEvent,
    StoredEvent,
    decode,
    shortened,
)
from shared.errors import ProtocolError
from shared.hashing import join_extra, pack_tokens
from tests.router.captured import SESSIONS, payloads

FULL: list[Any] = [
    "BlockStored",
    [7, 8],
    6,
    [1, 2, 3, 4],
    2,
    None,
    "GPU",
    None,
    [None, None],
    0,
    "full_attention",
    None,
]


def as_arrays(payload: bytes) -> bytes:
    """Return a payload of maps in the format of older engines."""
    ts, events, rank = msgspec.msgpack.decode(payload)
    keys = {
        "BlockStored": (
            "block_hashes parent_block_hash token_ids block_size lora_id medium lora_name extra_keys group_idx"
            " kv_cache_spec_kind"
        ),
        "BlockRemoved": "block_hashes medium group_idx",
        "AllBlocksCleared": "",
    }
    arrays = [[event["type"], *(event[key] for key in keys[event["type"]].split())] for event in events]
    return msgspec.msgpack.encode([ts, arrays, rank])


def stored(event: list[Any] | dict[str, Any], *tail: Any) -> StoredEvent:
    (found,) = decode(msgspec.msgpack.encode([1.5, [event], *tail])).events
    assert isinstance(found, StoredEvent)
    return found


@pytest.mark.parametrize("session", SESSIONS)
def test_captured_frames_decode_the_same_as_maps_and_as_old_arrays(session: str) -> None:
    for payload in payloads(session):
        assert decode(payload) == decode(as_arrays(payload))
        assert decode(payload).events


@pytest.mark.parametrize("length", range(5, len(FULL) + 3))
def test_old_arrays_may_have_tails_of_any_length(length: int) -> None:
    event = [*FULL, "future", 1][:length]
    found = stored(event)
    assert (found.hashes, found.parent, found.tokens, found.tier) == ([7, 8], 6, pack_tokens([1, 2, 3, 4]), 0)
    assert found.routable == 2


def test_a_batch_may_lack_a_rank_and_have_unknown_fields() -> None:
    assert decode(msgspec.msgpack.encode([1.0, []])) == DecodedBatch(1.0, 0, [], 0)
    assert decode(msgspec.msgpack.encode([1.0, [["AllBlocksCleared", 9]], 3, "future"])) == DecodedBatch(
        1.0, 3, [ClearedEvent()], 0
    )


@pytest.mark.parametrize(
    ("medium", "tier"),
    [(None, 0), ("GPU", 0), ("gpu", 0), ("cpu", 1), ("host_pinned", 1), ("CPU_TIER1", 1), ("disk", 2)],
)
def test_every_name_of_a_medium_is_mapped_to_its_tier(medium: str | None, tier: int) -> None:
    payload = msgspec.msgpack.encode([1.0, [["BlockRemoved", [b"x" * 32], medium]]])
    assert decode(payload).events == [RemovedEvent(shortened([b"x" * 8]), tier, None)]


def test_events_of_an_unknown_tier_are_ignored_and_counted() -> None:
    batch = decode(msgspec.msgpack.encode([1.0, [["BlockRemoved", [1], "tape"], ["AllBlocksCleared"]]]))
    assert batch.events == [ClearedEvent()]
    assert batch.ignored == 1


@pytest.mark.parametrize(
    ("lora", "keys", "parent", "salt", "routable"),
    [
        (None, None, None, "", 2),
        (None, [["tenant"], None], None, "tenant", 2),
        ("l", [["l"], ["l"]], None, "", 2),
        ("l", [["l", "tenant"], ["l"]], None, "tenant", 2),
        ("l", None, 5, "", 2),
        (None, [None, ["image-hash"]], None, "", 1),
        (None, [[["image-hash", 3], "tenant"], None], None, "tenant", 0),
        (None, [["image-hash"], None], 5, "", 0),
    ],
)
def test_extra_keys_give_the_salt_and_the_first_block_that_is_not_routable(
    lora: str | None, keys: list[Any] | None, parent: int | None, salt: str, routable: int
) -> None:
    found = stored(["BlockStored", [7, 8], parent, [1, 2, 3, 4], 2, None, "GPU", lora, keys])
    assert (found.lora, found.salt, found.routable) == (lora or "", salt, routable)


A, B = b"\xaa" * 32, b"\xbb" * 32


@pytest.mark.parametrize(
    ("lora", "keys", "salt", "routable", "extras"),
    [
        (None, [None, [(A.hex(), 1)]], "", 2, {1: [(A, 1)]}),
        ("l", [["l", (A.hex(), -3), (B.hex(), 1), "tenant"], ["l"]], "tenant", 2, {0: [(A, -3), (B, 1)]}),
        (None, [[(A.hex(), 0)], [(A.hex(), -2), (b"embedding",)]], "", 1, {0: [(A, 0)]}),
        (None, [[(A.hex().upper(), 0)], None], "", 0, {}),
        (None, [[(A.hex(), 1 << 31)], None], "", 0, {}),
        (None, [[(A.hex(), 0.5)], None], "", 0, {}),
        (None, [[(A.hex(),)], None], "", 0, {}),
        (None, [["words", A.hex()], [A.hex()]], A.hex(), 0, {}),
    ],
)
def test_images_that_are_named_by_their_keys_are_routable(
    lora: str | None, keys: list[Any], salt: str, routable: int, extras: dict[int, list[tuple[bytes, int]]]
) -> None:
    found = stored(["BlockStored", [7, 8], None, [1, 2, 3, 4], 2, None, "GPU", lora, keys])
    assert (found.salt, found.routable) == (salt, routable)
    assert found.extras == {number: join_extra(images) for number, images in extras.items()}


def test_a_lora_without_a_name_is_not_routable() -> None:
    assert stored(["BlockStored", [7], None, [1, 2], 2, 4]).routable == 0


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [-7, 8], None, [1, 2, 3, 4], 2, None, "CPU_PINNED", {"cache_salt": "tenant"}],
        {
            "type": "BlockStored",
            "block_hashes": [-7, 8],
            "parent_block_hash": None,
            "token_ids": [1, 2, 3, 4],
            "block_size": 2,
            "lora_id": None,
            "medium": "CPU_PINNED",
            "cache_salt": "tenant",
            "session_id": "s",
        },
    ],
)
def test_the_salt_of_sglangs_events_is_read(event: Any) -> None:
    found = stored(event, 1)
    assert (found.hashes, found.tier, found.lora, found.salt, found.routable) == ([2**60 - 7, 8], 1, "", "tenant", 2)


def test_sglangs_shortest_arrays_are_read() -> None:
    found = stored(["BlockStored", [5740354900026072187], -3, [1, 2], 2, None])
    assert (found.hashes, found.parent, found.tier, found.salt) == ([5740354900026072187 % 2**60], 2**60 - 3, 0, "")
    assert decode(msgspec.msgpack.encode([1.0, [["BlockRemoved", [-3]]]])).events == [
        RemovedEvent([2**60 - 3], 0, None)
    ]


def test_a_batch_of_more_blocks_or_bytes_than_the_limit_is_refused() -> None:
    def removed(blocks: int) -> bytes:
        half = blocks // 2
        return msgspec.msgpack.encode([1.0, [["BlockRemoved", [7] * half], ["BlockRemoved", [7] * (blocks - half)]]])

    assert len(decode(removed(BATCH_LIMIT_BLOCKS)).events) == 2
    with pytest.raises(ProtocolError, match="more than 65536 blocks"):
        decode(removed(BATCH_LIMIT_BLOCKS + 1))
    with pytest.raises(ProtocolError, match="bytes"):
        decode(bytes(PAYLOAD_LIMIT_BYTES + 1))


@pytest.mark.parametrize("event", [["AllBlocksCleared"], ["BlockRemoved", []], ["BlockStored", [], None, [], 16]])
def test_events_without_blocks_count_too(event: list[Any]) -> None:
    assert len(decode(msgspec.msgpack.encode([1.0, [event] * BATCH_LIMIT_BLOCKS])).events) == BATCH_LIMIT_BLOCKS
    with pytest.raises(ProtocolError, match="more than 65536 blocks"):
        decode(msgspec.msgpack.encode([1.0, [event] * (BATCH_LIMIT_BLOCKS + 1)]))


def test_a_sliding_window_cache_is_marked() -> None:
    assert stored([*FULL[:10], "sliding_window"]).windowed
    assert not stored([*FULL[:10], "mla_attention"]).windowed


@pytest.mark.parametrize(
    "event",
    [
        ["BlockStored", [7], None, [1, 2, 3], 2],
        ["BlockStored", [7], None, [1, 2], 0],
        ["BlockStored", [7], None, [1, 2], -2],
        ["BlockStored", [7], None, [1, -2], 2],
        ["BlockStored", [7], None, [1, 1 << 32], 2],
        ["BlockStored", ["seven"], None, [1, 2], 2],
        ["BlockStored", [1.5], None, [1, 2], 2],
        ["BlockStored", [True], None, [1, 2], 2],
        ["BlockStored", [7], "parent", [1, 2], 2],
        ["BlockStored", [7], None, [1, 2], 1 << 63],
        ["BlockStored", [7], None, [(1, 2), (2, 3)], 2],
        ["BlockStored", [7], None, [1, 2], 2, None, "GPU", ["tenant"]],
        ["BlockStored", [7], None, [[1, 2]], 2],
        ["BlockStored", 7, None, [1, 2], 2],
        ["BlockStored", [7]],
        ["BlockStored", [bytes(65)], None, [1, 2], 2],
        ["BlockStored", [7], bytes(65), [1, 2], 2],
        ["BlockRemoved", [bytes(65)]],
        {"type": "BlockRemoved", "block_hashes": [bytes(65)]},
        ["BlockRemoved", [None]],
        ["Unheard"],
        {"type": "BlockStored", "block_hashes": [1]},
        {"block_hashes": [1]},
        17,
    ],
)
def test_wrong_types_and_counts_are_a_protocol_error(event: Any) -> None:
    with pytest.raises(ProtocolError):
        decode(msgspec.msgpack.encode([1.0, [event]]))


@pytest.mark.parametrize(
    "payload", [b"", b"\xc1", b"\x93", msgspec.msgpack.encode({}), msgspec.msgpack.encode([1.0, [], -1])]
)
def test_a_payload_that_is_not_a_batch_is_a_protocol_error(payload: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(payload)


def test_deeply_nested_keys_are_a_protocol_error() -> None:
    batch = msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, [1, 2], 2, None, "GPU", None, [[None]]]]])
    assert batch.endswith(b"\x91\x91\xc0")
    with pytest.raises(ProtocolError):
        decode(batch[:-1] + b"\x91" * 10_000 + b"\xc0")


@pytest.mark.parametrize("session", SESSIONS)
def test_a_torn_frame_is_a_protocol_error(session: str) -> None:
    payload = payloads(session)[0]
    for length in range(0, len(payload), 7):
        with pytest.raises(ProtocolError):
            decode(payload[:length])


@given(st.binary(max_size=60))
@example(
    msgspec.msgpack.encode(
        [1.0, [["BlockStored", [1], None, [1], 1, None, "GPU", "\ud800".encode("utf-8", "replace").decode()]]]
    )
)
def test_any_bytes_decode_or_raise_a_protocol_error(payload: bytes) -> None:
    try:
        decode(payload)
    except ProtocolError:
        return
