"""The prompt of a chat: its template, the variables that the template gets, and its tokens.

    ChatRequest ─▶ plan_of_reasoning ─▶ read_kwargs ─▶ render_chat ─▶ encode ─▶ place_images ─▶ ChatPrompt

A chat and /tokenize make prompts here, so that both accept the same fields and count the same tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from services.frontend.models import preprocess
from services.frontend.models.chat_template import ChatTemplate
from services.frontend.models.encode_pool import EncodePool, KeyPool
from services.frontend.models.image_tokens import encode_marked, mark_texts, place_images
from services.frontend.models.model import Model, ModelLimits
from services.frontend.models.preprocess import TEXT_TOKENS_LIMIT
from services.frontend.protocol import chat
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.errors import UNSUPPORTED, field_error
from services.frontend.protocol.ignored_fields import IgnoredFields
from services.frontend.protocol.messages import images_of, messages_as_rendered, text_of
from services.frontend.protocol.reasoning import ReasoningPlan, plan_reasoning
from services.frontend.protocol.structured import offered
from services.frontend.requests.admission import Permit
from services.frontend.tool_parsers import reasoning
from services.frontend.tool_parsers.parser import ParsePlan
from shared.errors import RequestTimeout
from shared.image_size import count_tokens

ImageSize = tuple[int, int]
"""Width and height of a prepared image."""


class ChatPrompt(Struct, frozen=True):
    """The prompt of a chat."""

    tokens: bytes
    """Token ids, packed as u32."""
    parsing: ParsePlan
    """What its answer is parsed for."""
    images: tuple[int, ...] = ()
    """Where the tokens of each image begin."""


async def chat_prompt(
    request: ChatRequest,
    model: Model,
    limits: ModelLimits,
    pool: KeyPool,
    ignored: IgnoredFields,
    sizes: Sequence[ImageSize],
    *,
    special: bool = False,
    most: int = TEXT_TOKENS_LIMIT,
) -> ChatPrompt:
    """Return the prompt of a chat. `sizes` are those of its images if their tokens depend on them. `special`: with the
    tokens that the tokenizer puts around a text. Raise InvalidRequest, also for more than `most` tokens."""
    shown, takes = images_of(request.messages), limits.images
    word = "" if takes is None else takes.template_text or model.tokenizer.id_to_token(takes.token_id) or ""
    tools = mark_texts(word, chat.offered_tools(request))
    messages = mark_texts(word, messages_as_rendered(request.messages))
    template = model.tool_template if tools else model.template
    kwargs = plan_of_reasoning(request, model, ignored).template_kwargs
    more = mark_texts(word, dict(read_kwargs(template, kwargs, ignored)))
    if takes is None and shown:
        why = f"images are not served by {model.name!r}, or not by all of its workers"
        why += "; ask a model that sees (docs/images.md), or send text alone"
        raise field_error(f"{shown[0].where.removesuffix('.image_url')}.type", why, "unsupported_value")
    text = await preprocess.render_chat(
        model,
        messages,
        pool,
        tools,
        more,
        answer_begins=not request.continue_final_message and request.add_generation_prompt is not False,
        continues=bool(request.continue_final_message),
    )
    if takes is not None and takes.template_text:
        text = text.replace(takes.template_text, takes.prompt_text)
    continued = text_of(request.messages[-1]) if request.continue_final_message else ""
    is_open = reasoning.open_in(text) or reasoning.is_open(continued)
    plan = ParsePlan(model.tool_format if tools else None, model.thinks, is_open, reasoning.is_begun(continued))
    tokens = await encode_marked(model, text, word, pool, special=special, param="messages", most=most)
    preprocess.check_encoded(model, tokens, limits, param="messages")
    if takes is None:
        return ChatPrompt(tokens, plan)
    counts = [count_tokens(takes, *size) for size in sizes] if takes.unit else [takes.tokens] * len(shown)
    tokens, starts = place_images(tokens, counts, takes.token_id, most)
    return ChatPrompt(tokens, plan, starts)


T = TypeVar("T")
TOKENISED = "its prompt was tokenised"
IMAGES_READ = "its images were read"
KNOWN = "its model was known"


async def until(deadline_s: float, done: str, work: Awaitable[T]) -> T:
    """Return what `work` returns, by the request's deadline on the event loop's clock. Raise RequestTimeout; `done`
    says what was not done by then."""
    try:
        async with asyncio.timeout_at(deadline_s):
            return await work
    except TimeoutError:
        raise RequestTimeout(f"the request's deadline passed before {done}") from None


def key_pool(pool: EncodePool, permit: Permit) -> KeyPool:
    """Return the pool for one request, which pays for what is made of its texts."""
    return pool.of(permit.key, permit.count_made)


def plan_of_reasoning(request: ChatRequest, model: Model, ignored: IgnoredFields) -> ReasoningPlan:
    """Return how the model is to reason before its answer. Raise InvalidRequest."""
    offers = offered(request.tools, request.tool_choice)
    template = model.tool_template if offers else model.template
    return plan_reasoning(
        request.reasoning_effort,
        request.thinking_token_budget,
        chat.template_kwargs(request),
        ignored,
        reads=() if template is None else template.reads,
        reasons=model.thinks,
    )


def read_kwargs(template: ChatTemplate | None, given: Mapping[str, Any], ignored: IgnoredFields) -> Mapping[str, Any]:
    """Return the variables that the chat template reads. Others are ignored, or left to be refused. Raise
    InvalidRequest for a variable that has its value from elsewhere, because the client would get another prompt than
    it asks for."""
    if template is None:
        return given
    for name in given:
        if name in template.sets:
            by_field = name in ChatRequest.__struct_fields__
            source = f"the field {name} of the request sets it" if by_field else "the server sets it"
            raise field_error(f"chat_template_kwargs.{name}", f"not a variable of requests: {source}", UNSUPPORTED)
    if ignored.refuse:
        return given
    for name in given:
        if name not in template.reads:
            ignored.add(f"chat_template_kwargs.{name}")
    return {name: value for name, value in given.items() if name in template.reads}
