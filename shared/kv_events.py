"""What changed in a pool of blocks, as KV events and snapshots in the form that crosses the wire. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

import msgspec
from msgspec import Raw, Struct

from shared.blocks import Content, Evicted, PoolEvent, Stored
from shared.hashing import ContentKey, event_hash, unpack_tokens
from shared.messages import BlockRemoved, BlockStored, KvEvent, SnapshotBlock, Tier

MEDIA: dict[Tier, str] = {"device": "GPU", "host": "host_pinned", "disk": "disk"}
"""vLLM's words for the tiers; the first one's whatever the device is."""
_encode = msgspec.msgpack.Encoder().encode
_BLOCK_BYTES = 40
"""What a block of a snapshot takes at most beside its tokens and names: two hashes and msgpack's lengths."""


def to_kv_events(events: Iterable[PoolEvent], block_size: int, tier: Tier = "device") -> list[KvEvent]:
    """The same changes of one tier in the same order; blocks that follow one another in a chain share an event."""
    medium = MEDIA[tier]
    batch: list[KvEvent] = []
    chain: list[Content] = []
    removed: list[int | bytes] = []

    def flush() -> None:
        if chain:
            batch.append(_stored(chain, block_size, medium))
            chain.clear()
        if removed:
            batch.append(BlockRemoved(block_hashes=list(removed), medium=medium))
            removed.clear()

    for event in events:
        match event:
            case Stored():
                content = event.content
                if not chain or chain[-1].key != content.parent:
                    flush()
                chain.append(content)
            case Evicted():
                if chain:
                    flush()
                removed.append(event_hash(event.content.key))
            case _:
                assert_never(event)
    flush()
    return batch


class _EncodedBatch(Struct, frozen=True, array_like=True):
    """A `shared.messages.EventBatch` whose events are encoded already."""

    ts: float
    events: Raw
    data_parallel_rank: int


def encode_batch(wall_s: float, events: bytes) -> bytes:
    """The EventBatch of a list of events that is encoded already, rank 0's."""
    return _encode(_EncodedBatch(wall_s, Raw(events), 0))


def to_snapshot(contents: Iterable[Content]) -> list[SnapshotBlock]:
    """Blocks as a snapshot has them, order kept."""
    return [
        SnapshotBlock(
            hash=event_hash(content.key),
            parent=_event_hash(content.parent),
            tokens=content.tokens,
            lora=content.lora,
            salt=content.salt,
        )
        for content in contents
    ]


def in_chunks(blocks: Iterable[SnapshotBlock], limit_bytes: int) -> list[list[SnapshotBlock]]:
    """A snapshot in order, in parts of at most `limit_bytes` or one block; at least one part, though it be empty."""
    chunks: list[list[SnapshotBlock]] = [[]]
    left = limit_bytes
    for block in blocks:
        size_bytes = len(block.tokens) + len(block.lora.encode()) + len(block.salt.encode()) + _BLOCK_BYTES
        if size_bytes > left and chunks[-1]:
            chunks.append([])
            left = limit_bytes
        chunks[-1].append(block)
        left -= size_bytes
    return chunks


def _stored(chain: list[Content], block_size: int, medium: str) -> BlockStored:
    first = chain[0]
    salted = first.parent is None and first.salt
    return BlockStored(
        block_hashes=[event_hash(content.key) for content in chain],
        parent_block_hash=_event_hash(first.parent),
        token_ids=unpack_tokens(b"".join(content.tokens for content in chain)),
        block_size=block_size,
        medium=medium,
        lora_name=first.lora or None,
        extra_keys=[[first.salt], *([None] * (len(chain) - 1))] if salted else None,
    )


def _event_hash(key: ContentKey | None) -> int | None:
    return None if key is None else event_hash(key)
