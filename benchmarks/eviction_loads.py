"""Makes up requests to a block store: four kinds of use, with heavy tails where real use has them.

conversations   people with one of twenty system prompts (Zipf): half of them ask once, some come back thirty times,
                after a minute or an hour (log-normal pauses)
agents          loops with one of eight long prompts of instructions and tools: about twenty calls, seconds apart; each
                adds a tool's result; a context of 48k tokens is summarised and starts again after the same prompt
documents       one to four questions about one of 1,500 documents, whose popularity follows Zipf's law and shifts
batch           the conversations, and for two fifths of the time twice as many prompts of a job, each asked once

An answer's tokens are in its conversation's next prompt. As in `loads.py`, names stand for whole prefixes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from math import log
from random import Random

from services.virtual.loads import LoadTrace, TraceRequest

BLOCK_SIZE = 256


@dataclass(slots=True)
class _Prompt:
    """A prompt that grows from turn to turn."""

    new: Iterator[int]
    tokens: int = 0
    names: list[int] = field(default_factory=list)

    def grown(self, tokens: int) -> _Prompt:
        """Append `tokens` tokens. The partial last block gets another name, as its hash would change."""
        longer = self.tokens + tokens
        names = self.names[: self.tokens // BLOCK_SIZE]
        names += [next(self.new) for _ in range(-(-longer // BLOCK_SIZE) - len(names))]
        return _Prompt(self.new, longer, names)

    def asked(self, at_s: float, answer: int) -> TraceRequest:
        return TraceRequest(0, at_s, self.names, self.tokens, answer)


def conversations(requests: int, draw: Random) -> LoadTrace:
    """Make conversations of about 2.5 turns, with prompts of about 2,500 tokens."""
    return _load("conversations", _conversations(requests, draw, count()), requests)


def agents(requests: int, draw: Random) -> LoadTrace:
    """Make agents of about twenty calls, with prompts of about 20,000 tokens."""
    new, made, begun_s = count(), list[TraceRequest](), 0.0
    kinds = [_Prompt(new).grown(draw.randint(4000, 12_000)) for _ in range(8)]
    while len(made) < 2 * requests:
        begun_s += draw.expovariate(1 / 12)
        now_s, first = begun_s, kinds[_zipf(len(kinds), draw)]
        prompt = first.grown(_long(draw, 600, 1.0))
        for _ in range(1 + round(draw.expovariate(1 / 20))):
            answer = _long(draw, 120, 0.8)
            made.append(prompt.asked(now_s, answer))
            now_s += _pause(draw, 6.0, 1.0) if draw.random() < 0.95 else _pause(draw, 180.0, 1.0)
            prompt = prompt.grown(answer + _long(draw, 500, 1.2))
            if prompt.tokens > 48_000:
                prompt = first.grown(_long(draw, 2500, 0.4))
    return _load("agents", made, requests)


def documents(requests: int, draw: Random) -> LoadTrace:
    """Make readers of about 1.7 questions, with prompts of about 6,000 tokens."""
    new, made, now_s = count(), list[TraceRequest](), 0.0
    instructions = _Prompt(new).grown(700)
    shelf = [instructions.grown(_long(draw, 4000, 0.8)) for _ in range(1500)]
    while len(made) < 2 * requests:
        now_s += draw.expovariate(1 / 3)
        if draw.random() < 0.05:  # what was read by few is read by many, and the other way round
            one, other = draw.randrange(len(shelf)), draw.randrange(len(shelf))
            shelf[one], shelf[other] = shelf[other], shelf[one]
        prompt, at_s = shelf[_zipf(len(shelf), draw)], now_s
        for _ in range(draw.choices((1, 2, 3, 4), (6, 2, 1, 1))[0]):
            prompt, answer = prompt.grown(_long(draw, 60, 0.7)), _long(draw, 200, 0.7)
            made.append(prompt.asked(at_s, answer))
            prompt = prompt.grown(answer)
            at_s += _pause(draw, 40.0, 0.8)
    return _load("documents", made, requests)


def batch(requests: int, draw: Random) -> LoadTrace:
    """Make conversations, and now and then a batch job."""
    new = count()
    talk = _conversations(requests, draw, new)
    talk.sort(key=_arrival)
    period = max(1, requests // 5)
    made = []
    for number, each in enumerate(talk):
        made.append(each)
        if number % period < 2 * period // 5:
            made += [_Prompt(new).grown(_long(draw, 2000, 0.6)).asked(each.arrival_s, 100) for _ in range(2)]
    return _load("batch", made, requests)


def _conversations(requests: int, draw: Random, new: Iterator[int]) -> list[TraceRequest]:
    made, begun_s = list[TraceRequest](), 0.0
    systems = [_Prompt(new).grown(draw.randint(150, 2500)) for _ in range(20)]
    while len(made) < 2 * requests:
        begun_s += draw.expovariate(1 / 2)
        now_s, prompt = begun_s, systems[_zipf(len(systems), draw)]
        turns = 1 if draw.random() < 0.5 else min(2 + round(draw.expovariate(1 / 3)), 30)
        for _ in range(turns):
            prompt, answer = prompt.grown(_long(draw, 150, 1.3)), _long(draw, 300, 0.8)
            made.append(prompt.asked(now_s, answer))
            prompt = prompt.grown(answer)
            now_s += _pause(draw, 75.0, 1.4)
    return made


def _load(name: str, made: list[TraceRequest], requests: int) -> LoadTrace:
    """Cut out the middle, because few conversations run at the beginning and none starts at the end."""
    made.sort(key=_arrival)
    first = (len(made) - requests) // 4
    chosen = made[first : first + requests]
    return LoadTrace(name, BLOCK_SIZE, [replace(each, number=number) for number, each in enumerate(chosen)])


def _arrival(request: TraceRequest) -> float:
    return request.arrival_s


def _zipf(ranks: int, draw: Random) -> int:
    """Draw a rank from 0 by Zipf's law."""
    return min(int((ranks + 1) ** draw.random()) - 1, ranks - 1)


def _long(draw: Random, median: int, spread: float) -> int:
    """Draw a number of tokens, log-normal, at most 20 medians."""
    return max(1, min(round(draw.lognormvariate(log(median), spread)), 20 * median))


def _pause(draw: Random, median_s: float, spread: float) -> float:
    return draw.lognormvariate(log(median_s), spread)
