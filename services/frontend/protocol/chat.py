"""The body of /v1/chat/completions, and the fields that completions share with it.

A field is in one of five classes:

    built         does what OpenAI (or vLLM, for its own fields) documents
    harmless      accepted without effect, because it asks for nothing of the answer: user, metadata, …
    advisory      checked, then ignored: the answer is what it would be without it; reported to the client
    not built     would change the answer: accepted only if its value asks for nothing (null, false); else refused
    unknown       ignored and reported to the client, or refused (`unknown_fields`); nothing is ignored silently

protocol/messages.py has the messages, protocol/completions.py the other fields of completions; protocol/decoding.py
refuses what is not built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.protocol.decoding import Harmless, NotBuilt, check_not_built, decode_body
from services.frontend.protocol.errors import field_error
from services.frontend.protocol.ignored_fields import REFUSE, Advisory, IgnoredFields
from services.frontend.protocol.messages import ChatMessage, Messages, check_message, images_of
from services.frontend.protocol.parts import PARTS_LIMIT, Unread
from services.frontend.protocol.reasoning import Effort, ThinkingBudget
from services.frontend.protocol.structured import (
    GrammarChoices,
    ResponseFormat,
    StructuredOutputs,
    Text,
    ToolChoice,
    check_choice,
    offered,
)
from services.frontend.protocol.tools import Tools, check_tools, tools_as_rendered
from shared.errors import InvalidRequest

STOPS_LIMIT = 256
STOP_LIMIT_CHARACTERS = 256
STOPS_LIMIT_CHARACTERS = 4096
"""Characters of all stop strings together, which bounds the time that a token takes."""
TOP_LOGPROBS_LIMIT = 20
LOGIT_BIAS_LIMIT = 300
CHOICES_LIMIT = 128
"""OpenAI's limit for `n`."""
_INT32_MAX = (1 << 31) - 1
_INT64_MAX = (1 << 63) - 1

Temperature = Annotated[float, Meta(ge=0, le=2)]
TopP = Annotated[float, Meta(ge=0, le=1)]
TopK = Annotated[int, Meta(ge=-1, le=_INT32_MAX)]
MinP = Annotated[float, Meta(ge=0, le=1)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
RepetitionPenalty = Annotated[float, Meta(gt=0, le=100)]
TokenCount = Annotated[int, Meta(ge=1, le=_INT32_MAX)]
TokenLimit = Annotated[int, Meta(ge=-1, le=_INT32_MAX)]
"""Most tokens of an answer. -1 is no limit but the context, as in llama.cpp and LM Studio."""
LeastTokens = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
TruncatedTokens = Annotated[int, Meta(ge=-1, le=_INT32_MAX)]
Seed = Annotated[int, Meta(ge=-_INT64_MAX - 1, le=_INT64_MAX)]
TokenId = Annotated[int, Meta(ge=0, le=_INT32_MAX)]
StopString = Annotated[str, Meta(max_length=STOP_LIMIT_CHARACTERS)]
Stops = StopString | Annotated[list[StopString], Meta(max_length=STOPS_LIMIT)]
Choices = Annotated[int, Meta(ge=1, le=CHOICES_LIMIT)]
StopIds = Annotated[list[TokenId], Meta(max_length=64)]
AllowedIds = Annotated[list[TokenId], Meta(max_length=1 << 14)]
TopLogprobs = Annotated[int, Meta(ge=0, le=TOP_LOGPROBS_LIMIT)]
Label = Annotated[str, Meta(max_length=512)]
CacheName = Annotated[str, Meta(max_length=256)]
"""Routers and workers refuse a longer one."""
TokenKey = Annotated[str, Meta(max_length=512, extra_json_schema={"pattern": "^(0|[1-9][0-9]{0,9})$"})]
Metadata = Annotated[
    dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]], Meta(max_length=16)
]
TemplateKwargs = Annotated[dict[Label, Any], Meta(max_length=64)]
Documents = Annotated[list[dict[str, Any]], Meta(max_length=PARTS_LIMIT)]
LogitBias = Annotated[dict[TokenKey, Annotated[float, Meta(ge=-100, le=100)]], Meta(max_length=LOGIT_BIAS_LIMIT)]
Seconds = Annotated[float, Meta(gt=0)]
Priority = Annotated[int, Meta(ge=-_INT32_MAX, le=_INT32_MAX)]


class StreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's field: with `include_usage`, each chunk has the usage up to it."""
    include_obfuscation: Annotated[bool | None, Advisory(), Harmless(False)] = None
    """Accepted and ignored: Headrace adds no padding against traffic analysis."""


class CommonFields(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of both chats and completions. msgspec inherits them into one flat object; no code is shared."""

    model: str | None = None
    """The model's name; it may be left out if only one model is served."""
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Temperature | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    logit_bias: LogitBias | None = None
    """Token id in decimal → bias."""
    max_tokens: TokenLimit | None = None
    # vLLM's
    top_k: TopK | None = None
    min_p: MinP | None = None
    repetition_penalty: RepetitionPenalty | None = None
    ignore_eos: bool | None = None
    stop_token_ids: StopIds | None = None
    min_tokens: LeastTokens | None = None
    """Tokens before which no end of sequence and no stop counts."""
    skip_special_tokens: bool | None = None
    """If false, special tokens stand in the text in their written form."""
    include_stop_str_in_output: bool | None = None
    """Whether the answer ends with the stop string, or with the text of the stop token, that ended it."""
    allowed_token_ids: AllowedIds | None = None
    """The tokens that alone may be drawn. Empty means all."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its special tokens to the prompt. By default it does for a text, and does not for a
    chat, whose template writes them."""
    return_tokens_as_token_ids: bool | None = None
    """Whether log-probabilities name tokens as `token_id:17`."""
    return_token_ids: bool | None = None
    """Whether the answer has the tokens of the prompt and its own."""
    truncate_prompt_tokens: TruncatedTokens | None = None
    """Tokens of the prompt that are kept, the last ones. -1 means as many as fit."""
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | Text | None = None
    """What older clients of vLLM send in place of `structured_outputs.json`; so are the next three."""
    guided_regex: Text | None = None
    guided_choice: GrammarChoices | None = None
    guided_grammar: Text | None = None
    response_format: ResponseFormat | None = None
    """OpenAI has this for chats only."""
    cache_salt: CacheName | None = None
    """Prompts share cached blocks only with prompts that have the same salt."""
    priority: Priority | None = None
    """vLLM's field: requests with a lower value are computed first. The default is 0; the API key bounds it."""
    prompt_cache_key: CacheName | None = None
    """Requests with the same key prefer the same worker. OpenAI has this for chats and responses only."""
    # our own
    deadline_s: Seconds | None = None
    """Seconds that the request may take; the server has a limit."""
    n: Choices | None = None
    """Number of answers."""
    # harmless
    user: Unread | UnsetType = UNSET
    # advisory
    spaces_between_special_tokens: Annotated[bool | None, Advisory(), Harmless(False)] = None
    """vLLM's field; tokenizers as ours do not put spaces there."""
    # not built
    bad_words: Annotated[NotBuilt, Harmless([])] = None
    kv_transfer_params: Annotated[NotBuilt, Harmless({})] = None
    logprob_token_ids: Annotated[NotBuilt, Harmless([])] = None
    length_penalty: Annotated[NotBuilt, Harmless(1.0)] = None
    logits_processors: Annotated[NotBuilt, Harmless([])] = None
    prompt_logprobs: NotBuilt = None
    truncation_side: Annotated[NotBuilt, Harmless("left")] = None
    use_beam_search: Annotated[NotBuilt, Harmless(False)] = None


class ChatRequest(CommonFields, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    """If false, the answer ends after its first call."""
    add_generation_prompt: bool | None = None
    """If false, the prompt does not end with the beginning of an answer. True by default, except with
    `continue_final_message`."""
    continue_final_message: bool | None = None
    """Whether the answer continues the last message instead of answering it."""
    chat_template_kwargs: TemplateKwargs | None = None
    """vLLM's field: variables of the chat template, such as `enable_thinking`."""
    enable_thinking: bool | None = None
    """A variable of many chat templates, as `chat_template_kwargs.enable_thinking`. `documents` is another."""
    documents: Documents | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: ThinkingBudget | None = None
    """vLLM's field: tokens of reasoning at most."""
    service_tier: Label | None = None
    """There is only one tier, whichever is requested; the answer names `default`."""
    # harmless
    metadata: Unread | UnsetType = UNSET
    safety_identifier: Unread | UnsetType = UNSET
    # advisory
    prediction: Annotated[dict[str, Any] | None, Advisory()] = None
    """Text that the answer may repeat; it would only make the answer faster."""
    prompt_cache_retention: Annotated[Label | None, Advisory(), Harmless("in_memory", "in-memory")] = None
    store: Annotated[bool | None, Advisory(), Harmless(False)] = None
    """Chats are not stored; /v1/responses stores its own."""
    verbosity: Annotated[Label | None, Advisory()] = None
    web_search_options: Annotated[dict[str, Any] | None, Advisory()] = None
    """A server's search of the web, which is not here, as `tools` of type `web_search`."""
    # not built
    audio: NotBuilt = None
    best_of: Annotated[NotBuilt, Harmless(1)] = None
    chat_template: NotBuilt = None
    echo: Annotated[NotBuilt, Harmless(False)] = None
    function_call: Annotated[NotBuilt, Harmless("none", "auto")] = None
    """What it asks is about `functions`, which must be empty."""
    functions: Annotated[NotBuilt, Harmless([])] = None
    modalities: Annotated[NotBuilt, Harmless(["text"])] = None
    media_io_kwargs: Annotated[NotBuilt, Harmless({})] = None
    mm_processor_kwargs: Annotated[NotBuilt, Harmless({})] = None
    moderation: NotBuilt = None


_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def decode_chat(body: bytes, ignored: IgnoredFields = REFUSE) -> ChatRequest:
    """Decode and check the body of a chat. Raise InvalidRequest, naming the field."""
    request = decode_body(ChatRequest, body, ignored)
    check_chat(request, ignored)
    return request


def check_chat(request: ChatRequest, ignored: IgnoredFields = REFUSE) -> None:
    """Check what the types of a chat do not. Raise InvalidRequest, naming the field."""
    check_common(request, ignored)
    for at, message in enumerate(request.messages):
        check_message(message, f"messages[{at}]", ignored)
    check_tools(request.tools or ())
    check_choice(request.tools, request.tool_choice)
    if request.top_logprobs and not request.logprobs:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    check_final_message(request.messages, request.add_generation_prompt, request.continue_final_message)


def check_final_message(messages: Sequence[ChatMessage], begins: bool | None, continues: bool | None) -> None:
    """Check the fields that say where a prompt ends. `begins` is add_generation_prompt, `continues` is
    continue_final_message. Raise InvalidRequest."""
    if not continues:
        return
    if begins:
        raise field_error("continue_final_message", "add_generation_prompt: true contradicts it")
    last, where = messages[-1], f"messages[{len(messages) - 1}]"
    if last.role in ("system", "developer"):  # a template may put it first, and what follows it would be cut off
        raise field_error(f"{where}.role", f"continue_final_message cannot continue a message of role {last.role}")
    if last.content is None:
        raise field_error(f"{where}.content", "continue_final_message needs a text to continue")
    if last.tool_calls:
        raise field_error(f"{where}.tool_calls", "a message with calls cannot be continued")
    if images_of([last]):
        raise field_error(f"{where}.content", "a message with images cannot be continued")


def check_truncation(tokens: int | None) -> None:
    """Check a request's truncate_prompt_tokens. Raise InvalidRequest."""
    if tokens == 0:
        raise field_error("truncate_prompt_tokens", "0 would leave no prompt; -1 keeps as much as fits")


def template_kwargs(request: ChatRequest) -> Mapping[str, Any]:
    """Return the variables that a request sets for the chat template. Raise InvalidRequest if two contradict."""
    given = dict(request.chat_template_kwargs or {})
    for name, value in (("enable_thinking", request.enable_thinking), ("documents", request.documents or None)):
        if value is not None and given.setdefault(name, value) != value:
            raise field_error(name, f"chat_template_kwargs.{name} contradicts it")
    return given


def offered_tools(request: ChatRequest) -> list[dict[str, Any]]:
    """Return the tools that `tool_choice` allows, in the form that chat templates read."""
    return tools_as_rendered(offered(request.tools, request.tool_choice))


def token_limit(request: CommonFields) -> tuple[int | None, str]:
    """Return how many tokens the client allows (None: any number, or it does not say), and the field that says it.

    Raise InvalidRequest if two fields contradict each other, or for 0 in a chat."""
    field, limit = "max_tokens", request.max_tokens
    if isinstance(request, ChatRequest) and request.max_completion_tokens is not None:
        if limit not in (None, request.max_completion_tokens):
            raise InvalidRequest("max_tokens and max_completion_tokens contradict each other", param="max_tokens")
        field, limit = "max_completion_tokens", request.max_completion_tokens
    if limit == 0 and isinstance(request, ChatRequest):
        raise field_error(field, "must be at least 1, or -1 for any number")
    return None if limit == -1 else limit, field


def check_common(request: CommonFields, ignored: IgnoredFields = REFUSE) -> None:
    """Check the fields that chats and completions share. Raise InvalidRequest, naming the field."""
    check_not_built(request, "", ignored)
    for token in request.logit_bias or ():
        if not _TOKEN_ID.fullmatch(token):
            raise InvalidRequest(f"logit_bias: {token!r} is not a token id", param=f"logit_bias[{token}]")
    options = request.stream_options
    if options is not None:
        check_not_built(options, "stream_options.", ignored)
        if not request.stream:
            refusal = InvalidRequest("stream_options needs stream: true", param="stream_options")
            ignored.add_or_raise("stream_options", refusal)
    _check_stops([request.stop] if isinstance(request.stop, str) else request.stop or (), ignored)
    check_truncation(request.truncate_prompt_tokens)
    limit, _ = token_limit(request)
    if limit is not None:
        check_least_tokens(request, limit)


def _check_stops(stops: Sequence[str], ignored: IgnoredFields) -> None:
    if sum(map(len, stops)) > STOPS_LIMIT_CHARACTERS:
        raise field_error("stop", f"more than {STOPS_LIMIT_CHARACTERS} characters together")
    if "" in stops:
        ignored.add_or_raise("stop", field_error(f"stop[{stops.index('')}]", "an empty text stops nothing"))


def check_least_tokens(request: CommonFields, most: int) -> None:
    """Raise InvalidRequest if a request's min_tokens is more than `most`, the tokens that may follow its prompt."""
    if (least := request.min_tokens or 0) > most:
        limit, param = token_limit(request)
        most_is = f"the {most} tokens that may follow without {param}" if limit is None else f"{param}, which is {most}"
        raise field_error("min_tokens", f"{least} is more than {most_is}")
