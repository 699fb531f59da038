"""The prompts of chats and completions: checked against what the workers of a model can do, and tokenised.

AskedText ─▶ check_support ─▶ tokenise_text ─▶ TokenisedText ─▶ text_requests.py
                               a chat: prompts.py; each prompt of a completion: its text, or token ids
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from services.frontend.models import preprocess
from services.frontend.models.chat_template import RENDERED_LIMIT_CHARACTERS
from services.frontend.models.encode_pool import KeyPool
from services.frontend.models.model import Model, ModelLimits
from services.frontend.models.preprocess import TEXT_TOKENS_LIMIT, Prompt
from services.frontend.protocol.chat import ChatRequest, check_least_tokens
from services.frontend.protocol.completions import PROMPT_LOGPROBS_LIMIT, CompletionRequest, prompts_of
from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.text_plan import TextPlan, TextRequest
from services.frontend.serving.prompts import ImageSize, chat_prompt
from services.frontend.serving.request_context import RequestContext
from services.frontend.serving.tokenize import detokenize
from services.frontend.tool_parsers.parser import ParsePlan
from shared.errors import InvalidRequest
from shared.hashing import pack_tokens
from shared.messages.generate import Image


class AskedText(Struct, frozen=True):
    """A request for text, the model that it is for, and until when it is answered."""

    request: TextRequest
    plan: TextPlan
    model: Model
    limits: ModelLimits
    context: RequestContext
    deadline: float
    """On the event loop's clock."""
    priority: int


class TokenisedText(Struct, frozen=True):
    """What the prompts of a request became."""

    prompts: list[Prompt]
    echoed: list[str]
    """For each prompt the text before its answers, mostly empty."""
    parsing: ParsePlan
    """What the answers are parsed for."""
    images: tuple[Image, ...] = ()
    """The images of a chat's prompt."""

    @property
    def is_parsed(self) -> bool:
        """Whether an answer may have more than content: reasoning, or tool calls."""
        return bool(self.parsing.reasoning or self.parsing.calls)


def check_support(asked: AskedText) -> None:
    """Raise InvalidRequest for what not every worker of the model can do."""
    request, limits = asked.request, asked.limits
    if not limits.generates:
        why = f"not every worker of {asked.model.name!r} generates text; /v1/embeddings has its embeddings"
        raise field_error("model", why, UNSUPPORTED)
    preprocess.check_vocabulary(request.stop_token_ids or (), limits, param="stop_token_ids")
    preprocess.check_vocabulary(request.allowed_token_ids or (), limits, param="allowed_token_ids")
    for field, asks, supported in (
        ("logit_bias", request.logit_bias, limits.biases),
        ("allowed_token_ids", request.allowed_token_ids, limits.allowed_tokens),
        ("min_tokens", request.min_tokens, limits.min_tokens),
    ):
        if asks and not supported:
            raise field_error(field, f"not every worker of {asked.model.name!r} supports it", UNSUPPORTED)
    for token in request.logit_bias or ():
        if int(token) >= limits.vocab_size:
            wrong = f"token id {token} is outside the vocabulary of {limits.vocab_size}"
            raise InvalidRequest(wrong, param=f"logit_bias[{token}]")


async def tokenise_text(
    asked: AskedText, pool: KeyPool, default_tokens: int | None, most_choices: int, sizes: Sequence[ImageSize]
) -> TokenisedText:
    """Tokenise the prompts. `default_tokens` is the limit of an answer that has none. None means the rest of the
    context. `sizes` are those of a chat's images if their tokens depend on them. Raise InvalidRequest, Overloaded and
    RateLimited."""
    request, plan, limits = asked.request, asked.plan, asked.limits
    prompts = [] if isinstance(request, ChatRequest) else prompts_of(request)
    choices = plan.count * (len(prompts) or 1)
    if choices > most_choices:
        param = "prompt" if len(prompts) > 1 else "n"
        raise field_error(param, f"{choices} choices in one request, more than {most_choices}")
    counted = request.truncate_prompt_tokens is None
    known = sum(len(one) if counted and not isinstance(one, str) else 1 for _, one in prompts) or 1
    least = known + choices * (plan.max_tokens or 0)
    asked.context.permit.check_least(least, choices, asyncio.get_running_loop().time())
    most = limits.context_length if request.truncate_prompt_tokens is None else TEXT_TOKENS_LIMIT
    if isinstance(request, ChatRequest):
        special, ignored = bool(request.add_special_tokens), asked.context.ignored
        chat = await chat_prompt(request, asked.model, limits, pool, ignored, sizes, special=special, most=most)
        found, parsing = [_fitted(asked, chat.tokens, default_tokens, "messages", chat.images)], chat.parsing
    else:
        found, parsing = [], ParsePlan()
        for param, given in prompts:
            if found:
                await asyncio.sleep(0)  # each blocks the loop for a millisecond at most, all of them for 100
            tokens = await _tokens_of(given, request, asked, pool, param, most)
            found.append(_fitted(asked, tokens, default_tokens, param))
    count = sum(prompt.count for prompt in found)
    plan.check_prompt_ids(count)
    if plan.prompt_logprobs:
        _check_prompt_logprobs(asked, count)
    echoes = isinstance(request, CompletionRequest) and request.echo
    echoed = await _echoed_texts(asked, prompts) if echoes else [""] * len(found)
    return TokenisedText(found, echoed, parsing)


def _fitted(asked: AskedText, tokens: bytes, default: int | None, param: str, images: tuple[int, ...] = ()) -> Prompt:
    """Return a prompt that fits into the context together with its answer."""
    plan, limits = asked.plan, asked.limits
    max_tokens = 1 if plan.prompt_only else plan.max_tokens  # engines compute a token after each prompt; it is dropped
    if images and asked.request.truncate_prompt_tokens is not None:
        raise field_error("truncate_prompt_tokens", "a prompt with images is not cut")
    tokens = preprocess.truncate(tokens, asked.request.truncate_prompt_tokens, limits, max_tokens)
    prompt = preprocess.fit_context(
        tokens, limits, max_tokens=max_tokens, default=default, param=param, limit_param=plan.limit_param
    )
    check_least_tokens(asked.request, prompt.max_tokens)
    return replace(prompt, images=images)


async def _tokens_of(
    given: str | Sequence[int], request: CompletionRequest, asked: AskedText, pool: KeyPool, param: str, most: int
) -> bytes:
    """Return the packed tokens of one prompt of a completion."""
    model, limits = asked.model, asked.limits
    if not isinstance(given, str):
        preprocess.check_vocabulary(given, limits, param=param)
        return pack_tokens(given)
    if request.suffix:
        tokens = await preprocess.encode_between(model, given, request.suffix, pool, param=param, most=most)
    else:
        special = request.add_special_tokens is not False
        tokens = await preprocess.encode(model, given, pool, special=special, param=param, most=most)
    preprocess.check_encoded(model, tokens, limits, param=param)
    return tokens


async def _echoed_texts(asked: AskedText, prompts: Sequence[tuple[str, str | Sequence[int]]]) -> list[str]:
    """Return the text before the answers of each prompt. Raise InvalidRequest."""
    model, ends = asked.model, asked.plan.prompt_only
    texts = [
        one if isinstance(one, str) else await detokenize(model, one, param=param, ends=ends) for param, one in prompts
    ]
    if asked.plan.count * sum(map(len, texts)) > RENDERED_LIMIT_CHARACTERS:
        raise field_error("echo", f"the prompts of all answers have more than {RENDERED_LIMIT_CHARACTERS} characters")
    return texts


def _check_prompt_logprobs(asked: AskedText, tokens: int) -> None:
    """Raise InvalidRequest for log-probabilities of prompts, with these `tokens` in all, that workers do not compute or
    that would be too many."""
    if not asked.limits.prompt_logprobs:
        why = f"not every worker of {asked.model.name!r} computes log-probabilities of the prompt"
        raise field_error("logprobs", f"{why}: echo without logprobs works", UNSUPPORTED)
    count = tokens * asked.plan.count * (asked.plan.logprobs + 1)
    if count > PROMPT_LOGPROBS_LIMIT:
        why = f"with echo, {count} log-probabilities of prompt tokens, more than {PROMPT_LOGPROBS_LIMIT}"
        raise field_error("logprobs", f"{why}; ask for fewer likeliest tokens, shorter prompts or fewer choices")
