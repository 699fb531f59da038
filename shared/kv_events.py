"""Translates the changes and the contents of a pool of blocks into KV events and snapshots for the wire. Pure.

The engine process numbers the batches, since it owns the pool: so sequence and digest cannot disagree with it. The
shell publishes and replays them, since an engine in the middle of a long step could not answer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import assert_never

import msgspec
from msgspec import Raw, Struct

from shared.blocks import Content, ContentEvicted, ContentStored, PoolEvent
from shared.hashing import ContentKey, event_hash, event_hashes, join_extra, split_extra, unpack_tokens
from shared.messages.kv_events import BlockRemoved, BlockStored, KvEvent, SnapshotBlock, Tier

MEDIA: dict[Tier, str] = {"device": "GPU", "host": "host_pinned", "disk": "disk"}
"""vLLM's word for each tier; GPU stands for any device."""
_IMAGE_NAME = re.compile("[0-9a-f]{64}")
"""The key of an image, in hex."""
_encode = msgspec.msgpack.Encoder().encode
_BLOCK_BYTES = 40
"""The maximum size of a block in a snapshot without its tokens and names, in bytes: two hashes and msgpack's
lengths."""


def to_kv_events(events: Iterable[PoolEvent], block_size: int, tier: Tier = "device") -> list[KvEvent]:
    """Translate the changes of one tier, in order. Blocks that follow one another in a chain share an event."""
    medium = MEDIA[tier]
    batch: list[KvEvent] = []
    chain: list[Content] = []
    removed: list[ContentKey] = []

    def flush() -> None:
        if chain:
            batch.append(_stored(chain, block_size, medium))
            chain.clear()
        if removed:
            batch.append(BlockRemoved(block_hashes=[*event_hashes(removed)], medium=medium))
            removed.clear()

    for event in events:
        match event:
            case ContentStored():
                content = event.content
                if not chain or chain[-1].key != content.parent:
                    flush()
                chain.append(content)
            case ContentEvicted():
                if chain:
                    flush()
                removed.append(event.content.key)
            case _:
                assert_never(event)
    flush()
    return batch


class _EncodedBatch(Struct, frozen=True, array_like=True):
    """An EventBatch of `shared.messages.kv_events` whose events are encoded already."""

    ts: float
    events: Raw
    data_parallel_rank: int


def encode_batch(wall_s: float, events: bytes, rank: int = 0) -> bytes:
    """Encode the EventBatch of a rank around a list of events that is encoded already."""
    return _encode(_EncodedBatch(wall_s, Raw(events), rank))


def to_snapshot(contents: Iterable[Content]) -> list[SnapshotBlock]:
    """Translate contents into the blocks of a snapshot, in the same order."""
    return [
        SnapshotBlock(
            hash=event_hash(content.key),
            parent=_event_hash(content.parent),
            tokens=content.tokens,
            lora=content.lora,
            salt=content.salt,
            extra=content.extra,
        )
        for content in contents
    ]


def in_chunks(blocks: Iterable[SnapshotBlock], limit_bytes: int) -> list[list[SnapshotBlock]]:
    """Cut a snapshot into parts of at most `limit_bytes`, or one block if that is larger. There is at least one
    part."""
    chunks: list[list[SnapshotBlock]] = [[]]
    left = limit_bytes
    for block in blocks:
        named = len(block.lora.encode()) + len(block.salt.encode())
        size_bytes = len(block.tokens) + named + len(block.extra) + _BLOCK_BYTES
        if size_bytes > left and chunks[-1]:
            chunks.append([])
            left = limit_bytes
        chunks[-1].append(block)
        left -= size_bytes
    return chunks


def _stored(chain: list[Content], block_size: int, medium: str) -> BlockStored:
    first = chain[0]
    salt = first.salt if first.parent is None else ""
    return BlockStored(
        block_hashes=[*event_hashes([content.key for content in chain])],
        parent_block_hash=_event_hash(first.parent),
        token_ids=unpack_tokens(b"".join([content.tokens for content in chain])),
        block_size=block_size,
        medium=medium,
        lora_name=first.lora or None,
        extra_keys=extra_keys([content.extra for content in chain], salt),
    )


def extra_keys(extras: Sequence[bytes], salt: str) -> list[list[object] | None] | None:
    """Return the extra keys of a run's blocks in vLLM's form, from what `image_extras` says of each. `salt` is empty
    unless the run begins a chain. None if there are no keys."""
    if not salt and not any(extras):
        return None
    keys: list[list[object]] = [[[key.hex(), start] for key, start in split_extra(extra)] for extra in extras]
    if salt:
        keys[0].append(salt)
    return [one or None for one in keys]


def read_images(keys: Iterable[object]) -> bytes | None:
    """Return what a block's hash covers, if these keys are images that are named as frontends do: by 64 digits, each
    with the index of its first token. None otherwise: older vLLMs give no index, and other names may mean anything."""
    images: list[tuple[bytes, int]] = []
    for one in keys:
        match one:
            case [str(name), int(start)] if _IMAGE_NAME.fullmatch(name) and abs(start) < 1 << 31:
                images.append((bytes.fromhex(name), start))
            case _:
                return None
    return join_extra(images)


def _event_hash(key: ContentKey | None) -> int | None:
    return None if key is None else event_hash(key)
