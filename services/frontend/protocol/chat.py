"""What clients may ask of a chat, and of a completion alike: typed, with every field that is not built refused by name.

A field is in one of four classes:

    built         does what OpenAI (or vLLM, for its own fields) documents
    harmless      accepted and without effect, because it asks for nothing of the answer: user, metadata, …
    not built     accepted only where its value asks for nothing (null, n: 1, an empty list); else refused by name
    unknown       refused by name; nothing is ever silently ignored

What a completion has besides is in protocol/completions.py.

`developer` messages are rendered as `system`: the templates of open models do not know the newer word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body, not_supported
from services.frontend.protocol.reasoning import Effort, ThinkingBudget
from services.frontend.protocol.structured import ResponseFormat, StructuredOutputs, ToolChoice
from services.frontend.protocol.tools import (
    Calls,
    Tools,
    Unread,
    calls_as_rendered,
    check_tools,
    tools_as_rendered,
)
from shared.errors import InvalidRequest
from shared.messages import Sampling

if TYPE_CHECKING:
    from services.frontend.protocol.completions import CompletionRequest

MESSAGES_LIMIT = 4096
PARTS_LIMIT = 4096
"""Of one message."""
STOPS_LIMIT = 16
STOP_LIMIT_CHARACTERS = 256
TOP_LOGPROBS_LIMIT = 20
LOGIT_BIAS_LIMIT = 300
CHOICES_LIMIT = 128
"""OpenAI's, for `n`."""

_INT32_MAX = (1 << 31) - 1
_INT64_MAX = (1 << 63) - 1

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(gt=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=_INT32_MAX)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
TokenCount = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
Seed = Annotated[int, Meta(ge=-_INT64_MAX - 1, le=_INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
StopString = Annotated[str, Meta(min_length=1, max_length=STOP_LIMIT_CHARACTERS)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=STOPS_LIMIT)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_LIMIT)]
StopIds = Annotated[list[TokenId], Meta(max_length=64)]
TopLogprobs = Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_LIMIT)]
Label = Annotated[str, Meta(max_length=512)]
CacheName = Annotated[str, Meta(max_length=256)]
"""Routers and workers take no longer one."""
TokenKey = Annotated[str, Meta(max_length=512, extra_json_schema={"pattern": "^(0|[1-9][0-9]{0,9})$"})]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
ServiceTier = Literal["auto", "default", "flex", "priority", "scale"]
TemplateKwargs = Annotated[dict[Label, bool | int | float | Label | None], Meta(max_length=16)]
LogitBias = Annotated[dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=LOGIT_BIAS_LIMIT)]
Seconds = Annotated[float, Meta(gt=0)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """How a stream ends."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool, Meta(extra_json_schema={"enum": [False]})] | None = None
    """Padding against traffic analysis is not built: only false asks for nothing."""


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag_field="type", tag="text"):
    """One part of a message's content; images, audio and files are not built."""

    text: str


class ChatMessage(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One turn."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Meta(max_length=PARTS_LIMIT)] | None = None
    name: str | None = None
    tool_calls: Calls | None = None
    """An assistant's."""
    reasoning_content: str | None = None
    """An assistant's; what is made of it, if anything, is the template's choice."""
    tool_call_id: Label | None = None
    """Which call a tool's message answers."""
    parsed: Unread | UnsetType = UNSET
    """An assistant's content again, as OpenAI's client leaves it beside it."""
    provider_specific_fields: Unread | UnsetType = UNSET
    """What LiteLLM notes of an answer beside it."""
    # What clients send back of an answer they got, always empty here.
    refusal: Annotated[NotBuilt, Harmless([])] = None
    annotations: Annotated[NotBuilt, Harmless([])] = None
    audio: Annotated[NotBuilt, Harmless([])] = None
    function_call: Annotated[NotBuilt, Harmless([])] = None


Messages = Annotated[list[ChatMessage], Meta(min_length=1, max_length=MESSAGES_LIMIT)]


class CommonFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of chats and completions (inherited by msgspec into one flat object; no code is shared through it)."""

    model: str | None = None
    """None: the only one that is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    logit_bias: LogitBias | None = None
    """By token id, in decimal."""
    max_tokens: TokenCount | None = None
    # vLLM's
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopIds | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    """OpenAI has it for chats only."""
    cache_salt: CacheName | None = None
    """Prompts share cached blocks only with prompts of the same salt."""
    # our own
    deadline_s: Seconds | None = None
    """How long the request may take; the server has a limit."""
    n: Choices | None = None
    """How many answers."""
    # harmless
    user: Label | None = None


class ChatRequest(CommonFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: TokenCount | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    prompt_cache_key: CacheName | None = None
    """Requests of one key prefer one worker."""
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """False: the answer ends with its first call."""
    chat_template_kwargs: TemplateKwargs | None = None
    """vLLM's: names that the chat template reads, as `enable_thinking`."""
    reasoning_effort: Effort | None = None
    thinking_token_budget: ThinkingBudget | None = None
    """vLLM's."""
    service_tier: ServiceTier | None = None
    """There is one, whichever is asked for; the answer says that it was the default."""
    # harmless
    metadata: Metadata | None = None
    safety_identifier: Annotated[str, Meta(max_length=64)] | None = None
    # not built
    store: Annotated[NotBuilt, Harmless(False)] = None
    audio: NotBuilt = None
    function_call: NotBuilt = None
    functions: Annotated[NotBuilt, Harmless([])] = None
    modalities: Annotated[NotBuilt, Harmless(["text"])] = None
    moderation: NotBuilt = None
    prediction: NotBuilt = None
    prompt_cache_retention: Annotated[NotBuilt, Harmless("in_memory")] = None
    verbosity: NotBuilt = None
    web_search_options: NotBuilt = None


_CHAT = msgspec.json.Decoder(ChatRequest)
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def decode_chat(body: bytes) -> ChatRequest:
    """Raises InvalidRequest, naming the field."""
    request = decode_body(_CHAT, body)
    check_chat(request)
    return request


def check_chat(request: ChatRequest) -> None:
    """What its types do not say. Raises InvalidRequest, naming the field."""
    check_common(request)
    for at, message in enumerate(request.messages):
        check_message(message, f"messages[{at}]")
    check_tools(request.tools or ())
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")


def check_message(message: ChatMessage, where: str) -> None:
    """Raises InvalidRequest."""
    check_not_built(message, f"{where}.")
    for field, role in (("tool_calls", "assistant"), ("reasoning_content", "assistant"), ("tool_call_id", "tool")):
        if getattr(message, field) and message.role != role:
            raise InvalidRequest(f"{where}.{field}: only a message of role {role} has it", param=f"{where}.{field}")
    if message.role == "tool" and not message.tool_call_id:
        raise InvalidRequest("a tool's message that names no call", param=f"{where}.tool_call_id")
    if message.content is None and not message.tool_calls and not message.reasoning_content:
        raise InvalidRequest("a message without content", param=f"{where}.content")


def messages_as_rendered(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """The messages as templates read them. Raises InvalidRequest."""
    called: dict[str, str] = {}
    rendered: list[dict[str, Any]] = []
    for at, message in enumerate(messages):
        rendered.append(_turn(message, f"messages[{at}]"))
        called |= {call.id: call.function.name for call in message.tool_calls or ()}
        # Some templates want the name of the tool, which OpenAI's messages have not.
        if message.tool_call_id in called:
            rendered[-1].setdefault("name", called[message.tool_call_id])
    return rendered


def _turn(message: ChatMessage, where: str) -> dict[str, Any]:
    content = message.content or ""
    text = content if isinstance(content, str) else "".join(part.text for part in content)
    turn: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role, "content": text}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_calls:
        turn["tool_calls"] = calls_as_rendered(message.tool_calls, f"{where}.tool_calls")
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.reasoning_content is not None:
        turn["reasoning_content"] = message.reasoning_content
    return turn


def offered_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """The tools as templates read them; with `tool_choice` none the model is told of none."""
    return [] if request.tool_choice == "none" else tools_as_rendered(request.tools or ())


def stop_strings(request: ChatRequest | CompletionRequest) -> tuple[str, ...]:
    """The stop strings."""
    given = request.stop
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def token_limit(request: ChatRequest | CompletionRequest) -> tuple[int | None, str]:
    """How many tokens the client allows, None where it does not say, and the field that says it. Raises
    InvalidRequest."""
    if not isinstance(request, ChatRequest) or request.max_completion_tokens is None:
        return request.max_tokens, "max_tokens"
    if request.max_tokens not in (None, request.max_completion_tokens):
        raise InvalidRequest("max_tokens and max_completion_tokens contradict each other", param="max_tokens")
    return request.max_completion_tokens, "max_completion_tokens"


def logprobs_of(request: ChatRequest | CompletionRequest) -> int:
    """As in `Sampling.logprobs`."""
    if isinstance(request, ChatRequest):
        return (request.top_logprobs or 0) if request.logprobs else -1
    return -1 if request.logprobs is None else request.logprobs


def sampling_of(
    request: ChatRequest | CompletionRequest, max_tokens: int, drawn_seed: int, grammar: str = ""
) -> Sampling:
    """`drawn_seed` is used where the client gave none; `grammar` is what the answer is held to."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=_or(request.temperature, 1.0),
        top_p=_or(request.top_p, 1.0),
        top_k=max(0, _or(request.top_k, 0)),
        min_p=_or(request.min_p, 0.0),
        seed=_or(request.seed, drawn_seed) & ((1 << 64) - 1),
        presence_penalty=_or(request.presence_penalty, 0.0),
        frequency_penalty=_or(request.frequency_penalty, 0.0),
        repetition_penalty=_or(request.repetition_penalty, 1.0),
        logprobs=logprobs_of(request),
        stop_token_ids=tuple(request.stop_token_ids or ()),
        ignore_eos=bool(request.ignore_eos),
        grammar=grammar,
        logit_bias=tuple((int(token), bias) for token, bias in (request.logit_bias or {}).items()),
    )


N = TypeVar("N", int, float)


def _or(given: N | None, default: N) -> N:
    return default if given is None else given


def check_common(request: ChatRequest | CompletionRequest) -> None:
    """Raises InvalidRequest."""
    check_not_built(request)
    for token in request.logit_bias or ():
        if not _TOKEN_ID.fullmatch(token):
            raise InvalidRequest(f"logit_bias: {token!r} is not a token id", param=f"logit_bias[{token}]")
    options = request.stream_options
    if options is not None:
        if not request.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        if options.include_obfuscation:
            raise not_supported("stream_options.include_obfuscation")
    token_limit(request)
