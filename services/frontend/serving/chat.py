"""Chats and completions: text from a model, for /v1/chat/completions, /v1/completions and /v1/responses.

ChatRequest ──prepare──▶ PreparedChat ──run──▶ Choices ─▶ ChatReply: one body, or chunks
             tokens (text_prompts.py),        one InferenceRequest for each choice
             grammar, admission               (text_requests.py)
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from functools import partial

from msgspec import Struct
from msgspec.structs import replace

from services.frontend.auth.accounts import TokenUse
from services.frontend.config import FrontendConfig
from services.frontend.images.decoding import Prepared
from services.frontend.images.reader import ImageReader
from services.frontend.metrics import Metrics
from services.frontend.models.encode_pool import EncodePool
from services.frontend.models.model import ModelLimits
from services.frontend.models.preprocess import Prompt
from services.frontend.models.registry import ModelRegistry
from services.frontend.output.output import Delta
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.chat_chunks import AnswerEncoder, ChatEncoder, CompletionEncoder
from services.frontend.protocol.completions import DEFAULT_TOKENS
from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.messages import images_of
from services.frontend.protocol.parts import ImageSource
from services.frontend.protocol.reasoning import DEFAULT_REASONING
from services.frontend.protocol.text_plan import OPENAI_DEFAULTS, TextPlan, TextRequest, plan_of
from services.frontend.requests.admission import Permit
from services.frontend.requests.service import RequestService
from services.frontend.requests.stream import InferenceRequest
from services.frontend.requests.terms import deadline_of, served_priority
from services.frontend.serving.choices import Choices, open_choices
from services.frontend.serving.prompts import (
    IMAGES_READ,
    KNOWN,
    TOKENISED,
    ImageSize,
    chat_prompt,
    key_pool,
    plan_of_reasoning,
    until,
)
from services.frontend.serving.reply import ChatReply, Opening
from services.frontend.serving.request_context import RequestContext, RequestId
from services.frontend.serving.text_prompts import AskedText, TokenisedText, check_support, tokenise_text
from services.frontend.serving.text_requests import text_requests
from services.frontend.structured.compiler import GrammarCompiler
from services.frontend.structured.grammar import AnswerGrammar, answer_grammar
from services.frontend.tool_parsers.parser import ParsePlan
from shared.errors import RequestTimeout
from shared.image_size import count_tokens
from shared.messages.cards import SamplingDefaults
from shared.messages.generate import Image
from shared.tracing.spans import AttributeValue


class PreparedChat(Struct, frozen=True):
    """A request that is checked, tokenised and admitted; nothing was sent to a router or a worker yet."""

    plan: TextPlan
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
    images: ImageReader
    config: FrontendConfig

    @asynccontextmanager
    async def answer(self, request: TextRequest, context: RequestContext) -> AsyncIterator[ChatReply | bytes]:
        """Answer in the form that the request asks for: a stream, or one JSON object. Raise what `prepare` and `run`
        raise."""
        plan = plan_of(request)
        if plan.streamed:
            context.announce(Opening(keepalive_chunk=partial(_keepalive_chunk, plan, context.id, request.model or "")))
        preparing = self.prepare(request, plan, context)
        del request  # up to a megabyte of prompt, which the answer does not need
        prepared = await preparing
        encoders = _encoders(context.id, prepared)
        with self.run(prepared, context) as choices:
            reply = ChatReply(encoders, choices, prepared.echoes, plan.with_usage, plan.each_usage)
            yield reply if plan.streamed else await reply.full_body()

    async def prepare(
        self, request: TextRequest, plan: TextPlan, context: RequestContext, default_tokens: int | None = DEFAULT_TOKENS
    ) -> PreparedChat:
        """Check and tokenise a request, admit its tokens and charge them to its key. `default_tokens` is the limit of a
        completion that has none. None means the rest of the context. Raise InvalidRequest, Overloaded, RateLimited,
        Unavailable and RequestTimeout."""
        deadline = deadline_of(request.deadline_s, context.deadline_header, context.received_s, self.service.limits)
        priority = served_priority(request.priority, context.lowest_priority)
        await until(deadline.at, KNOWN, self.models.wait_expected(request.model))
        context.permit.model = self.models.base_of(request.model)
        trace = context.trace
        if trace is not None:
            trace.attributes |= asked_attributes(request, plan)
        model, limits = self.models.find(request.model)
        asked = AskedText(request, plan, model, limits, context, deadline.at, priority)
        check_support(asked)
        if limits.images is not None:
            self.images.check(_sources(asked))
        if plan.is_chat or request.max_tokens == -1:
            default_tokens = self.config.default_max_tokens or None
        sized = await until(deadline.at, IMAGES_READ, self._sized_images(asked, plan))
        tokenising = self._tokenise(asked, default_tokens, [(one.width, one.height) for one in sized])
        tokenised, grammar = await until(deadline.at, TOKENISED, tokenising)
        if trace is not None:
            trace.attributes["gen_ai.response.model"] = model.name
            trace.attributes["gen_ai.usage.input_tokens"] = sum(prompt.count for prompt in tokenised.prompts)
        charged = _admit(plan, tokenised.prompts, context.permit)
        reading = self._images(asked, tokenised.prompts[0], sized)  # a key without tokens has no image decoded
        tokenised = replace(tokenised, images=await until(deadline.at, IMAGES_READ, reading))
        self.metrics.hops["tokenise"].observe(asyncio.get_running_loop().time() - context.received_s)
        defaults = sampling_defaults(limits, self.config)
        requests = text_requests(asked, tokenised, grammar, defaults, self.metrics.tool_calls)
        return PreparedChat(
            plan=plan,
            model=model.name,
            prompts=requests,
            echoes=[
                Delta(text) if one.prompt_entries is None else Delta(text, (one.prompt_entries.opening(),))
                for text, choices in zip(tokenised.echoed, requests, strict=True)
                for one in choices
            ],
            parsed=tokenised.is_parsed,
            charged=charged,
            deadline_shortened=deadline.shortened,
        )

    async def _tokenise(
        self, asked: AskedText, default_tokens: int | None, sizes: Sequence[ImageSize]
    ) -> tuple[TokenisedText, AnswerGrammar | None]:
        trace, limits = asked.context.trace, self.service.limits
        with nullcontext() if trace is None else trace.span("tokenise"):
            pool = key_pool(self.pool, asked.context.permit)
            most_choices = min(limits.choices, limits.requests)
            tokenised = await tokenise_text(asked, pool, default_tokens, most_choices, sizes)
            grammar = await self._grammar(asked, tokenised.parsing)
        parsing = replace(tokenised.parsing, held=grammar is not None)
        return replace(tokenised, parsing=parsing), grammar

    async def _sized_images(self, asked: AskedText, plan: TextPlan) -> list[Prepared]:
        """Return the images of a request, prepared, if their tokens depend on them; otherwise none. Raise
        InvalidRequest, Overloaded, RateLimited and Unavailable."""
        sources, request, permit = _sources(asked), asked.request, asked.context.permit
        if not isinstance(request, ChatRequest) or not sources or not _has_sizes(asked.limits):
            return []
        least = 1 + len(sources) + plan.count * (plan.max_tokens or 0)
        permit.check_least(least, plan.count, asyncio.get_running_loop().time())
        return await self._read(request, asked.limits, asked.context)

    async def _images(self, asked: AskedText, prompt: Prompt, sized: Sequence[Prepared]) -> tuple[Image, ...]:
        """Return the images of a prompt, prepared; `sized` are these if they are already. Raise InvalidRequest,
        Overloaded and Unavailable."""
        request, wanted = asked.request, asked.limits.images
        if wanted is None or not isinstance(request, ChatRequest) or not prompt.images:
            return ()
        pixels = sum(len(one.pixels) for one in sized) or len(prompt.images) * 3 * wanted.width * wanted.height
        self.images.check_payload(4 * (prompt.count + prompt.max_tokens) + pixels)
        read = sized or await self._read(request, asked.limits, asked.context)
        return tuple(
            Image(one.key, start, count_tokens(wanted, one.width, one.height), one.pixels, one.width, one.height)
            for one, start in zip(read, prompt.images, strict=True)
        )

    async def image_sizes(self, request: TextRequest, limits: ModelLimits, context: RequestContext) -> list[ImageSize]:
        """Return the sizes of a chat's images, if their tokens depend on them; otherwise none. Nothing is decoded.
        Raise InvalidRequest, Overloaded and Unavailable."""
        if not isinstance(request, ChatRequest) or not _has_sizes(limits):
            return []
        self.images.check(images_of(request.messages))
        return [(one.width, one.height) for one in await self._read(request, limits, context, size_only=True)]

    async def _read(
        self, request: ChatRequest, limits: ModelLimits, context: RequestContext, *, size_only: bool = False
    ) -> list[Prepared]:
        sources, permit = images_of(request.messages), context.permit
        assert limits.images is not None
        return await self.images.read(
            sources,
            limits.images,
            key=permit.key,
            salt=context.salt(request.cache_salt),
            waiting=partial(permit.waiting, "images") if sources else nullcontext,
            size_only=size_only,
        )

    async def count_prompt(self, request: ChatRequest, context: RequestContext) -> int:
        """Return how many tokens the prompt of a chat has. Raise InvalidRequest, Overloaded, Unavailable and
        RequestTimeout."""
        deadline = deadline_of(request.deadline_s, context.deadline_header, context.received_s, self.service.limits)
        pool = key_pool(self.pool, context.permit)
        await until(deadline.at, KNOWN, self.models.wait_expected(request.model))
        model, limits = self.models.find(request.model)
        sizes = await until(deadline.at, IMAGES_READ, self.image_sizes(request, limits, context))
        prompt = chat_prompt(request, model, limits, pool, context.ignored, sizes)
        return len((await until(deadline.at, TOKENISED, prompt)).tokens) // 4

    @contextmanager
    def run(self, prepared: PreparedChat, context: RequestContext) -> Iterator[Choices]:
        """Compute a prepared request. Leaving the context cancels what still runs, and notes what it cost its key."""
        with open_choices(self.service.open, prepared.prompts) as choices:
            try:
                yield choices
            finally:
                if context.permit.account is not None:
                    context.permit.spent = _spent(prepared, choices)
                if context.trace is not None:
                    context.trace.attributes |= answer_attributes(choices, context.id)

    async def _grammar(self, asked: AskedText, parsing: ParsePlan) -> AnswerGrammar | None:
        """Return the grammar that constrains the answer; None if it is free. Raise InvalidRequest."""
        request, model, ignored, permit = asked.request, asked.model, asked.context.ignored, asked.context.permit
        thought = DEFAULT_REASONING
        if isinstance(request, ChatRequest):
            thought = plan_of_reasoning(request, model, ignored)
        close = self.config.schema_objects == "closed"
        grammar = answer_grammar(request, parsing, model.marks, thought, ignored, close=close)
        if grammar is None:
            return None
        if not asked.limits.grammars:
            raise field_error(grammar.param, f"not every worker of {model.name!r} supports grammars", UNSUPPORTED)
        if grammar.checked:
            waiting = partial(permit.waiting, "grammars")
            await self.grammars.check(grammar.checked, grammar.param, grammar.parts, key=permit.key, waiting=waiting)
        return grammar


def _has_sizes(limits: ModelLimits) -> bool:
    """Return whether the tokens of an image depend on its size."""
    return limits.images is not None and limits.images.unit > 0


def _sources(asked: AskedText) -> Sequence[ImageSource]:
    """Return the images that a request shows."""
    return images_of(asked.request.messages) if isinstance(asked.request, ChatRequest) else ()


def sampling_defaults(limits: ModelLimits, config: FrontendConfig) -> SamplingDefaults:
    """Return the sampling parameters of requests that do not set them."""
    return limits.sampling if config.sampling_defaults == "model" else OPENAI_DEFAULTS


def _admit(plan: TextPlan, prompts: Sequence[Prompt], permit: Permit) -> int:
    """Count the tokens of a request against the limits of the frontend and of its key, and return those charged to the
    key. Raise Overloaded and RateLimited."""
    count = plan.count
    prompt_tokens, choices = sum(prompt.count for prompt in prompts), count * len(prompts)
    permit.add_tokens(prompt_tokens + count * sum(prompt.max_tokens for prompt in prompts), choices)
    charged = prompt_tokens + choices * (plan.max_tokens or 0)
    permit.charge(charged, asyncio.get_running_loop().time())
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


def _encoders(request_id: RequestId, prepared: PreparedChat) -> list[AnswerEncoder]:
    """Return the encoder of each choice's answer."""
    plan = prepared.plan
    kind: Callable[..., AnswerEncoder] = CompletionEncoder
    if plan.is_chat:
        kind = partial(ChatEncoder, parsed=prepared.parsed, tier=plan.with_tier)
    prompts = [one.prompt for prompt in prepared.prompts for one in prompt] if plan.with_ids else ()
    encoder = _encoder(kind, plan, request_id, prepared.model)
    return [encoder(index=index, prompts=prompts) for index in range(len(prepared.echoes))]


def _keepalive_chunk(plan: TextPlan, request_id: RequestId, model: str) -> bytes:
    """Return a chunk without text for a request that is not prepared yet."""
    encoder = _encoder(ChatEncoder if plan.is_chat else CompletionEncoder, plan, request_id, model)
    return encoder().delta_chunk(Delta(""))


def _encoder(
    kind: Callable[..., AnswerEncoder], plan: TextPlan, request_id: RequestId, model: str
) -> Callable[..., AnswerEncoder]:
    identity = (request_id.unique, int(time.time()), model)
    return partial(kind, *identity, with_logprobs=plan.logprobs >= 0, with_usage=plan.with_usage)


def asked_attributes(request: TextRequest, plan: TextPlan) -> dict[str, AttributeValue]:
    """Return what a request's span says of what the client asked for, in the names of OpenTelemetry's conventions for
    generative AI. No text of a prompt or an answer is in a trace."""
    asked = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": plan.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.stream": request.stream,
    }
    return {name: value for name, value in asked.items() if value is not None}


def answer_attributes(choices: Choices, request_id: RequestId) -> dict[str, AttributeValue]:
    """Return what a request's span says of what came of it."""
    usage, streams = choices.usage, choices.streams.values()
    return {
        "gen_ai.response.id": request_id.unique,
        "gen_ai.response.finish_reasons": tuple(stream.finish or "error" for stream in streams),
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
    }
