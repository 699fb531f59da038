"""Clients: what they ask, what they get, and what they should have got."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal
from zlib import crc32

import msgspec

from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Output
from services.frontend.protocol.chat_chunks import Usage
from services.frontend.requests.service import RequestService
from services.frontend.requests.stream import InferenceRequest
from services.frontend.serving.choices import open_choices
from services.worker.contracts.runner import Work
from shared.errors import HeadraceError, InvalidRequest
from shared.hashing import pack_hashes, pack_tokens, seed_of, sequence_hashes
from shared.messages.frames import NOT_BEGUN
from tests.simulation.plan import BLOCK_SIZE, CONTEXT_LENGTH, EMBEDDING_SIZE, EOS, VOCABULARY, Request, letter
from tests.simulation.process import MODEL, facts_of, model_of

_LETTERS = [b"" if token == EOS else letter(token).encode() for token in range(VOCABULARY)]
TOKENS = TokenBytes(_LETTERS, _LETTERS, strip_first_space=False)

End = Literal["answered", "failed", "left", "reset"]
"""The answer's own end; an error; the client went; its frontend died."""


@dataclass
class Choice:
    """What one client saw of one choice."""

    text: str = ""
    entries: int = 0
    """Log-probabilities."""
    embedding: bytes = b""
    finish: str = ""


@dataclass
class Answer:
    """What one client saw."""

    request: Request
    frontend: str
    """The frontend that it asked."""
    deadline_s: float
    choices: list[Choice] = field(default_factory=list)
    end: End | None = None
    ended_s: float = 0.0
    heard_s: float = 0.0
    """When something of it came last."""
    error: HeadraceError | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Expected:
    """What an undisturbed engine answers."""

    text: str
    entries: int
    end: Literal["stop", "length"]
    completion_tokens: int
    embedding: bytes = b""


def expected(request: Request, prompt: tuple[int, ...]) -> Expected:
    """Asks the model itself, one token after another; what is embedded, for all of it at once."""
    model = model_of(facts_of(1))
    history = list(prompt)
    if request.sampling.pooling:
        (drawn,) = model.draw([Work(0, history, 0, len(history), (), request.sampling, len(history))])
        assert drawn is not None
        return Expected("", 0, "stop", 0, drawn.embedding)
    limit = min(request.sampling.max_tokens, CONTEXT_LENGTH - len(history))
    end: Literal["stop", "length"] = "length"
    while len(history) - len(prompt) < limit:
        work = Work(
            sequence=0,
            history=history,
            start=len(history) - 1,
            end=len(history),
            blocks=(),
            sampling=request.sampling,
            prompt_tokens=len(prompt),
        )
        (drawn,) = model.draw([work])
        assert drawn is not None
        history.append(drawn.token)
        if drawn.token == EOS and not request.sampling.ignore_eos:
            end = "stop"
            break
    produced = history[len(prompt) :]
    shown = produced[:-1] if end == "stop" else produced
    text = "".join(map(letter, shown))
    cut = min((text.index(stop) for stop in request.stops if stop in text), default=None)
    if cut is not None:
        return Expected(text[:cut], cut, "stop", cut + 1)
    return Expected(text, len(shown), end, len(produced))


def requests_of(request: Request, deadline_s: float) -> list[list[InferenceRequest]]:
    """For each prompt the requests of its choices, as the frontend makes them from a body."""
    prompts = (request.tokens, *request.others)
    if len(prompts) * request.choices == 1:
        return [[_inference_request(request, request.name, request.tokens, 0, deadline_s, is_follower=False)]]
    return [
        [
            _inference_request(
                request,
                f"{request.name}/{at * request.choices + draw}",
                tokens,
                draw,
                deadline_s,
                is_follower=at + draw > 0,
            )
            for draw in range(request.choices)
        ]
        for at, tokens in enumerate(prompts)
    ]


def _inference_request(
    request: Request, name: str, tokens: tuple[int, ...], draw: int, deadline_s: float, *, is_follower: bool
) -> InferenceRequest:
    packed = pack_tokens(tokens)
    return InferenceRequest(
        id=name,
        model=MODEL,
        prompt=packed,
        prompt_tokens=len(tokens),
        hashes=pack_hashes(sequence_hashes(packed, BLOCK_SIZE, seed_of("", request.salt))),
        sampling=msgspec.structs.replace(request.sampling, seed=draw),
        salt=request.salt,
        affinity_key=request.name if request.choices > 1 else "",
        deadline=deadline_s,
        output=Output(TOKENS, request.stops),
        embedding_size=EMBEDDING_SIZE if request.sampling.pooling else 0,
        is_follower=is_follower,
        repeats_prompt=draw > 0,
        priority=crc32(request.name.encode()) % 3 - 1,
    )


async def ask(frontend: RequestService, answer: Answer, tell: Callable[[str], None]) -> None:
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


async def _read(frontend: RequestService, answer: Answer) -> Literal["answered"]:
    request = answer.request
    prompts = requests_of(request, answer.deadline_s)
    answer.choices = [Choice() for choices in prompts for _ in choices]
    with frontend.admit(4 * len(request.tokens)), open_choices(frontend.open, prompts) as choices:
        async for index, delta in choices:
            choices.validate()
            answer.heard_s = asyncio.get_running_loop().time()
            seen = answer.choices[index]
            if delta is None:
                seen.finish, seen.embedding = choices.streams[index].finish, choices.streams[index].embedding
            else:
                seen.text += delta.text
                seen.entries += len(delta.entries)
        answer.usage = choices.usage
        return "answered"


def judge(answer: Answer) -> str:
    """What is wrong with an answer. Empty if there is nothing."""
    request = answer.request
    prompts = (request.tokens, *request.others)
    due = [one for tokens in prompts for one in [expected(request, tokens)] * request.choices]
    if answer.end is None:
        return f"{request.name} has no end"
    if isinstance(answer.error, InvalidRequest):
        return f"{request.name} was called invalid: {answer.error}"
    if str(answer.error).startswith(NOT_BEGUN) and answer.choices[0].text:
        return f"{request.name} began, and was told that it did not"
    for seen, one in zip(answer.choices, due, strict=answer.end == "answered"):
        if wrong := _judge(answer, seen, one):
            return f"{request.name} {wrong}"
    usage, counted = answer.usage, (sum(map(len, prompts)), sum(one.completion_tokens for one in due))
    if answer.end == "answered" and (usage is None or (usage.prompt_tokens, usage.completion_tokens) != counted):
        return f"{request.name} counted {usage}, {counted} were due"
    return ""


def _judge(answer: Answer, seen: Choice, due: Expected) -> str:
    if not due.text.startswith(seen.text):
        return f"got {seen.text!r} instead of {due.text!r}"
    if answer.end != "answered":
        return ""
    if (seen.text, seen.finish) != (due.text, due.end):
        return f"ended by {seen.finish} with {seen.text!r}; by {due.end} with {due.text!r} was due"
    if seen.embedding != due.embedding:
        return f"got the vector {seen.embedding!r} instead of {due.embedding!r}"
    if answer.request.sampling.logprobs >= 0 and seen.entries != due.entries:
        return f"got {seen.entries} log-probabilities, {due.entries} were due"
    return ""
