"""The file that `headrace profile` writes: measured times of one engine, with where they come from. Pure.

`up --engine simulated --simulated table=profile.json` reads its two tables, `headrace plan` all of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec
from msgspec import Struct

from shared.errors import MALFORMED, ConfigError
from shared.measured_times import Point

Kind = Literal["prefill", "decode"]
FORMAT = 1
FILE_LIMIT_BYTES = 1 << 20


class MeasuredPoint(Struct, frozen=True):
    """One measured time."""

    kind: Kind
    x: int
    """Prefill: tokens computed. Decode: sequences."""
    y: int
    """Tokens of context before them, or of each sequence."""
    seconds: float
    """The median of the repetitions."""
    spread: float
    """The longest less the shortest of them, divided by the median."""
    repetitions: int
    busy_s: float = 0.0
    """The median while all workers of the machine do the same at once. 0 with one worker."""
    busy_spread: float = 0.0
    times: Sequence[float] = ()
    """Each repetition's seconds, to which further ones are added. Empty in a file of an older version."""
    busy_times: Sequence[float] = ()


class Subject(Struct, frozen=True):
    """What was measured: a sweep goes on only with the same subject."""

    model: str
    server: str
    """The address, or the flags of the `up` that was started."""
    machine: str
    versions: Mapping[str, str]
    longest: int
    most: int
    workers: int = 1
    """The workers of the machine."""


class BusyTimes(Struct, frozen=True):
    """The times while all workers of the machine do the same at once."""

    prefill: list[Point]
    decode: list[Point]


class Profile(Struct, frozen=True, kw_only=True):
    """The content of the file."""

    format: int = FORMAT
    subject: Subject
    when: str
    complete: bool
    overhead_s: float
    """The part of a first token that no step takes: it is not in `prefill`."""
    cached_seen: bool
    """True if the server reported cached tokens, so that prompts after a cached beginning are known to be right."""
    workers_seen: bool = False
    """True if it is known how many workers served. Other endpoints are taken for one worker."""
    block_size: int = 0
    """The tokens of a block. 0 if it is not known."""
    kv_tokens: int = 0
    """The tokens of KV for which one worker has room. 0 if it is not known."""
    prefill: list[Point] = []
    """(tokens, context before them, seconds)"""
    decode: list[Point] = []
    """(sequences, context of each, seconds)"""
    busy: BusyTimes | None = None
    """None with one worker."""
    points: list[MeasuredPoint] = []


def decode_profile(content: bytes, name: str) -> Profile:
    """Return a profile. Raise ConfigError, which begins with `name`."""
    try:
        profile = msgspec.json.decode(content, type=Profile)
    except MALFORMED as wrong:
        raise ConfigError(f"{name}: no profile of `headrace profile`: {wrong}") from None
    if profile.format != FORMAT:
        raise ConfigError(f"{name}: a profile of format {profile.format}; this version reads {FORMAT}: measure again")
    return profile


def encode_profile(profile: Profile) -> bytes:
    """Return a profile as the file's content."""
    return msgspec.json.format(msgspec.json.encode(profile)) + b"\n"


def check_same(found: Subject, wanted: Subject, name: str) -> None:
    """Raise ConfigError if a file has a profile of something else. What is empty in `wanted` is not known yet."""
    for field in Subject.__struct_fields__:
        old, new = getattr(found, field), getattr(wanted, field)
        if new and old != new:
            raise ConfigError(
                f"--out {name} has a profile of another {field}: {old} there, {new} here; remove it or rename it"
            )
