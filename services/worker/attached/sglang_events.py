"""SGLang's KV events, in the form in which vLLM publishes the same. Pure.

Both send msgpack maps in the same frames, with the same replay. SGLang names a salt in each event of a chain, as
`cache_salt`; vLLM in the extra keys of the chain's first block. The format is that of SGLang 0.5.23's sources. Older
ones sent arrays, which are refused.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from shared.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent


class _Stored(BlockStored, frozen=True, tag_field="type", tag="BlockStored"):
    cache_salt: str | None = None


class _Batch(Struct, frozen=True, array_like=True):
    ts: float
    events: list[_Stored | BlockRemoved | AllBlocksCleared]
    attn_dp_rank: int | None = None


_BATCHES = msgspec.msgpack.Decoder(_Batch)


def read_batch(payload: bytes) -> list[KvEvent]:
    """Return the events of a batch. Raise msgspec.MsgspecError."""
    return [_with_salt(event) if isinstance(event, _Stored) else event for event in _BATCHES.decode(payload).events]


def _with_salt(event: _Stored) -> BlockStored:
    if not event.cache_salt or event.parent_block_hash is not None or not event.block_hashes:
        return event
    first: list[object] = [key for key in (event.lora_name, event.cache_salt) if key]
    return replace(event, extra_keys=[first, *([None] * (len(event.block_hashes) - 1))])
