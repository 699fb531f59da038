"""Reads batches of vLLM's KV events, also those of a newer vLLM. Pure."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from shared.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, KvEvent


class _Typed(Struct):
    """An event, of which only its type is read."""

    type: str


class _RawBatch(Struct, array_like=True):
    """A batch whose events are read one by one."""

    ts: float
    events: list[msgspec.Raw]


_BATCHES = msgspec.msgpack.Decoder(EventBatch)
_RAW_BATCHES = msgspec.msgpack.Decoder(_RawBatch)
_EVENTS: msgspec.msgpack.Decoder[KvEvent] = msgspec.msgpack.Decoder(KvEvent)
_TYPED = msgspec.msgpack.Decoder(_Typed)
_KNOWN = {each.__name__ for each in (BlockStored, BlockRemoved, AllBlocksCleared)}


def decode_events(payload: bytes) -> list[KvEvent]:
    """Return the events of a batch. Raise msgspec.MsgspecError for what is no event.

    One of a type that a newer vLLM has may say anything of the cache. In its place all blocks are forgotten, and those
    that are stored from then on are known again."""
    try:
        return _BATCHES.decode(payload).events
    except msgspec.ValidationError:
        return [_decode_event(raw) for raw in _RAW_BATCHES.decode(payload).events]


def _decode_event(raw: msgspec.Raw) -> KvEvent:
    return _EVENTS.decode(raw) if _TYPED.decode(raw).type in _KNOWN else AllBlocksCleared()
