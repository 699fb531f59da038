"""Reads the captured event sessions in this directory."""

from __future__ import annotations

from pathlib import Path
from struct import unpack_from

import msgspec
from msgspec import Struct

SESSIONS = ("s1_default_sha256_int", "s3_cbor_seed0_bytes_lora")
BLOCK_SIZE = 32
_FOLDER = Path(__file__).parent / "vllm_kv_events"


class CapturedRequest(Struct, frozen=True):
    """One request of the session."""

    request: str
    tokens: list[int]
    salt: str
    lora: str
    cached_tokens: int
    """Cached tokens as the engine reported them."""
    events_from: int
    """Number of the first message that came after the request began."""


def requests(session: str) -> list[CapturedRequest]:
    return msgspec.json.decode((_FOLDER / f"{session}.requests.json").read_bytes(), type=list[CapturedRequest])


def payloads(session: str) -> list[bytes]:
    """Return the payloads of the messages, in order."""
    raw = (_FOLDER / f"{session}.frames.bin").read_bytes()
    found: list[bytes] = []
    at = 0
    while at < len(raw):
        (count,) = unpack_from("<I", raw, at)
        at += 4
        frames: list[bytes] = []
        for _ in range(count):
            (size,) = unpack_from("<I", raw, at)
            frames.append(raw[at + 4 : at + 4 + size])
            at += 4 + size
        assert len(frames) == 3
        found.append(frames[2])
    return found
