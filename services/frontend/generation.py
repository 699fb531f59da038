"""Text from a model: a chat, or a completion.

request ─▶ find the model ─▶ prompts ─▶ fit ─▶ a Job a choice ─▶ Choices ─▶ Reply: whole, or in chunks
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from services.frontend import openai
from services.frontend.accounts import Spent
from services.frontend.answers import ChatShape, CompletionShape, Ended, Shape
from services.frontend.asking import Asking, RequestId
from services.frontend.choices import Choices, Planned, ask
from services.frontend.completion_fields import DEFAULT_TOKENS, CompletionRequest, prompts_of
from services.frontend.deadline import allowed_s
from services.frontend.error_object import Failure
from services.frontend.grammars import Grammars
from services.frontend.held import held
from services.frontend.metrics import Metrics
from services.frontend.model import Limits, Model
from services.frontend.models import Models
from services.frontend.openai import ChatRequest
from services.frontend.output import Delta, Output
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
from services.frontend.thinking_fields import AS_IT_IS, ThinkingAsked, thinking_asked
from services.frontend.tools import thinking
from services.frontend.tools.formats import FORMATS
from services.frontend.tools.found import Found
from services.frontend.tools.parser import Parser, Plan
from shared.errors import InvalidRequest, RequestTimeout
from shared.hashing import pack_hashes, pack_tokens, seed_of, sequence_hashes


class Generated:
    """One request's answer, in the shape of its operation."""

    named = False

    def __init__(
        self, shapes: Sequence[Shape], choices: Choices, echoes: Sequence[str], *, streams: bool, with_usage: bool
    ) -> None:
        """A shape and an echo (a text before the answer, mostly none) for each choice."""
        self.streams = streams
        """Whether the client wants chunks."""
        self._with_usage = with_usage
        self._shapes = shapes
        self._choices = choices
        self._echoes = echoes

    async def whole(self) -> bytes:
        """The answer as one JSON object. Raises what ended the request."""
        deltas = [[Delta(echo)] for echo in self._echoes]
        async for index, delta in self._choices:
            if delta is not None:
                deltas[index].append(delta)
        finishes = self._choices.streams
        ended = [Ended(index, join(found), finishes[index].finish) for index, found in enumerate(deltas)]
        return self._shapes[0].whole(ended, self._choices.usage)

    def nothing(self) -> bytes:
        """A chunk that adds nothing to the answer; it may come at any time before the last one."""
        [first, *others] = self._shapes
        return first.nothing() if others else first.chunk(join(()))  # of several, the first may have ended

    def failed(self, wrong: Failure) -> bytes:
        """As in Reply."""
        return wrong.payload

    async def chunks(self, send: Callable[[bytes], bool] | None = None) -> AsyncIterator[Chunk]:
        """The answer in pieces; the first comes with the first text, so that errors before it stay errors.

        Once that of a choice is out, its pieces go to `send`, where there is one; only what it does not take comes
        here.
        """
        choices, opened, left = self._choices, set[int](), len(self._shapes)
        async for index, delta in choices:
            shape, stream = self._shapes[index], choices.streams[index]
            if index not in opened:
                opened.add(index)
                if (opening := shape.opening()) is not None:
                    yield Chunk(opening, more=True)
                if self._echoes[index]:
                    yield Chunk(shape.chunk(Delta(self._echoes[index])), more=True)
            if delta is not None:
                yield Chunk(shape.chunk(delta))
                if send is not None:
                    stream.send_by(shape.chunk, send)
                continue
            left -= 1
            yield Chunk(shape.closing(stream.finish), more=not left, last=not left and not self._with_usage)
        if self._with_usage:
            yield Chunk(self._shapes[0].usage(choices.usage), more=True, last=True)


class Opened(Struct, frozen=True):
    """A request that is being computed."""

    model: str
    choices: Choices
    echoes: Sequence[str]
    """For each choice the text before its answer."""
    parsed: bool
    """Its text is taken apart: there may be more than content."""

    @property
    def stream(self) -> Stream:
        """Of the first choice."""
        return self.choices.streams[0]

    @property
    def job(self) -> Job:
        """Of the first choice."""
        return self.stream.job


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
            shapes = _shapes(request, asking.named, opened)
            streams, with_usage = bool(request.stream), _with_usage(request)
            del request  # a megabyte of a long prompt, that nobody needs while its answer streams
            yield Generated(shapes, opened.choices, opened.echoes, streams=streams, with_usage=with_usage)

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
                prompts, plan = await self._prompts(request, model, limits)
                grammar = await self._grammar(request, model, limits, plan)
        except TimeoutError:
            raise RequestTimeout("the request's deadline passed before its prompt was tokenised") from None
        each, place, name = request.n or 1, asking.place, model.name
        computed, answered = sum(prompt.count for prompt in prompts), each * len(prompts)
        place.weigh(computed + each * sum(prompt.max_tokens for prompt in prompts), answered)
        charged = computed + answered * (openai.token_limit(request)[0] or 0)
        if place.account is not None:
            place.account.charge(charged, asyncio.get_running_loop().time())
            place.spent = Spent(charged)
        planned = [
            [Planned(job, self._output(request, model, plan)) for job in jobs]
            for jobs in _jobs(asking.named.unique, request, model, prompts, grammar)
        ]
        echoes = [""] * answered
        parsed = isinstance(planned[0][0].output, ParsedOutput)
        del request, prompts, model
        async with ask(
            lambda one, reader: self._frontend.open(one.job, one.output, deadline, reader), planned
        ) as choices:
            try:
                yield Opened(name, choices, echoes, parsed)
            finally:
                place.spent = _spent(charged, choices, hurried=hurried)

    def _check_choices(self, each: int, prompts: int) -> None:
        """Raises InvalidRequest."""
        limits = self._frontend.limits
        limit = min(limits.choices, limits.requests)
        if each * prompts > limit:
            param = "n" if prompts == 1 else "prompt"
            raise InvalidRequest(f"{param}: {each * prompts} choices in one request, more than {limit}", param=param)

    async def _prompts(
        self, request: ChatRequest | CompletionRequest, model: Model, limits: Limits
    ) -> tuple[list[Prompt], Plan]:
        """With what may be in the answers. Raises InvalidRequest."""
        for at, token in enumerate(request.stop_token_ids or ()):
            if token >= limits.vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary of {limits.vocab_size}", param=f"stop_token_ids[{at}]"
                )
        _check_biases(request.logit_bias or {}, model, limits)
        max_tokens, limit_param = openai.token_limit(request)

        def fitted(tokens: bytes, param: str, default: int | None) -> Prompt:
            return fit(tokens, limits, max_tokens=max_tokens, default=default, param=param, limit_param=limit_param)

        if isinstance(request, ChatRequest):
            self._check_choices(request.n or 1, 1)
            tokens, plan = await self._chat(request, model, limits)
            return [fitted(tokens, "messages", None)], plan
        prompts = prompts_of(request)
        self._check_choices(request.n or 1, len(prompts))
        found = [
            fitted(await self._text(given, model, limits, param), param, DEFAULT_TOKENS) for param, given in prompts
        ]
        return found, Plan()

    async def _chat(self, request: ChatRequest, model: Model, limits: Limits) -> tuple[bytes, Plan]:
        tools = openai.offered(request)
        more = _thought(request, model).words
        text = await render_chat(model, openai.turns(request.messages), self._pool, tools, more)
        plan = Plan(model.tool_format if tools else None, model.thinks, thinking.begun(text))
        tokens = await encode_chat(model, text, self._pool)
        check_encoded(model, tokens, limits, param="messages")
        return tokens, plan

    async def _text(self, given: str | Sequence[int], model: Model, limits: Limits, param: str) -> bytes:
        if not isinstance(given, str):
            check_vocabulary(given, limits, param=param)
            return pack_tokens(given)
        tokens = await encode_text(model, given, self._pool, param=param)
        check_encoded(model, tokens, limits, param=param)
        return tokens

    async def _grammar(self, request: ChatRequest | CompletionRequest, model: Model, limits: Limits, plan: Plan) -> str:
        """What the answer is held to; empty: nothing. Raises InvalidRequest."""
        thought = _thought(request, model) if isinstance(request, ChatRequest) else AS_IT_IS
        found = held(request, plan, model.marks, thought)
        if found is None:
            return ""
        if not limits.grammars:
            wrong = f"{found.param}: not every worker of {model.name!r} can be held to a grammar"
            raise InvalidRequest(wrong, param=found.param, code="unsupported_parameter")
        if found.checked:
            await self._grammars.check(found.checked, found.param)
        return found.grammar

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


def _thought(request: ChatRequest, model: Model) -> ThinkingAsked:
    """Raises InvalidRequest."""
    offers = request.tools and request.tool_choice != "none"
    template = model.tool_template if offers else model.template
    return thinking_asked(
        request.reasoning_effort,
        request.thinking_token_budget,
        request.chat_template_kwargs or {},
        reads=() if template is None else template.reads,
        thinks=model.thinks,
    )


def _check_biases(biases: Mapping[str, float], model: Model, limits: Limits) -> None:
    """Raises InvalidRequest."""
    if biases and not limits.biases:
        wrong = f"logit_bias: not every worker of {model.name!r} adds one"
        raise InvalidRequest(wrong, param="logit_bias", code="unsupported_parameter")
    for token in biases:
        if int(token) >= limits.vocab_size:
            wrong = f"token id {token} is outside the vocabulary of {limits.vocab_size}"
            raise InvalidRequest(wrong, param=f"logit_bias[{token}]")


def _spent(charged: int, choices: Choices, *, hurried: bool) -> Spent:
    """Nothing, where it failed before its first token; a client that goes before it, or gave less time than there is
    (`hurried`), has had its prompt computed."""
    usage = choices.usage
    if choices.failed and not usage.completion_tokens and not (hurried and choices.late):
        return Spent(charged)
    return Spent(charged, usage.prompt_tokens, usage.completion_tokens)


def _jobs(
    name: str, request: ChatRequest | CompletionRequest, model: Model, prompts: Sequence[Prompt], grammar: str
) -> Iterator[list[Job]]:
    """For each prompt those of its choices. `name`: of the request; its choices, where it has several, are `name/0`
    and so on."""
    salt, each = request.cache_salt or "", request.n or 1
    session = (request.prompt_cache_key or "") if isinstance(request, ChatRequest) else ""
    alone = each * len(prompts) == 1
    for at, prompt in enumerate(prompts):
        sampling = openai.sampling(request, prompt.max_tokens, random.getrandbits(64), grammar)
        first = Job(
            request=name if alone else f"{name}/{at * each}",
            model=model.name,
            prompt=prompt.tokens,
            prompt_tokens=prompt.count,
            hashes=pack_hashes(sequence_hashes(prompt.tokens, model.block_size, seed_of("", salt))),
            sampling=sampling,
            salt=salt,
            session=session or (f"{name}/{at}" if each > 1 else ""),  # else a prompt's choices may go apart
        )
        others = [
            replace(first, request=f"{name}/{at * each + draw}", sampling=replace(sampling, seed=seed))
            for draw in range(1, each)
            for seed in [(sampling.seed + draw) & ((1 << 64) - 1)]  # as vLLM has it
        ]
        yield [first, *others]


def _shapes(request: ChatRequest | CompletionRequest, named: RequestId, opened: Opened) -> list[Shape]:
    """Of each choice."""
    identity = (named.unique, int(time.time()), opened.model)
    with_logprobs, with_usage = openai.logprobs(request) >= 0, _with_usage(request)
    indices = range(len(opened.choices))
    if isinstance(request, CompletionRequest):
        completion = partial(CompletionShape, *identity, with_logprobs=with_logprobs, with_usage=with_usage)
        return [completion(index=index) for index in indices]
    tier = request.service_tier is not None
    chat = partial(ChatShape, *identity, with_logprobs=with_logprobs, with_usage=with_usage)
    return [chat(parsed=opened.parsed, tier=tier, index=index) for index in indices]


def _with_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)
