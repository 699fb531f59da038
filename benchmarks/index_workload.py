"""The workload of both indexes in `benchmarks/index.py`. The same seed makes the same chains for both.

It needs only the standard library, so that the interpreter with Dynamo can import it too.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

INSTANCES = 64
DEPTH = 1024
HOLDERS = 15
PASSES = 10
"""Times that a round asks all its questions, or stores and removes its events, so that the first, cold pass after the
other's turn weighs little."""


class Chain(NamedTuple):
    """One prefix, and how much of it each instance holds."""

    hashes: list[int]
    """The blocks' sequence hashes, in order."""
    held: list[tuple[int, int]]
    """Pairs of an instance and how many leading blocks it holds."""

    @property
    def pairs(self) -> int:
        return sum(depth for _, depth in self.held)


def draw_hashes(draw: Random, count: int) -> list[int]:
    """Draw hashes as new ints, as a message gives them."""
    return array("Q", draw.randbytes(8 * count)).tolist()


def again(hashes: list[int]) -> list[int]:
    """Return equal numbers as new objects, as the next message gives them."""
    return array("Q", hashes).tolist()


def staggered(pairs: int) -> Iterator[Chain]:
    """Yield chains of 1,024 blocks, each held by 15 random instances to a random depth.

    A deep find then passes 15 changes of holders.
    """
    draw = Random(7)
    for _ in range(max(1, pairs * 2 // (DEPTH * HOLDERS))):
        hashes = draw_hashes(draw, DEPTH)
        yield Chain(hashes, [(number, draw.randrange(DEPTH + 1)) for number in draw.sample(range(INSTANCES), HOLDERS)])


def quarter(pairs: int, depth: int) -> Iterator[Chain]:
    """Yield chains of `depth` blocks, held completely by one instance, and each fourth one by eight."""
    draw = Random(3)
    number = 0
    while pairs > 0:
        instances = draw.sample(range(INSTANCES), 1 if number % 4 else 8)
        chain = Chain(draw_hashes(draw, depth), [(instance, depth) for instance in instances])
        pairs -= chain.pairs
        number += 1
        yield chain


def fill(name: str, pairs: int) -> Iterator[Chain]:
    """Yield the chains of a workload: `staggered`, or `quarter 16` with any depth."""
    kind, _, depth = name.partition(" ")
    return staggered(pairs) if kind == "staggered" else quarter(pairs, int(depth))


def asked(chains: list[Chain]) -> list[list[int]]:
    """Return the hashes of up to 1,000 chains, as prompts give them."""
    return [again(chain.hashes) for chain in chains[:: max(1, len(chains) // 1000)][:1000]]
