"""The body of /v1/responses, and the chat request that it becomes. Pure.

body ─▶ decode_response ─▶ (former messages) ─▶ as_chat ─▶ a ChatRequest, checked and computed like any other
                                                    └── InvalidRequest ─▶ renaming(NAMES): this body's field names
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from services.frontend.protocol import chat, structured
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.foreign import Names, names, placed, renaming, with_images
from services.frontend.protocol.ignored_fields import REFUSE, Advisory, IgnoredFields
from services.frontend.protocol.messages import MESSAGES_LIMIT, ChatMessage
from services.frontend.protocol.reasoning import Effort, ThinkingBudget
from services.frontend.protocol.responses_items import (
    ITEMS_LIMIT,
    AnyInputItem,
    InputItem,
    added_tools,
    check_calls,
    decode_items,
    image_places,
    messages_of,
)
from services.frontend.protocol.responses_tools import AnyTool, ResponseToolChoice, ResponseTools, decode_tools
from services.frontend.protocol.tools import TOOLS_LIMIT
from shared.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"
Summary = Literal["auto", "concise", "detailed"]
ResponseId = Annotated[str, Meta(min_length=1, max_length=256)]


class SchemaFormat(structured.JsonSchema, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema. It has the fields of a chat's schema, inherited by msgspec, without the second
    level."""


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: structured.TextFormat | structured.JsonObjectFormat | SchemaFormat | None = None
    verbosity: Annotated[chat.Label | None, Advisory()] = None


class ReasoningConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of reasoning."""

    effort: Effort | None = None
    """The effort, as in a chat's `reasoning_effort`."""
    summary: Summary | None = None
    """With any of these values the whole reasoning is returned as its summary, in place of its content."""
    generate_summary: Summary | None = None
    """The former name of `summary`."""
    context: NotBuilt = None
    mode: NotBuilt = None


class ResponseRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/responses."""

    input: str | Annotated[list[AnyInputItem], Meta(min_length=1, max_length=ITEMS_LIMIT)]
    """A text, or a list of items."""
    model: str | None = None
    """The model's name; it may be left out if only one model is served."""
    instructions: str | None = None
    """Instructions for this response alone; those of a previous response are not carried over."""
    previous_response_id: ResponseId | None = None
    store: bool | None = None
    """If false, the response is not stored, and cannot be continued by its id."""
    stream: bool | None = None
    stream_options: chat.StreamOptions | None = None
    max_output_tokens: chat.TokenLimit | None = None
    temperature: chat.Temperature | None = None
    top_p: chat.TopP | None = None
    include: Annotated[list[chat.Label], Meta(max_length=16)] | None = None
    """LOGPROBS. Other values name parts that no answer here has."""
    top_logprobs: chat.TopLogprobs | None = None
    text: TextConfig | None = None
    tools: Annotated[list[AnyTool], Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    prompt_cache_key: chat.CacheName | None = None
    """Requests with the same key prefer the same worker."""
    service_tier: chat.Label | None = None
    """There is only one tier, whichever is requested."""
    # vLLM's
    seed: chat.Seed | None = None
    top_k: chat.TopK | None = None
    min_p: chat.MinP | None = None
    presence_penalty: chat.Penalty | None = None
    frequency_penalty: chat.Penalty | None = None
    repetition_penalty: chat.RepetitionPenalty | None = None
    stop: chat.Stops | None = None
    stop_token_ids: chat.StopIds | None = None
    logit_bias: chat.LogitBias | None = None
    ignore_eos: bool | None = None
    cache_salt: chat.CacheName | None = None
    priority: chat.Priority | None = None
    chat_template_kwargs: chat.TemplateKwargs | None = None
    thinking_token_budget: ThinkingBudget | None = None
    # our own
    deadline_s: chat.Seconds | None = None
    # harmless
    metadata: chat.Metadata | None = None
    user: chat.Label | None = None
    safety_identifier: Annotated[str, Meta(max_length=64)] | None = None
    max_tool_calls: chat.TokenCount | None = None
    """A limit for tools that OpenAI itself runs. There are none, so it has no effect."""
    # advisory
    truncation: Annotated[Literal["auto", "disabled"] | None, Advisory(), Harmless("disabled")] = None
    """A conversation that is too long is refused, not truncated."""
    prompt_cache_retention: Annotated[chat.Label | None, Advisory(), Harmless("in_memory", "in-memory")] = None
    # not built
    background: Annotated[NotBuilt, Harmless(False)] = None
    conversation: NotBuilt = None
    prompt: NotBuilt = None
    context_management: Annotated[NotBuilt, Harmless([])] = None
    moderation: NotBuilt = None
    prompt_cache_options: NotBuilt = None
    access_programs: NotBuilt = None
    image: NotBuilt = None


class DecodedRequest(Struct, frozen=True):
    """A body that has been checked, and the items of its input."""

    request: ResponseRequest
    items: list[InputItem]
    tools: ResponseTools

    @property
    def names(self) -> Names:
        """The names of a chat's fields in this request."""
        return placed(NAMES, self.tools.places, "parameters")

    def names_in(self, messages: Sequence[ChatMessage]) -> Names:
        """Return the names of a chat's fields in this request, given the chat's messages."""
        return with_images(self.names, messages, image_places(self.items))

    @property
    def is_stored(self) -> bool:
        """Whether the response is to be stored."""
        return self.request.store is not False

    @property
    def summary(self) -> tuple[Summary | None, str]:
        """The summary of the reasoning that is asked for, and the field that asks for it."""
        asked = self.request.reasoning or ReasoningConfig()
        if asked.summary is None and asked.generate_summary is not None:
            return asked.generate_summary, "reasoning.generate_summary"
        return asked.summary, "reasoning.summary"

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer's text is to have log-probabilities."""
        return LOGPROBS in (self.request.include or ())


def decode_response(body: bytes, ignored: IgnoredFields = REFUSE) -> DecodedRequest:
    """Decode and check the body of a response request. Raise InvalidRequest, naming the field."""
    request = decode_body(ResponseRequest, body, ignored)
    check_not_built(request, "", ignored)
    if request.text is not None:
        check_not_built(request.text, "text.", ignored)
    if request.reasoning is not None:
        check_not_built(request.reasoning, "reasoning.", ignored)
    for at, named in enumerate(request.include or ()):
        if named != LOGPROBS:
            refusal = field_error(f"include[{at}]", f"{named!r} is not supported", "unsupported_value")
            ignored.add_or_raise(f"include[].{named}", refusal)
    items = decode_items(request.input, ignored)
    tools = decode_tools(request.tools, request.tool_choice, ignored, added_tools(items))
    asked = DecodedRequest(request, items, tools)
    if request.top_logprobs and not asked.wants_logprobs:
        raise InvalidRequest(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
    if asked.wants_logprobs and tools.offered and request.tool_choice != "none":
        why = f"{LOGPROBS!r} is not supported together with tools that may be called"
        raise field_error("include", why, "unsupported_value")
    return asked


def as_chat(asked: DecodedRequest, before: Sequence[ChatMessage], ignored: IgnoredFields = REFUSE) -> ChatRequest:
    """Return the request as a chat that continues the messages of `before`.

    Raise InvalidRequest, naming fields as this body does."""
    request = asked.request
    if request.previous_response_id is not None:
        check_calls(before, asked.items)
    conversation = [*before, *messages_of(asked.items, asked.tools.chat_names)]
    if not conversation:
        raise field_error("input", "none of its items is a message")
    if len(conversation) > MESSAGES_LIMIT:
        param = "previous_response_id" if before else "input"
        raise field_error(param, f"the whole conversation has more than {MESSAGES_LIMIT} messages")
    instructions = [] if request.instructions is None else [ChatMessage("system", request.instructions)]
    as_asked = ChatRequest(
        messages=[*instructions, *conversation],
        max_completion_tokens=request.max_output_tokens,
        logprobs=asked.wants_logprobs,
        top_logprobs=request.top_logprobs if asked.wants_logprobs else None,
        response_format=_format(request.text),
        tools=asked.tools.offered or None,
        tool_choice=asked.tools.choice,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        **{field: getattr(request, field) for field in _AS_IN_CHAT},
    )
    with renaming(asked.names_in(as_asked.messages)):
        chat.check_chat(as_asked, ignored)
    return as_asked


_AS_IN_CHAT = (
    *("model", "stream", "stream_options", "temperature", "top_p", "parallel_tool_calls", "prompt_cache_key"),
    *("seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop"),
    *("stop_token_ids", "logit_bias", "ignore_eos", "cache_salt", "priority", "chat_template_kwargs"),
    *("thinking_token_budget", "deadline_s"),
)


def _format(text: TextConfig | None) -> structured.ResponseFormat | None:
    match None if text is None else text.format:
        case SchemaFormat() as asked:
            return structured.JsonSchemaFormat(
                structured.JsonSchema(asked.name, asked.schema, asked.description, asked.strict)
            )
        case other:
            return other


NAMES = names(
    {
        r"^max_(completion_)?tokens$": "max_output_tokens",
        r"^response_format(\.json_schema)?": "text.format",
        r"^reasoning_effort$": "reasoning.effort",
        r"^(tools\[\d*\]|tool_choice)\.function": r"\1",
        r"^messages.*$": "input",
    }
)
"""The names of a chat's fields in this body."""


# --- stored responses


_FALSE = Harmless(False, 0, "false")


class StoredResponseRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The parameters of GET and DELETE /v1/responses/{id}; over NATS this is the body."""

    response_id: ResponseId
    # not built
    include: Annotated[NotBuilt, _FALSE, Harmless([])] = None
    include_obfuscation: Annotated[NotBuilt, _FALSE] = None
    starting_after: Annotated[NotBuilt, _FALSE] = None
    stream: Annotated[NotBuilt, _FALSE] = None


def decode_stored(body: bytes) -> str:
    """Decode a request for a stored response; return the response's id. Raise InvalidRequest, naming the field."""
    request = decode_body(StoredResponseRequest, body)
    check_not_built(request)
    return request.response_id
