"""Text from a model: a chat, or a completion.

request ─▶ find the model ─▶ prompt ─▶ fit ─▶ Job ─▶ Frontend.open ─▶ Reply: whole, or in chunks
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from msgspec import Struct

from services.frontend import openai
from services.frontend.accounts import Spent
from services.frontend.answers import ChatShape, CompletionShape, Shape
from services.frontend.asking import Asking, RequestId
from services.frontend.deadline import allowed_s
from services.frontend.grammars import Grammars
from services.frontend.metrics import Metrics
from services.frontend.model import Limits, Model
from services.frontend.models import Models
from services.frontend.openai import ChatRequest, CompletionRequest
from services.frontend.output import Output
from services.frontend.parsed_output import ParsedOutput
from services.frontend.preprocess import (
    Prompt,
    check_encoded,
    check_vocabulary,
    encode_chat,
    encode_text,
    fit,
    render_chat,
)
from services.frontend.reply import Chunk, Reply
from services.frontend.service import Frontend
from services.frontend.stream import Job, Stream, join
from services.frontend.tools import thinking
from services.frontend.tools.formats import FORMATS
from services.frontend.tools.found import Found
from services.frontend.tools.parser import Parser, Plan
from shared.errors import InvalidRequest, RequestTimeout
from shared.hashing import pack_hashes, pack_tokens, seed_of, sequence_hashes


class Generated:
    """One request's answer, in the shape of its operation."""

    def __init__(self, shape: Shape, stream: Stream, *, streams: bool, with_usage: bool) -> None:
        self.streams = streams
        """Whether the client wants chunks."""
        self._with_usage = with_usage
        self._shape = shape
        self._stream = stream

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises what ended the request."""
        deltas = [delta async for delta in self._stream]
        return self._shape.whole(join(deltas), self._stream.finish, self._stream.usage)

    def nothing(self) -> bytes:
        """A chunk that adds nothing to the answer; it may come at any time before the last one."""
        return self._shape.chunk(join(()))

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """The answer in pieces; the first comes with the first text, so that errors before it stay errors.

        Once that is out, pieces go to `send`, where there is one; only what it does not take comes here.
        """
        shape, stream, opened = self._shape, self._stream, False
        async for delta in stream:
            if not opened and (opening := shape.opening()) is not None:
                yield Chunk(opening, more=True)
            opened = True
            yield Chunk(shape.chunk(delta))
            if send is not None:
                stream.send_by(shape.chunk, send)
        if not opened and (opening := shape.opening()) is not None:
            yield Chunk(opening, more=True)
        yield Chunk(shape.closing(stream.finish), more=True, last=not self._with_usage)
        if self._with_usage:
            yield Chunk(shape.usage(stream.usage), more=True, last=True)


class Opened(Struct, frozen=True):
    """A request that is being computed."""

    job: Job
    stream: Stream
    parsed: bool
    """Its text is taken apart: there may be more than content."""


class Generation:
    """Turns requests into replies."""

    def __init__(
        self, frontend: Frontend, models: Models, pool: Executor, metrics: Metrics, grammars: Grammars
    ) -> None:
        self._frontend = frontend
        self._grammars = grammars
        self._metrics = metrics
        self._models = models
        self._pool = pool

    @asynccontextmanager
    async def answer(self, request: ChatRequest | CompletionRequest, asking: Asking) -> AsyncIterator[Reply]:
        """In the shape that the request asks for. Raises as `open` does."""
        async with self.open(request, asking) as opened:
            shape = _shape(request, opened.job, parsed=opened.parsed)
            streams, with_usage = bool(request.stream), _with_usage(request)
            del request  # a megabyte of a long prompt, that nobody needs while its answer streams
            yield Generated(shape, opened.stream, streams=streams, with_usage=with_usage)

    @asynccontextmanager
    async def open(self, request: ChatRequest | CompletionRequest, asking: Asking) -> AsyncIterator[Opened]:
        """Leaving it cancels what is still running, and says what it has cost its key. Raises InvalidRequest,
        Unavailable and RequestTimeout."""
        started = asyncio.get_running_loop().time()
        allowed = allowed_s(request.deadline_s, asking.deadline_header, self._frontend.limits)
        deadline, hurried = started + allowed, allowed < self._frontend.limits.deadline_s
        model, limits = self._models.find(request.model)
        try:
            async with asyncio.timeout_at(deadline):
                prompt, plan = await self._prompt(request, model, limits)
                grammar = await self._grammar(request, model, limits, plan)
        except TimeoutError:
            raise RequestTimeout("the request's deadline passed before its prompt was tokenised") from None
        job, place = _job(asking.named, request, model, prompt, grammar), asking.place
        place.weigh(job.prompt_tokens + job.sampling.max_tokens)
        charged = job.prompt_tokens + (openai.token_limit(request)[0] or 0)
        if place.account is not None:
            place.account.charge(charged, asyncio.get_running_loop().time())
            place.spent = Spent(charged)
        output = self._output(request, model, plan)
        del request, prompt
        async with self._frontend.open(job, output, deadline) as stream:
            try:
                yield Opened(job, stream, isinstance(output, ParsedOutput))
            finally:
                place.spent = _spent(charged, stream, hurried=hurried)

    async def _prompt(
        self, request: ChatRequest | CompletionRequest, model: Model, limits: Limits
    ) -> tuple[Prompt, Plan]:
        """With what may be in the answer. Raises InvalidRequest."""
        plan = Plan()
        if isinstance(request, ChatRequest):
            default, param = None, "messages"
            tools = openai.offered(request)
            more = request.chat_template_kwargs or {}
            text = await render_chat(model, openai.turns(request.messages), self._pool, tools, more)
            plan = Plan(model.tool_format if tools else None, model.thinks, thinking.begun(text))
            tokens = await encode_chat(model, text, self._pool)
            check_encoded(model, tokens, limits, param=param)
        else:
            default, param = openai.DEFAULT_COMPLETION_TOKENS, "prompt"
            given = openai.prompt_of(request)
            if isinstance(given, str):
                tokens = await encode_text(model, given, self._pool)
                check_encoded(model, tokens, limits, param=param)
            else:
                check_vocabulary(given, limits, param=param)
                tokens = pack_tokens(given)
        for at, token in enumerate(request.stop_token_ids or ()):
            if token >= limits.vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary of {limits.vocab_size}", param=f"stop_token_ids[{at}]"
                )
        _check_biases(request.logit_bias or {}, model, limits)
        max_tokens, limit_param = openai.token_limit(request)
        fitted = fit(tokens, limits, max_tokens=max_tokens, default=default, param=param, limit_param=limit_param)
        return fitted, plan

    async def _grammar(self, request: ChatRequest | CompletionRequest, model: Model, limits: Limits, plan: Plan) -> str:
        """What the answer is held to; empty: nothing. Raises InvalidRequest."""
        held = openai.held(request, None if plan.calls is None else FORMATS[plan.calls].forced)
        if held is None:
            return ""
        if not limits.grammars:
            wrong = f"{held.param}: not every worker of {model.name!r} can be held to a grammar"
            raise InvalidRequest(wrong, param=held.param, code="unsupported_parameter")
        chat = isinstance(request, ChatRequest)
        grammar = held.text(thinks=chat and plan.thinks, begun=chat and plan.thinks and plan.begun)
        await self._grammars.check(grammar, held.param)
        return grammar

    def _output(self, request: ChatRequest | CompletionRequest, model: Model, plan: Plan) -> Output | ParsedOutput:
        """Nothing more than an Output, where the answer can only be content."""
        stops = openai.stops(request)
        if isinstance(request, CompletionRequest) or not (plan.thinks or plan.calls):
            return Output(model.token_bytes, stops)
        if plan.calls is None:
            return ParsedOutput(Output(model.marked_token_bytes, stops), Parser(plan, Found()))
        count, form = self._metrics.tool_calls, FORMATS[plan.calls]
        found = Found(
            frozenset(tool.function.name for tool in request.tools or ()),
            lambda: f"{form.id_prefix}{random.getrandbits(4 * form.id_digits):0{form.id_digits}x}",
            count=lambda outcome: count.labels(plan.calls, outcome).inc(),
            parallel=request.parallel_tool_calls is not False,
        )
        return ParsedOutput(Output(model.marked_token_bytes, stops), Parser(plan, found))


def _check_biases(biases: Mapping[str, float], model: Model, limits: Limits) -> None:
    """Raises InvalidRequest."""
    if biases and not limits.biases:
        wrong = f"logit_bias: not every worker of {model.name!r} adds one"
        raise InvalidRequest(wrong, param="logit_bias", code="unsupported_parameter")
    for token in biases:
        if int(token) >= limits.vocab_size:
            wrong = f"token id {token} is outside the vocabulary of {limits.vocab_size}"
            raise InvalidRequest(wrong, param=f"logit_bias[{token}]")


def _spent(charged: int, stream: Stream, *, hurried: bool) -> Spent:
    """Nothing, where it failed before its first token; a client that goes before it, or gave less time than there is
    (`hurried`), has had its prompt computed."""
    usage = stream.usage
    if stream.failed and not usage.completion_tokens and not (hurried and stream.late):
        return Spent(charged)
    return Spent(charged, usage.prompt_tokens, usage.completion_tokens)


def _job(named: RequestId, request: ChatRequest | CompletionRequest, model: Model, prompt: Prompt, grammar: str) -> Job:
    salt = request.cache_salt or ""
    return Job(
        request=named.unique,
        model=model.name,
        prompt=prompt.tokens,
        prompt_tokens=prompt.count,
        hashes=pack_hashes(sequence_hashes(prompt.tokens, model.block_size, seed_of("", salt))),
        sampling=openai.sampling(request, prompt.max_tokens, random.getrandbits(64), grammar),
        salt=salt,
        session=(request.prompt_cache_key or "") if isinstance(request, ChatRequest) else "",
    )


def _shape(request: ChatRequest | CompletionRequest, job: Job, *, parsed: bool) -> Shape:
    identity = (job.request, int(time.time()), job.model)
    with_logprobs, with_usage = openai.logprobs(request) >= 0, _with_usage(request)
    if isinstance(request, ChatRequest):
        return ChatShape(*identity, with_logprobs=with_logprobs, with_usage=with_usage, parsed=parsed)
    return CompletionShape(*identity, with_logprobs=with_logprobs, with_usage=with_usage)


def _with_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)
