"""Clients: what they ask, what they get, and what they should have got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from services.frontend.answers import Usage
from services.frontend.detokenize import TokenBytes
from services.frontend.output import Output
from services.frontend.service import Frontend
from services.frontend.stream import Job
from services.worker.engine import Work
from shared.errors import HeadraceError, InvalidRequest
from shared.hashing import pack_hashes, pack_tokens, seed_of, sequence_hashes
from tests.simulation.plan import BLOCK_SIZE, CONTEXT_LENGTH, EOS, VOCABULARY, Request, letter
from tests.simulation.process import MODEL, facts_of, model_of

_LETTERS = [b"" if token == EOS else letter(token).encode() for token in range(VOCABULARY)]
TOKENS = TokenBytes(_LETTERS, _LETTERS, strip_first_space=False)

End = Literal["stop", "length", "failed", "left", "reset"]
"""The answer's own end; an error; the client went; its frontend died."""


@dataclass
class Answer:
    """What one client saw."""

    request: Request
    frontend: str
    """Whom it asked."""
    deadline_s: float
    text: str = ""
    entries: int = 0
    """Log-probabilities."""
    end: End | None = None
    ended_s: float = 0.0
    error: HeadraceError | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Expected:
    """What an undisturbed engine answers."""

    text: str
    entries: int
    end: Literal["stop", "length"]
    completion_tokens: int


def expected(request: Request) -> Expected:
    """Asks the model itself, one token after another."""
    model = model_of(facts_of(1))
    history = list(request.tokens)
    limit = min(request.sampling.max_tokens, CONTEXT_LENGTH - len(history))
    end: Literal["stop", "length"] = "length"
    while len(history) - len(request.tokens) < limit:
        work = Work(
            sequence=0,
            history=history,
            start=len(history) - 1,
            end=len(history),
            blocks=(),
            sampling=request.sampling,
            prompt_tokens=len(request.tokens),
        )
        (drawn,) = model.draw([work])
        assert drawn is not None
        history.append(drawn.token)
        if drawn.token == EOS and not request.sampling.ignore_eos:
            end = "stop"
            break
    produced = history[len(request.tokens) :]
    shown = produced[:-1] if end == "stop" else produced
    text = "".join(map(letter, shown))
    cut = min((text.index(stop) for stop in request.stops if stop in text), default=None)
    if cut is not None:
        return Expected(text[:cut], cut, "stop", cut + 1)
    return Expected(text, len(shown), end, len(produced))


def job_of(request: Request, name: str) -> Job:
    """As the frontend makes it of a body."""
    packed = pack_tokens(request.tokens)
    return Job(
        request=name,
        model=MODEL,
        prompt=packed,
        prompt_tokens=len(request.tokens),
        hashes=pack_hashes(sequence_hashes(packed, BLOCK_SIZE, seed_of("", request.salt))),
        sampling=request.sampling,
        salt=request.salt,
        session="",
    )


async def ask(frontend: Frontend, answer: Answer, tell: Callable[[str], None]) -> None:
    """Asks, and reads until the end, or until the client's patience is over."""
    request = answer.request
    loop = asyncio.get_running_loop()
    tell(f"{request.name} asks {answer.frontend}")
    try:
        async with asyncio.timeout(request.patience_s):
            answer.end = await _read(frontend, answer)
    except TimeoutError:
        answer.end = "left"
    except HeadraceError as wrong:
        answer.end, answer.error = "failed", wrong
    answer.ended_s = loop.time()
    tell(f"{request.name} ends: {answer.end} {answer.error or ''}")


async def _read(frontend: Frontend, answer: Answer) -> Literal["stop", "length"]:
    request = answer.request
    output = Output(TOKENS, request.stops)
    with frontend.admitted(4 * len(request.tokens)):
        async with frontend.open(job_of(request, request.name), output, answer.deadline_s) as stream:
            async for delta in stream:
                answer.text += delta.text
                answer.entries += len(delta.entries)
            answer.usage = stream.usage
            assert stream.finish in ("stop", "length")
            return "stop" if stream.finish == "stop" else "length"


def judge(answer: Answer) -> str:
    """What is wrong with an answer; empty: nothing."""
    request, due = answer.request, expected(answer.request)
    if answer.end is None:
        return f"{request.name} has no end"
    if isinstance(answer.error, InvalidRequest):
        return f"{request.name} was called invalid: {answer.error}"
    if not due.text.startswith(answer.text):
        return f"{request.name} got {answer.text!r} instead of {due.text!r}"
    if answer.end not in ("stop", "length"):
        return ""
    if (answer.text, answer.end) != (due.text, due.end):
        return f"{request.name} ended by {answer.end} with {answer.text!r}; by {due.end} with {due.text!r} was due"
    usage = answer.usage
    if usage is None or (usage.prompt_tokens, usage.completion_tokens) != (len(request.tokens), due.completion_tokens):
        return f"{request.name} counted {usage}, {due.completion_tokens} were due"
    if request.sampling.logprobs >= 0 and answer.entries != due.entries:
        return f"{request.name} got {answer.entries} log-probabilities, {due.entries} were due"
    return ""
