"""The requests of a load: prompts as runs of named parts, and sessions of requests that follow each other. Pure.

    parts     opening 3 │ prompt 17       equal names mean equal text, of the shorter length if they differ in it
    session   request ─ answer ─ pause ─▶ request ─ …      one that stands alone is a session of one turn

Texts are made from names when a request is sent, so that a load takes the memory of its names.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import count
from math import log
from random import Random

from msgspec import Struct

from deploy.local.size.traffic import Traffic, drawn_length

_TEXT = """
water river wheel mill stone gate flow dam weir sluice basin valley bridge boat rope oak iron grain bread slow quick
deep shallow old new bright quiet heavy round turns carries lifts grinds opens closes falls rises
"""
WORDS = _TEXT.split()
PIECE = 4096
"""Words or tokens of a part that are drawn, and kept, together."""
KEPT_PIECES = 4096
"""Pieces that are kept in memory, those that were used last: 64 MiB at most."""

SESSION_TURNS, TURN_PROMPT, TURN_OUTPUT = 43, 142_000, 444
"""Agents' sessions as published: the median of their turns, and the mean tokens in and out of a turn."""
WITH_SUBAGENTS = 0.44
"""The share of sessions that start subagents."""
SYSTEM_SHARE = 0.14
"""The part of a turn's mean prompt that is the system prompt, which all sessions share. An assumption, as the numbers
below: with it 96 % of the prompts' tokens were there in the turn before, as published."""
COMPACTED = 2
"""A prompt that is longer than this multiple of the mean is compacted: the next one begins with the system prompt
alone."""
TURNS_SPREAD, TURNS_LIMIT = 0.8, 4
"""The spread of the number of turns (the sigma of a log-normal), and its limit, as a multiple of the median."""
TOOL_PAUSE_S = 5.0
"""The mean seconds between an answer and the next turn, in which a tool runs."""
SUBAGENTS, SUBAGENT_SHARE = (1, 3), 0.25
"""How many subagents a session starts, and their turns as a share of a session's."""


class LoadRequest(Struct, frozen=True):
    """One request of a load."""

    parts: Sequence[tuple[str, int]]
    """The names of the prompt's parts, and their lengths in words or tokens."""
    output: int
    """The number of tokens of the answer."""
    turn: int = 1
    """Which turn of its session it is."""
    text: str = ""
    """The prompt itself, if it was given."""
    images: Sequence[str] = ()
    """The names of its images."""


class LoadTurn(Struct, frozen=True):
    """One request of a session."""

    ask: LoadRequest
    pause_s: float = 0.0
    """The seconds between the answer of the turn before and this request."""
    awaited: Sequence[LoadSession] = ()
    """Sessions that start after the answer of the turn before, and end before this request."""


class LoadSession(Struct, frozen=True):
    """Requests that follow each other."""

    at_s: float
    """The time of the first request in an open loop, in seconds from the start."""
    turns: Sequence[LoadTurn]

    @property
    def requests(self) -> int:
        """The number of all its requests."""
        return sum(1 + sum(each.requests for each in turn.awaited) for turn in self.turns)


class AskShape(Struct, frozen=True):
    """What single requests are drawn from."""

    prompt: int
    """The mean length of prompts."""
    output: int
    """The mean number of tokens of answers."""
    spread: float = 0.0
    """The standard deviation of both, divided by the mean."""
    shared: int = 0
    """The length of the beginning that is shared."""
    shared_ratio: float | None = None
    """The length of that beginning as a share of each prompt, in place of `shared`."""
    beginnings: int = 1
    """How many different beginnings there are; each request has one of them at random."""
    images: int = 0
    """The number of images of each request."""


def drawn_asks(shape: AskShape, given: Sequence[str], seed: int, load: str) -> Iterator[LoadRequest]:
    """Yield the requests of a load without end: prompts that are `given`, in turn, or that follow from the shape, the
    seed and the load's name. Beginnings are those of the seed, and of `shared_ratio` if that is given."""
    for number in count():
        draw = Random(f"ask {seed} {load} {number}")  # noqa: S311 - a load, no secret
        output = drawn_length(draw, shape.output, shape.spread)
        images = [f"{seed} {load} {number} {image}" for image in range(shape.images)]
        if given:
            yield LoadRequest((), output, text=given[number % len(given)], images=images)
            continue
        length = drawn_length(draw, shape.prompt, shape.spread)
        shared = shape.shared if shape.shared_ratio is None else round(shape.shared_ratio * length)
        shared = min(shared, length)
        beginning = f"opening {seed} {shape.shared_ratio} {draw.randrange(shape.beginnings)}"
        parts = ((beginning, shared), (f"prompt {seed} {load} {number}", length - shared))
        yield LoadRequest(parts, output, images=images)


def trace_sessions(traffic: Traffic, speed: float, load: str) -> Iterator[LoadSession]:
    """Yield the requests of a trace at its times, divided by `speed`. No two loads have texts in common, so that none
    finds what another one has left in caches."""
    size, began = traffic.block_size, traffic.rows[0].timestamp
    for row in traffic.rows:
        last = row.input_length - size * (len(row.hash_ids) - 1)
        lengths = [size] * (len(row.hash_ids) - 1) + [last]
        parts = [(f"block {load} {name}", length) for name, length in zip(row.hash_ids, lengths, strict=True)]
        yield LoadSession(
            (row.timestamp - began) / 1000 / speed, (LoadTurn(LoadRequest(parts, max(1, row.output_length))),)
        )


def agent_sessions(times: Sequence[float], scale: float, speed: float, seed: int, load: str) -> list[LoadSession]:
    """Return sessions of agents that begin at these times. `scale` multiplies the published tokens in and out, `speed`
    divides the pauses. Two loads of a seed share their system prompts alone."""
    made = []
    for number, at_s in enumerate(times):
        draw = Random(f"session {seed} {number}")  # noqa: S311 - a load, no secret
        turns = min(TURNS_LIMIT * SESSION_TURNS, draw.lognormvariate(log(SESSION_TURNS), TURNS_SPREAD))
        name = f"{seed} {load} {number}"
        session = _agent(draw, at_s, name, f"system {seed}", round(turns), scale, speed)
        made.append(_with_subagents(draw, session, scale, speed, name))
    return made


def _with_subagents(draw: Random, session: LoadSession, scale: float, speed: float, name: str) -> LoadSession:
    """Return a session that may start subagents after one of its turns, and waits for them."""
    if draw.random() >= WITH_SUBAGENTS or len(session.turns) < 2:
        return session
    turns = list(session.turns)
    at = draw.randrange(1, len(turns))
    own = max(1, round(len(turns) * SUBAGENT_SHARE))
    made = [
        _agent(draw, 0.0, f"{name} subagent {number}", f"subagents' system {name.split()[0]}", own, scale, speed)
        for number in range(draw.randint(*SUBAGENTS))
    ]
    turns[at] = LoadTurn(turns[at].ask, turns[at].pause_s, made)
    return LoadSession(session.at_s, turns)


def _agent(draw: Random, at_s: float, name: str, system: str, turns: int, scale: float, speed: float) -> LoadSession:
    """Return one agent's turns: each prompt is the one before, with what the answer and the tool have added to it."""
    prompt = TURN_PROMPT * scale
    parts = [(system, max(1, round(SYSTEM_SHARE * prompt)))]
    # The mean prompt comes in the middle of a session with the median of turns.
    added = (1 - SYSTEM_SHARE) * prompt / (SESSION_TURNS / 2)
    made = []
    for turn in range(1, max(1, turns) + 1):
        kept = parts if sum(length for _, length in parts) <= COMPACTED * prompt else parts[:1]
        parts = [*kept, (f"turn {name} {turn}", drawn_length(draw, added, 0.5))]
        pause_s = draw.expovariate(1 / TOOL_PAUSE_S) / speed if turn > 1 else 0.0
        made.append(LoadTurn(LoadRequest(parts, drawn_length(draw, TURN_OUTPUT * scale, 0.5), turn), pause_s))
    return LoadSession(at_s, made)


def prompt_text(ask: LoadRequest) -> str:
    """Return the prompt of a request as text, a word for each unit of length."""
    return ask.text or " ".join(WORDS[each] for name, length in ask.parts for each in _drawn(name, length, len(WORDS)))


def prompt_tokens(ask: LoadRequest, ids: Sequence[int]) -> list[int]:
    """Return the prompt of a request as token ids, one for each unit of length."""
    return [ids[each] for name, length in ask.parts for each in _drawn(name, length, len(ids))]


def _drawn(name: str, length: int, kinds: int) -> Iterator[int]:
    """Yield numbers below `kinds` that follow from the name; fewer are the beginning of more."""
    for begin in range(0, length, PIECE):
        yield from drawn_piece(name, begin, min(PIECE, length - begin), kinds)


@lru_cache(KEPT_PIECES)
def drawn_piece(name: str, begin: int, length: int, kinds: int) -> Sequence[int]:
    """Return the numbers of a part from `begin` on, at most PIECE of them."""
    return array("I", Random(f"{name} {begin}").choices(range(kinds), k=length))  # noqa: S311 - a load, no secret
