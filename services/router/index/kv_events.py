"""Decodes payloads of the KV event stream, in every format that engines have used, into one set of Structs. Pure.

    vLLM from 0.32     [ts, [{type: BlockStored, block_hashes: …, …}, …], rank]     maps
    before             [ts, [["BlockStored", hashes, parent, tokens, …], …]]        arrays, tails of any length
    SGLang             both, by version; a salt is a field of its own: `cache_salt` in maps, in arrays a map
                       {cache_salt: …} where vLLM has the LoRA's name; hashes may be negative

Typed decoders read each payload once. This module checks its size, its types, the number of tokens and their range.
Checks that need the model card (block size, vocabulary) are in `services.router.index.chains`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct

from shared.errors import ProtocolError
from shared.hashing import NO_EXTRAS, pack_tokens
from shared.kv_events import read_images
from shared.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventHash

EngineHash = int
"""The low 60 bits of the engine's own hash of a block. They are opaque, and only compared for equality."""
ENGINE_HASH_BITS = (1 << 60) - 1
"""CPython stores an int of at most 60 bits in 32 bytes, a longer one in 48, and 32 bytes in 80. A router keeps one for
each pair of a block and a worker."""

PAYLOAD_LIMIT_BYTES = 8 << 20
BATCH_LIMIT_BLOCKS = 65_536
"""Most blocks in all events of a batch; each event counts as at least one. A larger batch is refused: no engine step
produces it, and it would block the loop."""

_TIERS = {
    0: ("gpu", "device", "cuda", "hbm"),
    1: ("cpu", "host", "host_pinned", "cpu_pinned", "cpu_tier1", "dram"),
    2: ("disk", "ssd", "nvme", "cpu_tier2"),
}
_MEDIA = {medium: tier for tier, media in _TIERS.items() for medium in media}

_WINDOWED = ("sliding_window", "chunked_local_attention", "mamba", "linear_attention", "short_conv")
"""Kinds of KV cache that keep only the end of a prefix, or a state. Their events do not say how much of a prefix is
reusable."""


class StoredEvent(Struct, frozen=True):
    """A run of blocks after `parent`, each of `block_size` tokens."""

    hashes: list[EngineHash]
    parent: EngineHash | None
    tokens: bytes
    """Token ids, packed as u32."""
    block_size: int
    tier: int
    group: int | None
    windowed: bool
    """Whether the group's kind of cache does not keep whole prefixes."""
    lora: str
    salt: str
    """The salt of the chain; known only if the run begins the chain."""
    routable: int
    """Number of leading blocks that depend on their tokens, images, LoRA and salt alone. The other blocks also contain
    embeddings, or images that are named in another way than frontends do, which routing hashes do not cover."""
    extras: Mapping[int, bytes] = NO_EXTRAS
    """What the hashes of routable blocks cover next to their tokens, as `image_extras` has it, by the block's number
    in the run."""


class RemovedEvent(Struct, frozen=True):
    """Blocks were removed from a tier."""

    hashes: list[EngineHash]
    tier: int
    group: int | None


class ClearedEvent(Struct, frozen=True):
    """All blocks of all tiers were removed."""


CacheEvent = StoredEvent | RemovedEvent | ClearedEvent


class DecodedBatch(Struct, frozen=True):
    """The events of one payload."""

    time_s: float
    """The engine's clock, in seconds; compared only with itself."""
    rank: int
    events: list[CacheEvent]
    ignored: int
    """Number of events of unknown tiers."""


class _StoredMap(BlockStored, frozen=True, tag_field="type", tag="BlockStored"):
    cache_salt: str | None = None


class _MapBatch(Struct, frozen=True, array_like=True):
    ts: float
    events: list[_StoredMap | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class _Metadata(Struct, frozen=True):
    cache_salt: str = ""


class _StoredArray(Struct, frozen=True, array_like=True, tag="BlockStored"):
    block_hashes: list[EventHash]
    parent_block_hash: EventHash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | _Metadata | None = None
    extra_keys: list[list[object] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class _RemovedArray(Struct, frozen=True, array_like=True, tag="BlockRemoved"):
    block_hashes: list[EventHash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedArray(Struct, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _ArrayBatch(Struct, frozen=True, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]
    data_parallel_rank: int | None = None


_MAPS: msgspec.msgpack.Decoder[_MapBatch] = msgspec.msgpack.Decoder(_MapBatch)
_ARRAYS: msgspec.msgpack.Decoder[_ArrayBatch] = msgspec.msgpack.Decoder(_ArrayBatch)
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


def decode(payload: bytes) -> DecodedBatch:
    """Decode one payload. Raise ProtocolError if it is not an event batch, or if its counts contradict each other."""
    raw = _read(payload)
    rank = raw.data_parallel_rank
    if rank is not None and rank < 0:
        raise ProtocolError(f"event batch: the rank {rank} is negative")
    events: list[CacheEvent] = []
    blocks = ignored = 0
    for event in raw.events:
        blocks += 1 if isinstance(event, AllBlocksCleared | _ClearedArray) else max(len(event.block_hashes), 1)
        if blocks > BATCH_LIMIT_BLOCKS:
            raise ProtocolError(f"event batch of more than {BATCH_LIMIT_BLOCKS} blocks")
        if isinstance(event, AllBlocksCleared | _ClearedArray):
            events.append(ClearedEvent())
            continue
        tier = 0 if event.medium is None else _MEDIA.get(event.medium.lower())
        if tier is None:
            ignored += 1
        elif isinstance(event, BlockRemoved | _RemovedArray):
            events.append(RemovedEvent(shortened(event.block_hashes), tier, event.group_idx))
        else:
            events.append(_stored(event, tier))
    return DecodedBatch(raw.ts, rank or 0, events, ignored)


def shortened(hashes: Iterable[EventHash]) -> list[EngineHash]:
    """Return what is kept of engines' hashes. The last eight bytes count, big-endian, as in digests."""
    return [(each if isinstance(each, int) else int.from_bytes(each[-8:], "big")) & ENGINE_HASH_BITS for each in hashes]


def _read(payload: bytes) -> _MapBatch | _ArrayBatch:
    if len(payload) > PAYLOAD_LIMIT_BYTES:
        raise ProtocolError(f"event batch of {len(payload)} bytes; at most {PAYLOAD_LIMIT_BYTES} are allowed")
    try:
        return _MAPS.decode(payload)
    except _UNREADABLE as wrong:
        try:
            return _ARRAYS.decode(payload)
        except _UNREADABLE:
            raise ProtocolError(f"event batch: {wrong}") from None


def _stored(event: _StoredMap | _StoredArray, tier: int) -> StoredEvent:
    blocks = len(event.block_hashes)
    if event.block_size <= 0 or len(event.token_ids) != blocks * event.block_size:
        raise ProtocolError(
            f"BlockStored: {len(event.token_ids)} token ids for {blocks} blocks of {event.block_size} tokens"
        )
    try:
        tokens = pack_tokens(event.token_ids)
    except OverflowError:
        raise ProtocolError("BlockStored: a token id is not a u32") from None
    lora = event.lora_name if isinstance(event.lora_name, str) else ""
    salt, routable, extras = _read_keys(event, lora)
    return StoredEvent(
        hashes=shortened(event.block_hashes),
        parent=None if event.parent_block_hash is None else shortened((event.parent_block_hash,))[0],
        tokens=tokens,
        block_size=event.block_size,
        tier=tier,
        group=event.group_idx,
        windowed=event.kv_cache_spec_kind is not None and event.kv_cache_spec_kind.startswith(_WINDOWED),
        lora=lora,
        salt=salt or _salt_field(event),
        routable=routable,
        extras=extras,
    )


def _salt_field(event: _StoredMap | _StoredArray) -> str:
    """Return the salt if it is a field of its own."""
    if isinstance(event, _StoredMap):
        return event.cache_salt or ""
    return event.lora_name.cache_salt if isinstance(event.lora_name, _Metadata) else ""


def _read_keys(event: _StoredMap | _StoredArray, lora: str) -> tuple[str, int, Mapping[int, bytes]]:
    """Return the tenant salt, how many leading blocks tokens, images, LoRA and salt alone decide, and what these blocks
    have of images.

    vLLM's extra keys of a block: the LoRA's name, the images in it, then what else its content depends on; a chain's
    first block ends with the salt.
    """
    if event.lora_id is not None and not lora:
        return "", 0, NO_EXTRAS  # the LoRA's name is missing
    salt = ""
    extras: dict[int, bytes] = {}
    for number, keys in enumerate(event.extra_keys or ()):
        foreign = [key for key in keys or () if key != lora or not lora]
        if number == 0 and event.parent_block_hash is None and foreign:
            last = foreign[-1]
            if isinstance(last, str):
                salt = last
                foreign.pop()
        if foreign:
            images = read_images(foreign)
            if images is None:
                return salt, number, extras or NO_EXTRAS
            extras[number] = images
    return salt, len(event.block_hashes), extras or NO_EXTRAS
