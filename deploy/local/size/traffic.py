"""The load of a plan: a trace's requests, or requests that are drawn from a rate and lengths. Pure.

A request's prompt is a run of named blocks; equal names mean equal prompts up to and with that block. Lines of
Mooncake's format have the names (`hash_ids`, blocks of 512 tokens); in Azure's CSV, and in logs of our own frontends,
no two prompts have a beginning in common.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from math import log, sqrt
from random import Random

import msgspec
from msgspec import Struct

from shared.errors import MALFORMED, ConfigError

MOONCAKE_BLOCK = 512
MADE_BLOCK = 64
"""The tokens of a block of requests that are drawn."""
TOKENS_LIMIT = 1 << 24
LOGGED_END = "request ended"
"""The message of a frontend's line for each request (docs/logs.md)."""
REQUESTS_LIMIT = 100_000


class TrafficRow(Struct, frozen=True):
    """One request, as a line of the load's file."""

    timestamp: float
    """The arrival time, in milliseconds."""
    input_length: int
    output_length: int
    hash_ids: Sequence[int]


class Traffic(Struct, frozen=True):
    """The requests of a load, in order of arrival."""

    block_size: int
    rows: Sequence[TrafficRow]

    @property
    def rate(self) -> float:
        """The mean requests a second."""
        return (len(self.rows) - 1) / max(1e-9, (self.rows[-1].timestamp - self.rows[0].timestamp) / 1000)

    def stretched(self, rate: float) -> Traffic:
        """Return the same requests, with time stretched or compressed to `rate` requests a second."""
        factor, began = self.rate / rate, self.rows[0].timestamp
        moved = [msgspec.structs.replace(row, timestamp=(row.timestamp - began) * factor) for row in self.rows]
        return Traffic(self.block_size, moved)

    def lines(self) -> bytes:
        """Return the content of the load's file."""
        return b"".join(msgspec.json.encode(row) + b"\n" for row in self.rows)


class Lengths(Struct, frozen=True):
    """What requests are drawn from: lengths are log-normal, arrivals a Poisson process."""

    rate: float
    requests: int
    prompt: int
    """The mean tokens of prompts, the shared ones included."""
    output: int
    spread: float
    """The standard deviation of both lengths, divided by their means."""
    shared: int
    """The tokens that all prompts begin with."""
    seed: int


def drawn_traffic(lengths: Lengths) -> Traffic:
    """Return a load that follows from the numbers."""
    draw, names = Random(lengths.seed), iter(range(1, 1 << 60))  # noqa: S311 - a load, no secret
    common = [next(names) for _ in range(lengths.shared // MADE_BLOCK)]
    at_ms, rows = 0.0, list[TrafficRow]()
    for _ in range(lengths.requests):
        prompt = len(common) * MADE_BLOCK + drawn_length(
            draw, lengths.prompt - len(common) * MADE_BLOCK, lengths.spread
        )
        own = -(-prompt // MADE_BLOCK) - len(common)
        output = drawn_length(draw, lengths.output, lengths.spread)
        rows.append(TrafficRow(at_ms, prompt, output, [*common, *(next(names) for _ in range(own))]))
        at_ms += 1000 * draw.expovariate(lengths.rate)
    return Traffic(MADE_BLOCK, rows)


def drawn_length(draw: Random, mean: float, spread: float) -> int:
    """Return a length of at least 1, log-normal around its mean; `spread` is its standard deviation divided by that."""
    if not spread:
        return max(1, round(mean))
    sigma = sqrt(log(1 + spread * spread))
    return min(TOKENS_LIMIT, max(1, round(draw.lognormvariate(log(max(1, mean)) - sigma * sigma / 2, sigma))))


def read_traffic(text: str, name: str, requests: int) -> Traffic:
    """Return the first `requests` requests of a trace: Mooncake's JSON lines, Azure's CSV, or a frontend's log as JSON
    with its access log. Raise ConfigError, which names the line."""
    begin = text[:4096].lstrip()
    reader = _azure if begin.startswith("TIMESTAMP") else _log if begin.startswith('{"time"') else _mooncake
    rows = list[TrafficRow]()
    for number, row in reader(text, name):
        _check_row(row, rows[-1] if rows else None, f"{name}:{number}", reader is not _mooncake)
        rows.append(row)
        if len(rows) == requests:
            break
    return checked(MOONCAKE_BLOCK if reader is _mooncake else MADE_BLOCK, rows, name)


def checked(block_size: int, rows: Sequence[TrafficRow], name: str) -> Traffic:
    """Return the load of a trace. Raise ConfigError if it has no two requests apart."""
    if len(rows) < 2:
        raise ConfigError(f"{name}: a trace has at least two requests, this one {len(rows)}")
    if rows[-1].timestamp <= rows[0].timestamp:
        raise ConfigError(f"{name}: all {len(rows)} requests come at the same time")
    return Traffic(block_size, rows)


def _check_row(row: TrafficRow, before: TrafficRow | None, where: str, without_names: bool) -> None:
    if not 1 <= row.input_length <= TOKENS_LIMIT or not 0 <= row.output_length <= TOKENS_LIMIT:
        raise ConfigError(f"{where}: {row.input_length} tokens in and {row.output_length} out are out of range")
    if before is not None and row.timestamp < before.timestamp:
        raise ConfigError(f"{where}: time goes back, from {before.timestamp:g} to {row.timestamp:g} ms")
    blocks = -(-row.input_length // MOONCAKE_BLOCK)
    if not without_names and len(row.hash_ids) != blocks:
        raise ConfigError(f"{where}: {len(row.hash_ids)} hash_ids for {row.input_length} tokens, {blocks} blocks")


def _mooncake(text: str, name: str) -> Iterator[tuple[int, TrafficRow]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield number, msgspec.json.decode(line, type=TrafficRow)
        except MALFORMED as wrong:
            raise ConfigError(f"{name}:{number}: {wrong}") from None


def _azure(text: str, name: str) -> Iterator[tuple[int, TrafficRow]]:
    """Read `TIMESTAMP,ContextTokens,GeneratedTokens`, of which Azure published days in 2023 and 2024."""
    names = iter(range(1, 1 << 60))
    began: datetime | None = None
    for number, line in enumerate(text.splitlines(), 1):
        if number == 1 or not line.strip():
            continue
        try:
            at, *lengths = line.split(",")[:3]
            when, (prompt, output) = datetime.fromisoformat(at), map(int, lengths)
        except ValueError:
            raise ConfigError(f"{name}:{number}: expected TIMESTAMP,ContextTokens,GeneratedTokens") from None
        when = when if when.tzinfo else when.replace(tzinfo=UTC)
        began = began or when
        yield number, unshared(1000 * (when - began).total_seconds(), prompt, output, names)


class _Fields(Struct, frozen=True):
    seconds: float = 0.0
    prompt_tokens: int = 0
    output_tokens: int = 0


class _Line(Struct, frozen=True):
    time: datetime
    message: str = ""
    fields: _Fields = _Fields()


def _log(text: str, name: str) -> Iterator[tuple[int, TrafficRow]]:
    """Read the lines of requests that were answered with tokens, in the order in which these began."""
    names = iter(range(1, 1 << 60))
    found: list[tuple[float, int, _Fields]] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            read = msgspec.json.decode(line, type=_Line)
        except MALFORMED as wrong:
            raise ConfigError(f"{name}:{number}: {wrong}") from None
        if read.message == LOGGED_END and read.fields.prompt_tokens and read.fields.output_tokens:
            found.append((1000 * (read.time.timestamp() - read.fields.seconds), number, read.fields))
    for at_ms, number, fields in sorted(found, key=lambda each: each[0]):
        yield number, unshared(at_ms, fields.prompt_tokens, fields.output_tokens, names)


def unshared(at_ms: float, prompt: int, output: int, names: Iterator[int]) -> TrafficRow:
    """Return a request whose blocks no other one has."""
    blocks = -(-max(0, min(prompt, TOKENS_LIMIT)) // MADE_BLOCK)
    return TrafficRow(at_ms, prompt, output, [next(names) for _ in range(blocks)])
