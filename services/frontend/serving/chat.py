"""Text from a model: a chat, or a completion.

request ─▶ find the model ─▶ prompts ─▶ fit ─▶ a Job a choice ─▶ Choices ─▶ Reply: whole, or in chunks
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from services.frontend.auth.accounts import TokenUse
from services.frontend.metrics import Metrics
from services.frontend.models.chat_template import RENDERED_LIMIT_CHARACTERS
from services.frontend.models.model import Model, ModelLimits
from services.frontend.models.preprocess import (
    Prompt,
    check_encoded,
    check_vocabulary,
    encode_between,
    encode_chat,
    encode_text,
    fit_context,
    render_chat,
)
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.output import Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.protocol import chat
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.chat_chunks import AnswerEncoder, ChatEncoder, CompletionEncoder
from services.frontend.protocol.completions import DEFAULT_TOKENS, CompletionRequest, prompts_of
from services.frontend.protocol.reasoning import DEFAULT_REASONING, ReasoningPlan, plan_reasoning
from services.frontend.requests.deadline import deadline_of
from services.frontend.requests.service import RequestService
from services.frontend.requests.stream import InferenceRequest, Stream
from services.frontend.serving.chat_reply import ChatReply
from services.frontend.serving.choices import Choices, Planned, ask
from services.frontend.serving.reply import Reply
from services.frontend.serving.request_context import RequestContext, RequestId
from services.frontend.serving.tokenize import detokenize
from services.frontend.structured.compiler import GrammarCompiler
from services.frontend.structured.grammar import AnswerGrammar, answer_grammar
from services.frontend.tool_parsers import reasoning
from services.frontend.tool_parsers.formats import FORMATS
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.parser import AnswerParser, ParsePlan
from shared.errors import InvalidRequest, RequestTimeout
from shared.hashing import pack_hashes, pack_tokens, seed_of, sequence_hashes


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
    def job(self) -> InferenceRequest:
        """Of the first choice."""
        return self.stream.request


class ServingChat:
    """Turns requests into replies."""

    def __init__(
        self,
        frontend: RequestService,
        models: ModelRegistry,
        pool: Executor,
        metrics: Metrics,
        grammars: GrammarCompiler,
    ) -> None:
        self._frontend = frontend
        self._grammars = grammars
        self._metrics = metrics
        self._models = models
        self._pool = pool

    @asynccontextmanager
    async def answer(self, request: ChatRequest | CompletionRequest, asking: RequestContext) -> AsyncIterator[Reply]:
        """In the shape that the request asks for. Raises as `open` does."""
        async with self.open(request, asking) as opened:
            shapes = _shapes(request, asking.id, opened)
            streams, with_usage = bool(request.stream), _with_usage(request)
            del request  # a megabyte of a long prompt, that nobody needs while its answer streams
            yield ChatReply(shapes, opened.choices, opened.echoes, streams=streams, with_usage=with_usage)

    @asynccontextmanager
    async def open(self, request: ChatRequest | CompletionRequest, asking: RequestContext) -> AsyncIterator[Opened]:
        """Leaving it cancels what is still running, and says what it has cost its key. Raises InvalidRequest,
        Unavailable and RequestTimeout."""
        deadline = deadline_of(request.deadline_s, asking.deadline_header, asking.received_s, self._frontend.limits)
        model, limits = self._models.find(request.model)
        try:
            async with asyncio.timeout_at(deadline.at):
                prompts, plan = await self._prompts(request, model, limits)
                holding = await self._held(request, model, limits, plan)
                echoes = await self._echoes(request, model)
        except TimeoutError:
            raise RequestTimeout("the request's deadline passed before its prompt was tokenised") from None
        each, place, name = request.n or 1, asking.permit, model.name
        computed, answered = sum(prompt.count for prompt in prompts), each * len(prompts)
        place.add_tokens(computed + each * sum(prompt.max_tokens for prompt in prompts), answered)
        charged = computed + answered * (chat.token_limit(request)[0] or 0)
        if place.account is not None:
            place.account.charge_tokens(charged, asyncio.get_running_loop().time())
            place.spent = TokenUse(charged)
        planned = [
            [Planned(job, self._output(request, model, plan)) for job in jobs]
            for jobs in _jobs(asking.id.unique, request, model, prompts, holding)
        ]
        parsed = isinstance(planned[0][0].output, ParsedOutput)
        del request, prompts, model
        async with ask(
            lambda one, reader: self._frontend.open(one.job, one.output, deadline.at, reader), planned
        ) as choices:
            try:
                yield Opened(name, choices, echoes, parsed)
            finally:
                place.spent = _spent(charged, choices, hurried=deadline.shortened)

    async def _echoes(self, request: ChatRequest | CompletionRequest, model: Model) -> list[str]:
        """For each choice. Raises InvalidRequest."""
        each = request.n or 1
        if isinstance(request, ChatRequest):
            return [""] * each
        prompts = prompts_of(request)
        if not request.echo:
            return [""] * (each * len(prompts))
        texts = [one if isinstance(one, str) else await detokenize(model, one, param=param) for param, one in prompts]
        if each * sum(map(len, texts)) > RENDERED_LIMIT_CHARACTERS:
            wrong = f"echo: the prompts of all answers have more than {RENDERED_LIMIT_CHARACTERS} characters"
            raise InvalidRequest(wrong, param="echo")
        return [text for text in texts for _ in range(each)]

    def _check_choices(self, each: int, prompts: int) -> None:
        """Raises InvalidRequest."""
        limits = self._frontend.limits
        limit = min(limits.choices, limits.requests)
        if each * prompts > limit:
            param = "n" if prompts == 1 else "prompt"
            raise InvalidRequest(f"{param}: {each * prompts} choices in one request, more than {limit}", param=param)

    async def _prompts(
        self, request: ChatRequest | CompletionRequest, model: Model, limits: ModelLimits
    ) -> tuple[list[Prompt], ParsePlan]:
        """With what may be in the answers. Raises InvalidRequest."""
        for at, token in enumerate(request.stop_token_ids or ()):
            if token >= limits.vocab_size:
                raise InvalidRequest(
                    f"token id {token} is outside the vocabulary of {limits.vocab_size}", param=f"stop_token_ids[{at}]"
                )
        _check_biases(request.logit_bias or {}, model, limits)
        max_tokens, limit_param = chat.token_limit(request)

        def fitted(tokens: bytes, param: str, default: int | None) -> Prompt:
            return fit_context(
                tokens, limits, max_tokens=max_tokens, default=default, param=param, limit_param=limit_param
            )

        if isinstance(request, ChatRequest):
            self._check_choices(request.n or 1, 1)
            tokens, plan = await self._chat(request, model, limits)
            return [fitted(tokens, "messages", None)], plan
        prompts = prompts_of(request)
        self._check_choices(request.n or 1, len(prompts))
        found: list[Prompt] = []
        for param, given in prompts:
            if found:
                await asyncio.sleep(0)  # each takes a millisecond of the loop at most, all of them 100
            tokens = await self._text(given, request.suffix or "", model, limits, param)
            found.append(fitted(tokens, param, DEFAULT_TOKENS))
        return found, ParsePlan()

    async def _chat(self, request: ChatRequest, model: Model, limits: ModelLimits) -> tuple[bytes, ParsePlan]:
        tools = chat.offered_tools(request)
        more = _thought(request, model).template_kwargs
        text = await render_chat(model, chat.messages_as_rendered(request.messages), self._pool, tools, more)
        plan = ParsePlan(model.tool_format if tools else None, model.thinks, reasoning.open_in(text))
        tokens = await encode_chat(model, text, self._pool)
        check_encoded(model, tokens, limits, param="messages")
        return tokens, plan

    async def _text(
        self, given: str | Sequence[int], suffix: str, model: Model, limits: ModelLimits, param: str
    ) -> bytes:
        if not isinstance(given, str):
            check_vocabulary(given, limits, param=param)
            return pack_tokens(given)
        if suffix:
            tokens = await encode_between(model, given, suffix, self._pool, param=param)
        else:
            tokens = await encode_text(model, given, self._pool, param=param)
        check_encoded(model, tokens, limits, param=param)
        return tokens

    async def _held(
        self, request: ChatRequest | CompletionRequest, model: Model, limits: ModelLimits, plan: ParsePlan
    ) -> AnswerGrammar | None:
        """What the answer is held to; None: nothing. Raises InvalidRequest."""
        thought = _thought(request, model) if isinstance(request, ChatRequest) else DEFAULT_REASONING
        found = answer_grammar(request, plan, model.marks, thought)
        if found is None:
            return None
        if not limits.grammars:
            wrong = f"{found.param}: not every worker of {model.name!r} can be held to a grammar"
            raise InvalidRequest(wrong, param=found.param, code="unsupported_parameter")
        if found.checked:
            await self._grammars.check(found.checked, found.param, found.parts)
        return found

    def _output(self, request: ChatRequest | CompletionRequest, model: Model, plan: ParsePlan) -> Output | ParsedOutput:
        """Nothing more than an Output, where the answer can only be content."""
        stops = chat.stop_strings(request)
        if isinstance(request, CompletionRequest) or not (plan.reasoning or plan.calls):
            return Output(model.token_bytes, stops)
        if plan.calls is None:
            return ParsedOutput(Output(model.marked_token_bytes, stops), AnswerParser(plan, ParseResult()))
        count, form = self._metrics.tool_calls, FORMATS[plan.calls]
        found = ParseResult(
            frozenset(tool.function.name for tool in request.tools or ()),
            lambda: f"{form.id_prefix}{random.getrandbits(4 * form.id_digits):0{form.id_digits}x}",
            count=lambda outcome: count.labels(plan.calls, outcome).inc(),
            parallel=request.parallel_tool_calls is not False,
        )
        return ParsedOutput(Output(model.marked_token_bytes, stops), AnswerParser(plan, found))


def _thought(request: ChatRequest, model: Model) -> ReasoningPlan:
    """Raises InvalidRequest."""
    offers = request.tools and request.tool_choice != "none"
    template = model.tool_template if offers else model.template
    return plan_reasoning(
        request.reasoning_effort,
        request.thinking_token_budget,
        request.chat_template_kwargs or {},
        reads=() if template is None else template.reads,
        reasons=model.thinks,
    )


def _check_biases(biases: Mapping[str, float], model: Model, limits: ModelLimits) -> None:
    """Raises InvalidRequest."""
    if biases and not limits.biases:
        wrong = f"logit_bias: not every worker of {model.name!r} adds one"
        raise InvalidRequest(wrong, param="logit_bias", code="unsupported_parameter")
    for token in biases:
        if int(token) >= limits.vocab_size:
            wrong = f"token id {token} is outside the vocabulary of {limits.vocab_size}"
            raise InvalidRequest(wrong, param=f"logit_bias[{token}]")


def _spent(charged: int, choices: Choices, *, hurried: bool) -> TokenUse:
    """Nothing, where it failed before its first token; a client that goes before it, or gave less time than there is
    (`hurried`), has had its prompt computed."""
    usage = choices.usage
    if choices.failed and not usage.completion_tokens and not (hurried and choices.late):
        return TokenUse(charged)
    return TokenUse(charged, usage.prompt_tokens, usage.completion_tokens)


def _jobs(
    name: str,
    request: ChatRequest | CompletionRequest,
    model: Model,
    prompts: Sequence[Prompt],
    holding: AnswerGrammar | None,
) -> Iterator[list[InferenceRequest]]:
    """For each prompt those of its choices. `name`: of the request; its choices, where it has several, are `name/0`
    and so on."""
    salt, each = request.cache_salt or "", request.n or 1
    session = (request.prompt_cache_key or "") if isinstance(request, ChatRequest) else ""
    alone = each * len(prompts) == 1
    grammar, held_by = ("", "") if holding is None else (holding.grammar, holding.param)
    for at, prompt in enumerate(prompts):
        sampling = chat.sampling_of(request, prompt.max_tokens, random.getrandbits(64), grammar)
        if isinstance(request, CompletionRequest) and request.suffix and model.fim is not None:
            sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *model.fim.ends))
        first = InferenceRequest(
            id=name if alone else f"{name}/{at * each}",
            model=model.name,
            prompt=prompt.tokens,
            prompt_tokens=prompt.count,
            hashes=pack_hashes(sequence_hashes(prompt.tokens, model.block_size, seed_of("", salt))),
            sampling=sampling,
            salt=salt,
            affinity_key=session or (f"{name}/{at}" if each > 1 else ""),  # else a prompt's choices may go apart
            grammar_param=held_by,
            is_follower=at > 0,
        )
        again = replace(first, follows=True, repeats=True)
        others = [
            replace(again, request=f"{name}/{at * each + draw}", sampling=replace(sampling, seed=seed))
            for draw in range(1, each)
            for seed in [(sampling.seed + draw) & ((1 << 64) - 1)]  # as vLLM has it
        ]
        yield [first, *others]


def _shapes(request: ChatRequest | CompletionRequest, named: RequestId, opened: Opened) -> list[AnswerEncoder]:
    """Of each choice."""
    identity = (named.unique, int(time.time()), opened.model)
    with_logprobs, with_usage = chat.logprobs_of(request) >= 0, _with_usage(request)
    indices = range(len(opened.choices))
    if isinstance(request, CompletionRequest):
        completion = partial(CompletionEncoder, *identity, with_logprobs=with_logprobs, with_usage=with_usage)
        return [completion(index=index) for index in indices]
    tier = request.service_tier is not None
    shape = partial(ChatEncoder, *identity, with_logprobs=with_logprobs, with_usage=with_usage)
    return [shape(parsed=opened.parsed, tier=tier, index=index) for index in indices]


def _with_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)
