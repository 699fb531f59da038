"""TextPlan: what a request for text asks of its answers, read from its fields once. Pure.

ChatRequest, CompletionRequest ─▶ plan_of ─▶ TextPlan ─▶ serving/chat.py and its neighbours
"""

from __future__ import annotations

from typing import TypeVar

from msgspec import Struct

from services.frontend.protocol.chat import ChatRequest, token_limit
from services.frontend.protocol.completions import CompletionRequest, with_prompt_logprobs
from services.frontend.protocol.errors import field_error
from shared.hashing import pack_tokens
from shared.messages.cards import SamplingDefaults
from shared.messages.generate import Sampling

TextRequest = ChatRequest | CompletionRequest
"""The body of a request for text."""

PROMPT_IDS_LIMIT = 1 << 17
"""Token ids of prompts in one answer. They are written in one turn of the event loop: 1 Mi would hold it for 0.1 s."""


OPENAI_DEFAULTS = SamplingDefaults()
"""OpenAI's sampling parameters of a request that sets none."""

LEAST_TOP_P = 1e-6
"""What a `top_p` of 0 is for workers: only the likeliest token is left."""


class TextPlan(Struct, frozen=True, kw_only=True):
    """What a request for text asks of its answers."""

    is_chat: bool
    count: int
    """Answers for each prompt."""
    max_tokens: int | None
    """Most tokens of each answer. None means any number, or the client does not say."""
    limit_param: str
    """The field that says it."""
    min_tokens: int
    stops: tuple[str, ...]
    include_stop: bool
    """Whether the text that ended an answer is part of it."""
    logprobs: int
    """Likeliest tokens to report with each token. -1 means none, not even the token itself."""
    prompt_logprobs: bool
    """Whether the prompts' tokens have log-probabilities, too."""
    numbered_tokens: bool
    """Whether log-probabilities name tokens by their ids."""
    special_tokens: bool
    """Whether special tokens stand in the text."""
    with_ids: bool
    """Whether the answer has the tokens of its prompts and its own."""
    streamed: bool
    with_usage: bool
    """Whether a stream ends with the usage."""
    each_usage: bool
    """Whether each chunk has the usage up to it."""
    with_tier: bool
    """Whether the answer names the service tier."""

    @property
    def prompt_only(self) -> bool:
        """Whether the answers have no text of their own."""
        return self.max_tokens == 0

    def check_prompt_ids(self, tokens: int) -> None:
        """Raise InvalidRequest if an answer would name more than PROMPT_IDS_LIMIT tokens of its prompts, which have
        `tokens` tokens. A chat's answer names them once, a completion's in each choice."""
        count = tokens if self.is_chat else self.count * tokens
        if self.with_ids and count > PROMPT_IDS_LIMIT:
            why = f"the prompts of all answers have {count} tokens, more than {PROMPT_IDS_LIMIT}"
            raise field_error("return_token_ids", why)


def plan_of(request: TextRequest) -> TextPlan:
    """Return the plan of a request that is checked."""
    max_tokens, limit_param = token_limit(request)
    stop, options = request.stop or (), request.stream_options
    if isinstance(request, ChatRequest):
        logprobs = (request.top_logprobs or 0) if request.logprobs else -1
        prompt_logprobs, with_tier = False, request.service_tier is not None
    else:
        logprobs = -1 if request.logprobs is None else request.logprobs
        prompt_logprobs, with_tier = with_prompt_logprobs(request), False
    return TextPlan(
        is_chat=isinstance(request, ChatRequest),
        count=request.n or 1,
        max_tokens=max_tokens,
        limit_param=limit_param,
        min_tokens=request.min_tokens or 0,
        stops=tuple(filter(None, (stop,) if isinstance(stop, str) else stop)),
        include_stop=bool(request.include_stop_str_in_output),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        numbered_tokens=bool(request.return_tokens_as_token_ids),
        special_tokens=request.skip_special_tokens is False,
        with_ids=bool(request.return_token_ids),
        streamed=bool(request.stream),
        with_usage=options is not None and bool(options.include_usage),
        each_usage=options is not None and bool(options.include_usage and options.continuous_usage_stats),
        with_tier=with_tier,
    )


def sampling_of(
    request: TextRequest,
    plan: TextPlan,
    max_tokens: int,
    drawn_seed: int,
    grammar: str = "",
    defaults: SamplingDefaults = OPENAI_DEFAULTS,
) -> Sampling:
    """Return the sampling parameters of a request. `drawn_seed` is used if the client gave no seed."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, defaults.temperature),
        top_p=_or(request.top_p, defaults.top_p) or LEAST_TOP_P,
        top_k=max(0, _or(request.top_k, defaults.top_k)),
        min_p=_or(request.min_p, defaults.min_p),
        seed=(drawn_seed if request.seed in (None, -1) else request.seed) & ((1 << 64) - 1),  # -1: none, as in vLLM
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, defaults.repetition_penalty),
        logprobs=plan.logprobs,
        prompt_logprobs=plan.logprobs if plan.prompt_logprobs else -1,
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        grammar=grammar,
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
        min_tokens=plan.min_tokens,
        allowed_tokens=pack_tokens(request.allowed_token_ids or ()),
    )


N = TypeVar("N", int, float)


def _or(given: N | None, default: N) -> N:
    return default if given is None else given
