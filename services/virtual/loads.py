"""Prompts as runs of named blocks: a real trace and synthetic loads, and what an ideal cache would find in them.

    names      7         12        9          equal names mean equal prompts up to and with that block
    tokens   | 7 0 0 … | 12 0 0 … | 9 0 |     the last block may be partial: its name is then never reused

Tokens are made from names when a prompt is sent, so a load of 145 M tokens takes the memory of its names.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from random import Random

import msgspec

from shared.hashing import block_hash, next_sequence_hash, pack_hashes

VOCABULARY = 256
"""The vocabulary is small, so that Python keeps one object of each token id."""
TRACE_BLOCK_SIZE = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One prompt and the length of its answer."""

    number: int
    arrival_s: float
    names: Sequence[int]
    """The names of its blocks, the partial last one included."""
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class LoadTrace:
    """Requests in order of arrival."""

    name: str
    block_size: int
    """The number of tokens in a block."""
    requests: Sequence[TraceRequest]

    @property
    def rate(self) -> float:
        """The mean rate, in requests per second."""
        return len(self.requests) / (self.requests[-1].arrival_s - self.requests[0].arrival_s)

    def at(self, rate: float) -> LoadTrace:
        """Return the same requests, with time stretched or compressed to `rate` requests a second."""
        factor = self.rate / rate
        return replace(self, requests=[replace(each, arrival_s=each.arrival_s * factor) for each in self.requests])

    def first(self, requests: int) -> LoadTrace:
        """Return only the first `requests` requests."""
        return replace(self, requests=self.requests[:requests])

    def window(self, start: int, requests: int) -> LoadTrace:
        """Return `requests` requests from number `start` on, as a load of its own: numbers and times begin at 0."""
        chosen = self.requests[start : start + requests]
        began_s = chosen[0].arrival_s
        moved = [replace(each, number=number, arrival_s=each.arrival_s - began_s) for number, each in enumerate(chosen)]
        return replace(self, requests=moved)


@dataclass(frozen=True, slots=True)
class Ideal:
    """The hits of one unbounded cache that all workers share, under the engine's rules.

    Only full blocks are reused, and at least one token of a prompt is computed. The cache knows a prompt's blocks as
    soon as the prompt arrives, so no engine can do better. An engine that still computes them when a similar prompt
    comes does worse.
    """

    prompt_tokens: int
    cached_tokens: int
    full_blocks: int
    cached_blocks: int


def ideal(load: LoadTrace) -> Ideal:
    """Compute the ideal hits from the order of arrival."""
    size = load.block_size
    seen: set[int] = set()
    full = found = 0
    for request in load.requests:
        for name in request.names[: (request.prompt_tokens - 1) // size]:
            if name not in seen:
                break
            found += 1
        kept = request.prompt_tokens // size
        seen.update(request.names[:kept])
        full += kept
    return Ideal(sum(each.prompt_tokens for each in load.requests), found * size, full, found)


class TracePrompts:
    """Makes tokens and hashes of requests, as the frontend does."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._hashes: dict[int, int] = {}
        """The sequence hash of each name; a name stands for the whole prefix."""

    def tokens(self, request: TraceRequest) -> bytes:
        """Return the tokens as packed u32."""
        packed = b"".join([self._block(name) for name in request.names])
        return packed[: 4 * request.prompt_tokens]

    def hashes(self, request: TraceRequest) -> bytes:
        """Return the sequence hashes of the full blocks as packed u64."""
        parent: int | None = None
        made = []
        for name in request.names[: request.prompt_tokens // self._block_size]:
            known = self._hashes.get(name)
            if known is None:
                known = self._hashes[name] = next_sequence_hash(parent, block_hash(self._block(name)))
            parent = known
            made.append(known)
        return pack_hashes(made)

    def _block(self, name: int) -> bytes:
        digits = array("I", (name & 255, name >> 8 & 255, name >> 16 & 255)).tobytes()
        return digits + bytes(4 * (self._block_size - 3))


# --- the real trace


class _TraceLine(msgspec.Struct, frozen=True):
    timestamp: float
    """The arrival time, in milliseconds."""
    input_length: int
    output_length: int
    hash_ids: list[int]


def read_trace(path: Path, block_size: int = TRACE_BLOCK_SIZE) -> LoadTrace:
    """Read a trace in Mooncake's format (github.com/kvcache-ai/Mooncake, FAST'25): JSON lines. The ids are names of
    blocks of `block_size` tokens."""
    lines = [msgspec.json.decode(line, type=_TraceLine) for line in path.read_bytes().splitlines()]
    requests = [
        TraceRequest(number, line.timestamp / 1000, line.hash_ids, line.input_length, max(line.output_length, 1))
        for number, line in enumerate(lines)
    ]
    return LoadTrace("mooncake", block_size, requests)


# --- synthetic loads

_BLOCK_SIZE = 64


def unshared(requests: int, draw: Random) -> LoadTrace:
    """Make prompts with nothing in common."""
    arrivals, names = _arrivals(draw), count()
    made = []
    for number in range(requests):
        tokens = draw.randint(500, 4000)
        made.append(TraceRequest(number, next(arrivals), _take(names, tokens), tokens, draw.randint(50, 300)))
    return LoadTrace("unshared", _BLOCK_SIZE, made)


def chats(requests: int, draw: Random, size: int = _BLOCK_SIZE) -> LoadTrace:
    """Make conversations of about eight turns, 20 s apart, that share only a system prompt of 64 tokens."""
    return _conversations("chats", requests, draw, size, common_tokens=64, turns=8, pause_s=20.0, added=(100, 800))


def agents(requests: int, draw: Random, size: int = _BLOCK_SIZE) -> LoadTrace:
    """Make agents of about fifteen calls, 4 s apart, after one system prompt of 8,192 tokens."""
    return _conversations("agents", requests, draw, size, common_tokens=8192, turns=15, pause_s=4.0, added=(50, 1500))


def _conversations(
    name: str,
    requests: int,
    draw: Random,
    size: int,
    *,
    common_tokens: int,
    turns: int,
    pause_s: float,
    added: tuple[int, int],
) -> LoadTrace:
    """Make conversations whose turns add a number of tokens between the bounds `added`.

    Answers have 30 to 300 tokens. The next prompt computes them again, because the conversation does not continue with
    the engine's own answer.
    """
    arrivals, names = _arrivals(draw, requests_each=turns), count()
    common = _take(names, common_tokens, size)
    made: list[TraceRequest] = []
    while len(made) < 2 * requests:
        now_s, tokens, known = next(arrivals), common_tokens, list(common)
        for _ in range(max(1, round(draw.expovariate(1 / turns)))):
            tokens += draw.randint(*added)
            output = draw.randint(30, 300)
            known += _take(names, tokens - len(known) * size, size)
            made.append(TraceRequest(0, now_s, list(known), tokens, output))
            tokens += output
            known = known[: made[-1].prompt_tokens // size]
            now_s += draw.expovariate(1 / pause_s)
    made.sort(key=lambda each: each.arrival_s)
    # The first quarter has too few conversations under way, the last has no new ones.
    made = made[requests // 2 : requests // 2 + requests]
    return LoadTrace(name, size, [replace(each, number=number) for number, each in enumerate(made)])


def _take(names: Iterator[int], tokens: int, size: int = _BLOCK_SIZE) -> list[int]:
    return [next(names) for _ in range(-(-tokens // size))]


def _arrivals(draw: Random, requests_each: int = 1) -> Iterator[float]:
    """Yield the times of a Poisson process with about eight requests a second."""
    now_s = 0.0
    while True:
        now_s += draw.expovariate(8.0 / requests_each)
        yield now_s
