"""A made-up load in the manner of ServeGen (arXiv 2505.09999): many services, each with its own habits.

Few services have most of the requests (Zipf). Each has a system prompt, which all its requests share, its own lengths
of questions and answers (log-normal, with its own median and spread), and its own bursts: gaps between conversations
are gamma-distributed with a coefficient of variation from 1 to 4. Some conversations have one turn, some go on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from math import exp
from random import Random

from services.virtual.loads import LoadTrace, TraceRequest

SERVICES = 24
BLOCK_SIZE = 64
LONGEST_TOKENS = 60_000
LONGEST_ANSWER = 2_000
_RATE = 8.0


def tenants(name: str, requests: int, draw: Random) -> LoadTrace:
    """Make such a load."""
    names = count()
    shares = [1 / (rank + 1) for rank in range(SERVICES)]
    made: list[TraceRequest] = []
    lasts_s = 2 * requests / _RATE
    for share in shares:
        made += _service(_RATE * share / sum(shares), lasts_s, names, draw)
    made.sort(key=lambda each: each.arrival_s)
    # The first quarter has too few conversations under way, the last has no new ones.
    first = len(made) // 4
    made = made[first : first + requests]
    began_s = made[0].arrival_s
    moved = [replace(each, number=number, arrival_s=each.arrival_s - began_s) for number, each in enumerate(made)]
    return LoadTrace(name, BLOCK_SIZE, moved)


def _service(rate: float, lasts_s: float, names: Iterator[int], draw: Random) -> Iterator[TraceRequest]:
    """Yield the requests of one service."""
    system_tokens = int(min(exp(draw.gauss(6.5, 1.2)), 16_000))
    system = _take(names, system_tokens // BLOCK_SIZE)
    asked, answered = (draw.gauss(6.0, 1.0), draw.uniform(0.4, 1.2)), (draw.gauss(5.0, 0.7), draw.uniform(0.3, 0.9))
    turns, pause_s, variation = draw.choice((1, 1, 3, 8, 20)), draw.uniform(3, 40), draw.uniform(1, 4)
    shape = 1 / variation**2
    now_s = 0.0
    while now_s < lasts_s:
        now_s += draw.gammavariate(shape, turns / rate / shape)
        turn_s, known, tokens = now_s, list(system), len(system) * BLOCK_SIZE
        for _ in range(max(1, round(draw.expovariate(1 / turns)))):
            tokens += _length(asked, draw, 4 * LONGEST_ANSWER)
            if tokens > LONGEST_TOKENS:
                break
            answer = _length(answered, draw, LONGEST_ANSWER)
            known += _take(names, -(-tokens // BLOCK_SIZE) - len(known))
            yield TraceRequest(0, turn_s, list(known), tokens, answer)
            known = known[: tokens // BLOCK_SIZE]
            tokens += answer
            turn_s += draw.expovariate(1 / pause_s)


def _length(of: tuple[float, float], draw: Random, most: int) -> int:
    return max(1, min(int(draw.lognormvariate(*of)), most))


def _take(names: Iterator[int], blocks: int) -> list[int]:
    return [next(names) for _ in range(blocks)]
