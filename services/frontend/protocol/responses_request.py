"""The body of /v1/responses, and the chat request that it becomes. Pure.

body ─▶ decode_response ─▶ (former messages) ─▶ as_chat ─▶ a ChatRequest, checked and computed like any other
                                                    └── InvalidRequest ─▶ with_response_names: this body's field names
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from services.frontend.protocol.chat import (
    MESSAGES_LIMIT,
    CacheName,
    ChatMessage,
    ChatRequest,
    Label,
    LogitBias,
    Metadata,
    MinP,
    Penalty,
    RepetitionPenalty,
    Seconds,
    Seed,
    ServiceTier,
    StopIds,
    Stops,
    StreamOptions,
    Temperature,
    TemplateKwargs,
    TokenCount,
    TopK,
    TopLogprobs,
    TopP,
    check_chat,
)
from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body
from services.frontend.protocol.reasoning import Effort, ThinkingBudget
from services.frontend.protocol.responses_items import (
    ITEMS_LIMIT,
    AnyInputItem,
    InputItem,
    check_calls,
    decode_items,
    messages_of,
)
from services.frontend.protocol.structured import (
    JsonObjectFormat,
    JsonSchema,
    JsonSchemaFormat,
    NamedFunction,
    NamedTool,
    ResponseFormat,
    TextFormat,
)
from services.frontend.protocol.tools import DESCRIPTION_LIMIT_CHARACTERS, TOOLS_LIMIT, Function, Tool, ToolName
from shared.errors import InvalidRequest

LOGPROBS = "message.output_text.logprobs"
Included = Annotated[str, Meta(max_length=512, extra_json_schema={"enum": [LOGPROBS]})]
ResponseId = Annotated[str, Meta(min_length=1, max_length=256)]


class ResponseTool(Struct, frozen=True, forbid_unknown_fields=True):
    """One of `tools`: a function, without the second level that chats have. Tools that OpenAI itself runs are not
    built."""

    type: Literal["function"]
    name: ToolName
    description: Annotated[str, Meta(max_length=DESCRIPTION_LIMIT_CHARACTERS)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Struct, frozen=True, forbid_unknown_fields=True):
    """The one function that must be called."""

    type: Literal["function"]
    name: ToolName


class SchemaFormat(JsonSchema, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="json_schema"):
    """JSON that follows a schema. It has the fields of a chat's schema, inherited by msgspec, without the second
    level."""


class TextConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The form of the answer's text."""

    format: TextFormat | JsonObjectFormat | SchemaFormat | None = None
    verbosity: NotBuilt = None


class ReasoningConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The options of reasoning."""

    effort: Effort | None = None
    """The effort, as in a chat's `reasoning_effort`."""
    summary: NotBuilt = None
    generate_summary: NotBuilt = None
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
    """False: the response is not stored, and cannot be continued by its id."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_output_tokens: TokenCount | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    include: Annotated[list[Included], Meta(max_length=16)] | None = None
    top_logprobs: TopLogprobs | None = None
    text: TextConfig | None = None
    tools: Annotated[list[ResponseTool], Meta(max_length=TOOLS_LIMIT)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    prompt_cache_key: CacheName | None = None
    """Requests with the same key prefer the same worker."""
    service_tier: ServiceTier | None = None
    """There is only one tier, whichever is requested."""
    # vLLM's
    seed: Seed | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: RepetitionPenalty | None = None
    stop: Stops | None = None
    stop_token_ids: StopIds | None = None
    logit_bias: LogitBias | None = None
    ignore_eos: bool | None = None
    cache_salt: CacheName | None = None
    chat_template_kwargs: TemplateKwargs | None = None
    thinking_token_budget: ThinkingBudget | None = None
    # our own
    deadline_s: Seconds | None = None
    # harmless
    metadata: Metadata | None = None
    user: Label | None = None
    safety_identifier: Annotated[str, Meta(max_length=64)] | None = None
    max_tool_calls: TokenCount | None = None
    """A limit for tools that OpenAI itself runs. There are none, so it has no effect."""
    # not built
    background: Annotated[NotBuilt, Harmless(False)] = None
    truncation: Annotated[NotBuilt, Harmless("disabled")] = None
    conversation: NotBuilt = None
    prompt: NotBuilt = None
    context_management: Annotated[NotBuilt, Harmless([])] = None
    moderation: NotBuilt = None
    prompt_cache_options: NotBuilt = None
    prompt_cache_retention: Annotated[NotBuilt, Harmless("in_memory")] = None
    access_programs: NotBuilt = None
    image: NotBuilt = None


_RESPONSE = msgspec.json.Decoder(ResponseRequest)


class DecodedRequest(Struct, frozen=True):
    """A body that has been checked, and the items of its input."""

    request: ResponseRequest
    items: list[InputItem]

    @property
    def is_stored(self) -> bool:
        """Whether the response is to be stored."""
        return self.request.store is not False


def decode_response(body: bytes) -> DecodedRequest:
    """Decode and check the body of a response request. Raises InvalidRequest, naming the field."""
    request = decode_body(_RESPONSE, body)
    check_not_built(request)
    if request.text is not None:
        check_not_built(request.text, "text.")
    if request.reasoning is not None:
        check_not_built(request.reasoning, "reasoning.")
    for at, named in enumerate(request.include or ()):
        if named != LOGPROBS:
            wrong = f"include[{at}]: {named[:64]!r} is not supported"
            raise InvalidRequest(wrong, param=f"include[{at}]", code="unsupported_value")
    if request.top_logprobs and not request.include:
        raise InvalidRequest(f"top_logprobs needs include: [{LOGPROBS!r}]", param="top_logprobs")
    if request.include and request.tools and request.tool_choice != "none":
        wrong = f"include: {LOGPROBS!r} is not supported together with tools that may be called"
        raise InvalidRequest(wrong, param="include", code="unsupported_value")
    return DecodedRequest(request, decode_items(request.input))


def as_chat(asked: DecodedRequest, before: Sequence[ChatMessage]) -> ChatRequest:
    """Return the request as a chat that continues the messages of `before`.

    Raises InvalidRequest, naming fields as this body does."""
    request = asked.request
    check_calls(before, asked.items)
    conversation = [*before, *messages_of(asked.items)]
    if len(conversation) > MESSAGES_LIMIT:
        param = "previous_response_id" if before else "input"
        raise InvalidRequest(f"{param}: the whole conversation has more than {MESSAGES_LIMIT} messages", param=param)
    instructions = [] if request.instructions is None else [ChatMessage("system", request.instructions)]
    chat = ChatRequest(
        messages=[*instructions, *conversation],
        model=request.model,
        stream=request.stream,
        stream_options=request.stream_options,
        max_completion_tokens=request.max_output_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        logprobs=bool(request.include),
        top_logprobs=request.top_logprobs if request.include else None,
        response_format=_format(request.text),
        tools=[Tool("function", _function(tool)) for tool in request.tools or ()] or None,
        tool_choice=_choice(request.tool_choice),
        parallel_tool_calls=request.parallel_tool_calls,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        prompt_cache_key=request.prompt_cache_key,
        **{field: getattr(request, field) for field in _AS_IN_CHAT},
    )
    try:
        check_chat(chat)
    except InvalidRequest as wrong:
        raise with_response_names(wrong) from None
    return chat


_AS_IN_CHAT = (
    *("seed", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop"),
    *("stop_token_ids", "logit_bias", "ignore_eos", "cache_salt", "chat_template_kwargs"),
    *("thinking_token_budget", "deadline_s"),
)


def _format(text: TextConfig | None) -> ResponseFormat | None:
    match None if text is None else text.format:
        case SchemaFormat() as asked:
            return JsonSchemaFormat(JsonSchema(asked.name, asked.schema, asked.description, asked.strict))
        case other:
            return other


def _function(tool: ResponseTool) -> Function:
    return Function(tool.name, tool.description, tool.parameters, tool.strict)


def _choice(
    choice: Literal["none", "auto", "required"] | ChosenFunction | None,
) -> Literal["none", "auto", "required"] | NamedTool | None:
    return NamedTool("function", NamedFunction(choice.name)) if isinstance(choice, ChosenFunction) else choice


_RENAMED: tuple[tuple[re.Pattern[str], str], ...] = tuple(
    (re.compile(pattern), name)
    for pattern, name in (
        (r"^max_(completion_)?tokens$", "max_output_tokens"),
        (r"^response_format(\.json_schema)?", "text.format"),
        (r"^reasoning_effort$", "reasoning.effort"),
        (r"^(tools\[\d+\]|tool_choice)\.function", r"\1"),
        (r"^messages.*$", "input"),
    )
)


def with_response_names(wrong: InvalidRequest) -> InvalidRequest:
    """Turn an error about a chat into one that names fields as the body of /v1/responses does."""
    param = wrong.param or ""
    for pattern, name in _RENAMED:
        if pattern.search(param):
            here = pattern.sub(name, param)
            message = str(wrong).replace(param, here)
            return InvalidRequest(message, param=here, code=wrong.code, status=wrong.status)
    return wrong


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


_STORED = msgspec.json.Decoder(StoredResponseRequest)


def decode_stored(body: bytes) -> str:
    """Decode a request for a stored response; return the response's id. Raises InvalidRequest, naming the field."""
    request = decode_body(_STORED, body)
    check_not_built(request)
    return request.response_id
