"""What a cache holds: vLLM's KV events, and snapshots of every cached block, to rebuild an index. Pure.

A message on ZMQ is [topic][sequence, 8 bytes big-endian][EventBatch], in vLLM's format (0.32: maps). On NATS it is the
sequence and the EventBatch in one payload.
"""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.messages.codec import Codec

Tier = Literal["device", "host", "disk"]


class SnapshotRequest(Struct, frozen=True, tag="snapshot"):
    """Ask a worker or a kvbm for everything that its prefix cache holds."""

    rank: int = 0
    layout: str = ""
    """The digest of the layout, if a kvbm is asked; empty for a worker."""


class SnapshotBlock(Struct, frozen=True, array_like=True):
    """One cached block. Parents come before their children."""

    hash: int
    parent: int | None
    tokens: bytes
    lora: str = ""
    salt: str = ""
    extra: bytes = b""
    """What the block's hashes cover next to its tokens, because images have tokens in it, as `image_extras` of
    `shared.hashing` has it. Empty if none have."""


class SnapshotChunk(Struct, frozen=True):
    """A part of a snapshot. All its chunks have the sequence at which it was taken."""

    epoch: int
    sequence: int
    blocks: list[SnapshotBlock]
    last: bool
    tier: Tier = "device"
    """The tier of these blocks; a kvbm's snapshot has chunks of host and of disk."""


EventHash = int | Annotated[bytes, Meta(max_length=64)]
"""An engine's own name for a block, at most 64 bytes, so that a reader that stores names can bound them. The longest in
use is a SHA-256."""


class BlockStored(Struct, frozen=True, tag_field="type", tag="BlockStored"):
    """Blocks became reusable, in this order; the first one follows `parent_block_hash`."""

    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    """The tier: GPU for the device, host_pinned and disk for those below it."""
    lora_name: str | None = None
    extra_keys: list[list[object] | None] | None = None
    """The extra keys of each block: for each image that has tokens in it [the image's key in hex, the index of its
    first token within the block], and last, in a chain's first block, the tenant salt."""
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(Struct, frozen=True, tag_field="type", tag="BlockRemoved"):
    """Blocks are no longer reusable."""

    block_hashes: list[EventHash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(Struct, frozen=True, tag_field="type", tag="AllBlocksCleared"):
    """The whole cache was dropped."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(Struct, frozen=True, array_like=True):
    """One payload of the event stream."""

    ts: float
    events: list[KvEvent]
    data_parallel_rank: int | None = None


class ReplayRequest(Struct, frozen=True, tag="replay"):
    """Ask a source whose events are on NATS for the batches that it still has."""

    first: int
    """The sequence of the first batch that is wanted."""


class ReplayPage(Struct, frozen=True):
    """The first of these batches, in order. The asker goes on after them."""

    batches: list[tuple[int, bytes]]
    """Sequences and encoded batches."""
    last: bool
    """Whether the source has no later ones."""


SNAPSHOT_REQUEST: Codec[SnapshotRequest] = Codec(SnapshotRequest, "snapshot request")
SNAPSHOT_CHUNK: Codec[SnapshotChunk] = Codec(SnapshotChunk, "snapshot chunk")
EVENT_BATCH: Codec[EventBatch] = Codec(EventBatch, "event batch")
REPLAY_REQUEST: Codec[ReplayRequest] = Codec(ReplayRequest, "replay request")
REPLAY_PAGE: Codec[ReplayPage] = Codec(ReplayPage, "page of a replay")
