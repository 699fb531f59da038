"""Chats and completions: text from a model, for /v1/chat/completions, /v1/completions and /v1/responses.

ChatRequest ──prepare──▶ PreparedChat ──run──▶ Choices ─▶ ChatReply: one body, or chunks
             template, tokens, grammar         one InferenceRequest
             and admission                     for each choice
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from services.frontend.auth.accounts import TokenUse
from services.frontend.config import FrontendConfig
from services.frontend.metrics import Metrics
from services.frontend.models import preprocess
from services.frontend.models.chat_template import RENDERED_LIMIT_CHARACTERS
from services.frontend.models.encode_pool import EncodePool, KeyPool
from services.frontend.models.model import Model, ModelLimits
from services.frontend.models.preprocess import TEXT_TOKENS_LIMIT, Prompt
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.detokenize import TokenBytes
from services.frontend.output.output import Delta, Output
from services.frontend.output.parsed_output import ParsedOutput
from services.frontend.output.prompt_entries import PromptEntries
from services.frontend.protocol import chat
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.chat_chunks import AnswerEncoder, ChatEncoder, CompletionEncoder
from services.frontend.protocol.completions import (
    DEFAULT_TOKENS,
    PROMPT_LOGPROBS_LIMIT,
    CompletionRequest,
    prompts_of,
    with_prompt_logprobs,
)
from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.messages import text_of
from services.frontend.protocol.reasoning import DEFAULT_REASONING
from services.frontend.protocol.tools import CustomFunction
from services.frontend.requests.admission import Permit
from services.frontend.requests.deadline import deadline_of
from services.frontend.requests.priority import served_priority
from services.frontend.requests.request_trace import CallSpans, RequestTrace
from services.frontend.requests.service import RequestService
from services.frontend.requests.stream import InferenceRequest
from services.frontend.serving.choices import Choices, open_choices
from services.frontend.serving.prompts import chat_prompt, key_pool, plan_of_reasoning
from services.frontend.serving.reply import ChatReply, Opening
from services.frontend.serving.request_context import RequestContext, RequestId
from services.frontend.serving.tokenize import detokenize
from services.frontend.serving.trace_attributes import answer_attributes, asked_attributes
from services.frontend.structured.compiler import GrammarCompiler
from services.frontend.structured.grammar import AnswerGrammar, answer_grammar
from services.frontend.tool_parsers.formats import FORMATS
from services.frontend.tool_parsers.parse_result import ParseResult
from services.frontend.tool_parsers.parser import AnswerParser, ParsePlan
from shared.errors import InvalidRequest, RequestTimeout
from shared.hashing import pack_hashes, pack_tokens, seed_of, sequence_hashes
from shared.messages.cards import SamplingDefaults
from shared.messages.generate import Sampling

TextRequest = ChatRequest | CompletionRequest
"""The body of a request for text."""


class PreparedChat(Struct, frozen=True):
    """A request that is checked, tokenised and admitted; nothing was sent to a router or a worker yet."""

    model: str
    prompts: Sequence[Sequence[InferenceRequest]]
    """For each prompt the requests of its choices."""
    echoes: Sequence[Delta]
    """For each choice what is before its answer, mostly nothing."""
    parsed: bool
    """Whether the text is parsed for reasoning and tool calls."""
    charged: int
    """The tokens that were charged to its API key."""
    deadline_shortened: bool
    """Whether the client asked for less time than the server's default."""


class ServingChat(Struct, frozen=True):
    """Answers chats and completions."""

    service: RequestService
    models: ModelRegistry
    pool: EncodePool
    metrics: Metrics
    grammars: GrammarCompiler
    config: FrontendConfig

    @asynccontextmanager
    async def answer(self, request: TextRequest, context: RequestContext) -> AsyncIterator[ChatReply | bytes]:
        """Answer in the form that the request asks for: a stream, or one JSON object. Raise what `prepare` and `run`
        raise."""
        if request.stream:
            context.announce(Opening(keepalive_chunk=partial(_keepalive_chunk, request, context.id)))
        prepared = await self.prepare(request, context)
        encoders = _encoders(request, context.id, prepared)
        streamed, with_usage = bool(request.stream), _with_usage(request)
        each_usage = with_usage and request.stream_options is not None and request.stream_options.continuous_usage_stats
        del request  # up to a megabyte of prompt, which the answer does not need
        async with self.run(prepared, context) as choices:
            reply = ChatReply(encoders, choices, prepared.echoes, with_usage, bool(each_usage))
            yield reply if streamed else await reply.full_body()

    async def prepare(
        self, request: TextRequest, context: RequestContext, default_tokens: int | None = DEFAULT_TOKENS
    ) -> PreparedChat:
        """Check and tokenise a request, admit its tokens and charge them to its key. `default_tokens` is the limit of a
        completion that has none; None: the rest of the context. Raise InvalidRequest, Overloaded, RateLimited,
        Unavailable and RequestTimeout."""
        deadline = deadline_of(request.deadline_s, context.deadline_header, context.received_s, self.service.limits)
        priority = served_priority(request.priority, context.lowest_priority)
        context.permit.model = self.models.base_of(request.model)
        trace = context.trace
        if trace is not None:
            trace.attributes |= asked_attributes(request)
        model, limits = self.models.find(request.model)
        if not limits.generates:
            why = f"not every worker of {model.name!r} generates text; /v1/embeddings has its embeddings"
            raise field_error("model", why, UNSUPPORTED)
        try:
            async with asyncio.timeout_at(deadline.at):
                with nullcontext() if trace is None else trace.span("tokenise"):
                    prompts, plan = await self._prompts(request, model, limits, context, default_tokens)
                    grammar = await self._grammar(request, model, limits, plan, context)
                    plan = replace(plan, held=grammar is not None)
                    texts = await self._echoed_texts(request, model)
        except TimeoutError:
            raise RequestTimeout("the request's deadline passed before its prompt was tokenised") from None
        self.metrics.hops["tokenise"].observe(asyncio.get_running_loop().time() - context.received_s)
        if trace is not None:
            trace.attributes["gen_ai.response.model"] = model.name
            trace.attributes["gen_ai.usage.input_tokens"] = sum(prompt.count for prompt in prompts)
        charged = _admit(request, prompts, context.permit)
        requests = self._requests(
            context,
            request,
            model,
            prompts,
            texts,
            plan,
            grammar,
            deadline.at,
            priority,
            sampling_defaults(limits, self.config),
        )
        return PreparedChat(
            model=model.name,
            prompts=requests,
            echoes=[
                Delta(text) if one.prompt_entries is None else Delta(text, (one.prompt_entries.opening(),))
                for text, choices in zip(texts, requests, strict=True)
                for one in choices
            ],
            parsed=_is_parsed(request, plan),
            charged=charged,
            deadline_shortened=deadline.shortened,
        )

    async def count_prompt(self, request: ChatRequest, context: RequestContext) -> int:
        """Return how many tokens the prompt of a chat has. Raise InvalidRequest, Unavailable and RequestTimeout."""
        deadline = deadline_of(request.deadline_s, context.deadline_header, context.received_s, self.service.limits)
        try:
            async with asyncio.timeout_at(deadline.at):
                pool = key_pool(self.pool, context.permit)
                tokens, _ = await chat_prompt(request, *self.models.find(request.model), pool, context.ignored)
        except TimeoutError:
            raise RequestTimeout("the request's deadline passed before its prompt was tokenised") from None
        return len(tokens) // 4

    @asynccontextmanager
    async def run(self, prepared: PreparedChat, context: RequestContext) -> AsyncIterator[Choices]:
        """Compute a prepared request. Leaving the context cancels what still runs, and notes what it cost its key."""
        async with open_choices(self.service.open, prepared.prompts) as choices:
            try:
                yield choices
            finally:
                context.permit.spent = _spent(prepared, choices)
                if context.trace is not None:
                    context.trace.attributes |= answer_attributes(choices, context.id)

    async def _echoed_texts(self, request: TextRequest, model: Model) -> list[str]:
        """Return the text before the answers of each prompt, mostly empty. Raise InvalidRequest."""
        if isinstance(request, ChatRequest):
            return [""]
        prompts = prompts_of(request)
        if not request.echo:
            return [""] * len(prompts)
        ends = request.max_tokens == 0
        texts = [
            one if isinstance(one, str) else await detokenize(model, one, param=param, ends=ends)
            for param, one in prompts
        ]
        if (request.n or 1) * sum(map(len, texts)) > RENDERED_LIMIT_CHARACTERS:
            why = f"the prompts of all answers have more than {RENDERED_LIMIT_CHARACTERS} characters"
            raise field_error("echo", why)
        return texts

    async def _prompts(
        self,
        request: TextRequest,
        model: Model,
        limits: ModelLimits,
        context: RequestContext,
        default_tokens: int | None,
    ) -> tuple[list[Prompt], ParsePlan]:
        """Tokenise the prompts; return them and what the answers are parsed for. Raise InvalidRequest."""
        preprocess.check_vocabulary(request.stop_token_ids or (), limits, param="stop_token_ids")
        _check_biases(request.logit_bias or {}, model, limits)
        if request.allowed_token_ids:
            preprocess.check_vocabulary(request.allowed_token_ids, limits, param="allowed_token_ids")
            if not limits.allowed_tokens:
                raise field_error("allowed_token_ids", f"not every worker of {model.name!r} supports it", UNSUPPORTED)
        if request.min_tokens and not limits.min_tokens:
            raise field_error("min_tokens", f"not every worker of {model.name!r} supports it", UNSUPPORTED)
        max_tokens, limit_param = chat.token_limit(request)
        if max_tokens == 0:
            max_tokens = 1  # engines compute a token after each prompt; it is dropped
        if request.max_tokens == -1:
            default_tokens = self.config.default_max_tokens or None
        prompts = [] if isinstance(request, ChatRequest) else prompts_of(request)
        choices = (request.n or 1) * (len(prompts) or 1)
        if choices > (limit := min(self.service.limits.choices, self.service.limits.requests)):
            param = "prompt" if len(prompts) > 1 else "n"
            raise field_error(param, f"{choices} choices in one request, more than {limit}")

        def fitted(tokens: bytes, default: int | None, param: str) -> Prompt:
            tokens = preprocess.truncate(tokens, request.truncate_prompt_tokens, limits, max_tokens)
            prompt = preprocess.fit_context(
                tokens, limits, max_tokens=max_tokens, default=default, param=param, limit_param=limit_param
            )
            chat.check_least_tokens(request, prompt.max_tokens)
            return prompt

        pool = key_pool(self.pool, context.permit)
        most = limits.context_length if request.truncate_prompt_tokens is None else TEXT_TOKENS_LIMIT
        if isinstance(request, ChatRequest):
            special = bool(request.add_special_tokens)
            tokens, plan = await chat_prompt(request, model, limits, pool, context.ignored, special=special, most=most)
            prompt = fitted(tokens, self.config.default_max_tokens or None, "messages")
            chat.check_prompt_ids(request, prompt.count)
            return [prompt], plan
        found: list[Prompt] = []
        for param, given in prompts:
            if found:
                await asyncio.sleep(0)  # each blocks the loop for a millisecond at most, all of them for 100
            special = request.add_special_tokens is not False
            tokens = await self._text(
                given, request.suffix or "", model, limits, pool, param, special=special, most=most
            )
            found.append(fitted(tokens, default_tokens, param))
        tokens_in_all = sum(prompt.count for prompt in found)
        chat.check_prompt_ids(request, tokens_in_all)
        if not isinstance(request, ChatRequest) and with_prompt_logprobs(request):
            _check_prompt_logprobs(request, model, limits, tokens_in_all)
        return found, ParsePlan()

    async def _text(
        self,
        given: str | Sequence[int],
        suffix: str,
        model: Model,
        limits: ModelLimits,
        pool: KeyPool,
        param: str,
        *,
        special: bool,
        most: int,
    ) -> bytes:
        if not isinstance(given, str):
            preprocess.check_vocabulary(given, limits, param=param)
            return pack_tokens(given)
        if suffix:
            tokens = await preprocess.encode_between(model, given, suffix, pool, param=param, most=most)
        else:
            tokens = await preprocess.encode(model, given, pool, special=special, param=param, most=most)
        preprocess.check_encoded(model, tokens, limits, param=param)
        return tokens

    async def _grammar(
        self, request: TextRequest, model: Model, limits: ModelLimits, plan: ParsePlan, context: RequestContext
    ) -> AnswerGrammar | None:
        """Return the grammar that constrains the answer; None if it is free. Raise InvalidRequest."""
        thought, ignored = DEFAULT_REASONING, context.ignored
        if isinstance(request, ChatRequest):
            thought = plan_of_reasoning(request, model, ignored)
        grammar = answer_grammar(
            request, plan, model.marks, thought, ignored, close=self.config.schema_objects == "closed"
        )
        if grammar is None:
            return None
        if not limits.grammars:
            raise field_error(grammar.param, f"not every worker of {model.name!r} supports grammars", UNSUPPORTED)
        if grammar.checked:
            permit = context.permit
            await self.grammars.check(
                grammar.checked, grammar.param, grammar.parts, key=permit.key, waiting=permit.waiting_grammar
            )
        return grammar

    def _requests(
        self,
        context: RequestContext,
        request: TextRequest,
        model: Model,
        prompts: Sequence[Prompt],
        texts: Sequence[str],
        plan: ParsePlan,
        grammar: AnswerGrammar | None,
        deadline: float,
        priority: int,
        defaults: SamplingDefaults,
    ) -> list[list[InferenceRequest]]:
        """Return for each prompt the requests of its choices; `texts` has what its answers begin with. Several choices
        are named `name/0` and so on."""
        found: list[list[InferenceRequest]] = []
        salt, count = context.salt(request.cache_salt), request.n or 1
        name, affinity_key = context.id.unique, request.prompt_cache_key or context.session
        alone = count * len(prompts) == 1
        grammar_text, grammar_param = ("", "") if grammar is None else (grammar.grammar, grammar.param)
        names = _named_tokens(request, model.token_bytes)
        for at, prompt in enumerate(prompts):
            sampling = chat.sampling_of(request, prompt.max_tokens, random.getrandbits(64), grammar_text, defaults)
            if isinstance(request, CompletionRequest) and request.suffix and model.fim is not None:
                sampling = replace(sampling, stop_token_ids=(*sampling.stop_token_ids, *model.fim.ends))
            text = texts[at]
            if not isinstance(request, ChatRequest) and with_prompt_logprobs(request):
                sampling = replace(sampling, prompt_logprobs=sampling.logprobs)
            first = InferenceRequest(
                id=name if alone else f"{name}/{at * count}",
                model=model.base,
                lora=model.lora,
                prompt=prompt.tokens,
                prompt_tokens=prompt.count,
                hashes=pack_hashes(sequence_hashes(prompt.tokens, model.block_size, seed_of(model.lora, salt))),
                sampling=sampling,
                salt=salt,
                # The choices of a prompt share its blocks, so they prefer one worker.
                affinity_key=affinity_key or (f"{name}/{at}" if count > 1 else ""),
                deadline=deadline,
                received_s=context.received_s,
                served=context.permit.served,
                output=self._output(request, model, plan, prompt, text, context.trace),
                prompt_entries=_prompt_entries(sampling, names, prompt, text),
                trace=context.trace,
                prompt_only=request.max_tokens == 0,
                grammar_param=grammar_param,
                is_follower=at > 0,
                priority=priority,
            )
            other = replace(first, is_follower=True, repeats_prompt=True)
            others = [
                replace(
                    other,
                    id=f"{name}/{at * count + choice}",
                    sampling=replace(sampling, seed=seed),
                    output=self._output(request, model, plan, prompt, text, context.trace),
                    prompt_entries=_prompt_entries(sampling, names, prompt, text),
                )
                for choice in range(1, count)
                for seed in [(sampling.seed + choice) & ((1 << 64) - 1)]  # as in vLLM
            ]
            found.append([first, *others])
        return found

    def _output(
        self,
        request: TextRequest,
        model: Model,
        plan: ParsePlan,
        prompt: Prompt,
        echoed: str,
        trace: RequestTrace | None,
    ) -> Output | ParsedOutput:
        """Return what turns the tokens of one choice into text, which follows `echoed`. Plain content needs no
        parser."""
        parsed = _is_parsed(request, plan)
        table = _named_tokens(request, model.marked_token_bytes if parsed else model.token_bytes)
        if request.skip_special_tokens is False:
            table = replace(table, table=table.names)
        output = Output(
            table,
            chat.stop_strings(request),
            min_tokens=request.min_tokens or 0,
            include_stop=bool(request.include_stop_str_in_output),
            with_ids=bool(request.return_token_ids),
            begins_at=len(echoed),
            before=_text_before(request, table, prompt, echoed),
        )
        if not parsed:
            return output
        if plan.calls is None:
            return ParsedOutput(output, AnswerParser(plan, ParseResult()))
        count, form = self.metrics.tool_calls, FORMATS[plan.calls]
        assert isinstance(request, ChatRequest)
        spans = None if trace is None else CallSpans(trace, plan.calls)

        def draw_id() -> str:
            if spans is not None:
                spans.begun()
            return f"{form.id_prefix}{random.getrandbits(4 * form.id_digits):0{form.id_digits}x}"

        def count_call(outcome: str) -> None:
            count.labels(plan.calls, outcome).inc()
            if spans is not None:
                spans.ended(outcome)

        result = ParseResult(
            frozenset(tool.function.name for tool in request.tools or ()),
            draw_id,
            count=count_call,
            parallel=request.parallel_tool_calls is not False,
            whole=not request.stream,
            customs=frozenset(
                tool.function.name for tool in request.tools or () if isinstance(tool.function, CustomFunction)
            ),
        )
        return ParsedOutput(output, AnswerParser(plan, result))


def sampling_defaults(limits: ModelLimits, config: FrontendConfig) -> SamplingDefaults:
    """Return the sampling parameters of requests that do not set them."""
    return limits.sampling if config.sampling_defaults == "model" else chat.OPENAI_DEFAULTS


def _is_parsed(request: TextRequest, plan: ParsePlan) -> bool:
    """Return whether the answer may have more than content: reasoning, or tool calls."""
    return isinstance(request, ChatRequest) and bool(plan.reasoning or plan.calls)


def _admit(request: TextRequest, prompts: Sequence[Prompt], permit: Permit) -> int:
    """Count the tokens of a request against the limits of the frontend and of its key, and return those charged to the
    key. Raise Overloaded and RateLimited."""
    count = request.n or 1
    prompt_tokens, choices = sum(prompt.count for prompt in prompts), count * len(prompts)
    permit.add_tokens(prompt_tokens + count * sum(prompt.max_tokens for prompt in prompts), choices)
    charged = prompt_tokens + choices * (chat.token_limit(request)[0] or 0)
    if permit.account is not None:
        permit.account.charge_tokens(charged, asyncio.get_running_loop().time())
        permit.spent = TokenUse(charged)
    return charged


def _spent(prepared: PreparedChat, choices: Choices) -> TokenUse:
    """Return what a request cost its key.

    A request that failed before its first token is free. A client that disconnects before it pays for the prompt, and
    so does a client whose own deadline, shorter than the default, has passed.
    """
    usage = choices.usage
    late = prepared.deadline_shortened and any(isinstance(error, RequestTimeout) for error in choices.errors)
    if choices.errors and not (usage.completion_tokens or late):
        return TokenUse(prepared.charged)
    return TokenUse(prepared.charged, usage.prompt_tokens, usage.completion_tokens)


def _encoders(request: TextRequest, request_id: RequestId, prepared: PreparedChat) -> list[AnswerEncoder]:
    """Return the encoder of each choice's answer."""
    identity = (request_id.unique, int(time.time()), prepared.model)
    with_logprobs, with_usage = chat.logprobs_of(request) >= 0, _with_usage(request)
    kind: Callable[..., AnswerEncoder] = CompletionEncoder
    if isinstance(request, ChatRequest):
        kind = partial(ChatEncoder, parsed=prepared.parsed, tier=request.service_tier is not None)
    prompts = [one.prompt for prompt in prepared.prompts for one in prompt] if request.return_token_ids else ()
    encoder = partial(kind, *identity, with_logprobs=with_logprobs, with_usage=with_usage, prompts=prompts)
    return [encoder(index=index) for index in range(len(prepared.echoes))]


def _keepalive_chunk(request: TextRequest, request_id: RequestId) -> bytes:
    """Return a chunk without text for a request that is not prepared yet."""
    kind: Callable[..., AnswerEncoder] = ChatEncoder if isinstance(request, ChatRequest) else CompletionEncoder
    identity = (request_id.unique, int(time.time()), request.model or "")
    encoder = kind(*identity, with_logprobs=chat.logprobs_of(request) >= 0, with_usage=_with_usage(request))
    return encoder.delta_chunk(Delta(""))


def _with_usage(request: TextRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)


def _text_before(request: TextRequest, table: TokenBytes, prompt: Prompt, echoed: str) -> bytes:
    """Return the end of the text that an answer continues; empty for the answer of a chat, which begins a text."""
    if isinstance(request, ChatRequest) and not (request.continue_final_message and text_of(request.messages[-1])):
        return b""
    return replace(table, table=table.names).end_of(prompt.tokens) if echoed else table.end_of(prompt.tokens)


def _prompt_entries(sampling: Sampling, table: TokenBytes, prompt: Prompt, echoed: str) -> PromptEntries | None:
    """Return what makes entries of the prompt's log-probabilities for one choice, before which the prompt is echoed;
    None: they are not asked for."""
    return PromptEntries(table, prompt.tokens, echoed) if sampling.prompt_logprobs >= 0 else None


def _named_tokens(request: TextRequest, table: TokenBytes) -> TokenBytes:
    """Return a model's tokens with the names that the request's log-probabilities have."""
    return replace(table, numbered=True) if request.return_tokens_as_token_ids else table


def _check_prompt_logprobs(request: CompletionRequest, model: Model, limits: ModelLimits, tokens: int) -> None:
    """Raise InvalidRequest for log-probabilities of prompts, with these `tokens` in all, that workers do not compute or
    that would be too many."""
    if not limits.prompt_logprobs:
        why = (
            f"not every worker of {model.name!r} computes log-probabilities of the prompt: echo without logprobs works"
        )
        raise field_error("logprobs", why, UNSUPPORTED)
    count = tokens * (request.n or 1) * ((request.logprobs or 0) + 1)
    if count > PROMPT_LOGPROBS_LIMIT:
        why = f"with echo, {count} log-probabilities of prompt tokens, more than {PROMPT_LOGPROBS_LIMIT}"
        raise field_error("logprobs", f"{why}; ask for fewer likeliest tokens, shorter prompts or fewer choices")


def _check_biases(biases: Mapping[str, float], model: Model, limits: ModelLimits) -> None:
    """Raise InvalidRequest for a `logit_bias` that a worker would not apply."""
    if biases and not limits.biases:
        raise field_error("logit_bias", f"not every worker of {model.name!r} supports it", UNSUPPORTED)
    for token in biases:
        if int(token) >= limits.vocab_size:
            wrong = f"token id {token} is outside the vocabulary of {limits.vocab_size}"
            raise InvalidRequest(wrong, param=f"logit_bias[{token}]")
