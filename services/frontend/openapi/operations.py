"""The description of each operation in protocol/operations.py for the OpenAPI document. Pure.

Rules are what a schema cannot express: they relate fields to each other, to the model or to the server's settings.
Requests and errors of other providers' APIs are described too; their answers are as these providers describe them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, get_args

from msgspec import UNSET, Meta, Struct, UnsetType

from services.frontend.anthropic.request import CountTokensRequest, MessagesRequest
from services.frontend.anthropic.tools import ClientTool, KnownTool
from services.frontend.ollama import request as ollama
from services.frontend.openapi.schemas import Schema
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.chat_chunks import (
    AnswerIdentity,
    ChatAnswer,
    ChatLogprobs,
    CompletionAnswer,
    CompletionLogprobs,
    ToolCall,
    Usage,
)
from services.frontend.protocol.completions import CompletionRequest
from services.frontend.protocol.embeddings import EmbeddingAnswer, EmbeddingRequest
from services.frontend.protocol.operations import ForeignOperation, Operation
from services.frontend.protocol.pictures import (
    CompletedEdit,
    CompletedPicture,
    PartialEdit,
    PartialPicture,
    PictureAnswer,
    PictureEditRequest,
    PictureRequest,
)
from services.frontend.protocol.responses_events import Response, ResponseEvent
from services.frontend.protocol.responses_items import INPUT_ITEMS
from services.frontend.protocol.responses_request import ResponseRequest
from services.frontend.protocol.responses_tools import RESPONSE_TOOLS
from services.frontend.protocol.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest
from services.frontend.protocol.videos import Video, VideoRequest

# --- Structs for answers that are not encoded from one: the chunks that chat_chunks.py joins from bytes, and answers of
# shared/runtime/observe.py. Tests compare real answers with them.

FinishReason = Literal["stop", "length", "tool_calls"]
Index = Annotated[int, Meta(ge=0)]


class ChatChunkDelta(Struct, frozen=True):
    """The text that a chunk adds; it is empty in the chunk that says why the answer ended."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True):
    """The part of a chunk that belongs to one choice."""

    index: Index
    delta: ChatChunkDelta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    """The new tokens, present with `return_token_ids`."""


class ChatChunk(AnswerIdentity, frozen=True):
    """One event of a streamed chat. It has one choice, or none in the event with the usage."""

    choices: list[ChatChunkChoice]
    object: Literal["chat.completion.chunk"]
    usage: Usage | UnsetType | None = UNSET
    """The usage, present with `stream_options.include_usage`; null in all chunks but the last."""
    service_tier: Literal["default"] | UnsetType = UNSET
    """The service tier, present if the request has one."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """The tokens of the prompt, present in the first chunk with `return_token_ids`."""


class CompletionChunkChoice(Struct, frozen=True):
    """The part of a chunk that belongs to one choice."""

    index: Index
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: FinishReason | None
    token_ids: list[int] | UnsetType = UNSET
    """The new tokens, present with `return_token_ids`."""
    prompt_token_ids: list[int] | UnsetType = UNSET
    """The tokens of the prompt, present in a choice's first chunk with `return_token_ids`."""


class CompletionChunk(AnswerIdentity, frozen=True):
    """One event of a streamed completion. It has one choice, or none in the event with the usage."""

    choices: list[CompletionChunkChoice]
    object: Literal["text_completion"]
    usage: Usage | UnsetType | None = UNSET


class Version(Struct, frozen=True):
    """The version of the frontend that answers."""

    version: str


class Health(Struct, frozen=True):
    """Whether a request would be served now. If keys are required, only `ready` is there."""

    ready: bool
    reasons: list[str] | UnsetType = UNSET
    """The reasons why no request would be served."""
    models: list[str] | UnsetType = UNSET


# --- operations

_AS_CHAT = "what a chat, a completion or a request for embeddings refuses is refused, by the name of its field here"
_TEXT: Schema = {"type": "string"}


class OperationDescription(Struct, frozen=True):
    """The description of one operation."""

    summary: str
    request: type[Struct]
    answer: type[Struct] | None = None
    """The answer. None if the provider of the API describes it."""
    events: tuple[type[Struct], ...] = ()
    """The data of the events of a streamed answer; empty if it is never streamed. Events with a type are named by
    it."""
    items: tuple[type[Struct], ...] = ()
    """Structs in the request that its type does not name."""
    provider: str = ""
    """The provider of the API, a key of ERRORS. Empty for OpenAI's and vLLM's."""
    streamed: Schema = {}
    """The content by its media type of a streamed answer that its provider describes."""
    rule: str = ""
    """A rule of this operation alone."""

    def rules(self) -> list[str]:
        """Return the rules of the fields that the request has."""
        if self.provider:
            return [*filter(None, (self.rule,)), _AS_CHAT]
        own = set(self.request.__struct_fields__)
        return [rule for fields, rule in _RULES if own & set(fields.split())]


_RULES: Sequence[Sequence[str]] = [
    line.split(": ", 1)
    for line in """\
model: `model` may be left out if only one model is served; a model that is not served is 404
messages: a message of a user or with instructions has content; only an assistant's has calls, reasoning or a refusal; \
a call names its function; a message of role tool names the call that it answers, or comes after one without a result
echo: a prompt is not empty; a list holds token ids, which are one prompt, or prompts
echo: `echo` together with `logprobs` is refused unless every worker of the model computes log-probabilities of \
prompts, for more than 262,144 of them, and with `suffix` or `truncate_prompt_tokens`; `max_tokens` is 0 only with \
`echo`
echo: `suffix` needs prompts that are texts, and a model that can fill in the middle
previous_response_id: each output comes after its call; at least one item is a message
previous_response_id: `previous_response_id` is a response of the same key that is still stored; its conversation and \
this input have at most 4 MiB
include: `include` accepts only `message.output_text.logprobs`, which excludes tools and models that reason; \
`top_logprobs` needs it
tools: tools have different names, and `tool_choice` names some of them; their schemas are of objects, with at most \
64 KiB and 64 levels each and 512 KiB together; the model's template supports tools
encoding_format: an input is not empty and fits into the context; a list holds token ids, which are one input, or at \
most 2,048 inputs; all inputs have at most 1 Mi tokens together
partial_images: the size, the steps, `guidance` and `negative_prompt` are what the model takes; `partial_images` needs \
`stream`, which has one picture, as base64; `response_format: url` needs a server that keeps files
strength: either `image` or `images` is given; images are PNG, JPEG, WebP or GIF, within the server's limits, and as \
many as the model takes; a mask has the image's width and height, and some models need or refuse it; `strength` of the \
steps is at least one step
dimensions: `dimensions` is at most the model's; some workers compute no embeddings
response_format text: one constraint applies to an answer: `response_format`, exactly one member of \
`structured_outputs`, or calls; together with tools, `response_format` is allowed only for models that write calls as \
Hermes does; a schema, expression or grammar compiles within the server's limits
chat_template_kwargs: `chat_template_kwargs` are variables that the model's template reads; `messages`, `tools` and \
others that the server sets are refused
max_tokens max_output_tokens: the prompt and `max_tokens` together fit into the model's context
stop_token_ids encoding_format tokens: token ids are less than the size of the model's vocabulary
logit_bias: grammars and `logit_bias` are refused unless every worker of the model supports them
priority: `priority` is at least what the server or the API key allows
deadline_s: `deadline_s` is at most the server's `limits.deadline_most_s`
max_completion_tokens: `top_logprobs` needs `logprobs`; `max_tokens` and `max_completion_tokens` are equal if both are \
given
return_token_strs: either `prompt` or `messages` is given
return_token_strs: fields that say how messages are rendered, such as `tools`, are allowed only with messages
return_token_strs: at most 1 Mi tokens
continue_final_message: `continue_final_message` excludes `add_generation_prompt: true`; the last message then has a \
text and no calls, and is not of role `system` or `developer`
min_tokens: `min_tokens` is at most `max_tokens`, and is refused unless every worker of the model supports it
return_token_ids: with `return_token_ids`, the prompts of all answers have at most 128 Ki tokens together
truncate_prompt_tokens: `truncate_prompt_tokens` is -1, or from 1 to less than the model's context, and excludes \
`suffix`
tokens: at most 8 Mi characters
""".splitlines()
]
"""Fields, and a rule for each operation whose body has one of them."""


def _object(**fields: Schema) -> Schema:
    return {"type": "object", "properties": fields, "required": list(fields)}


ERRORS: Mapping[str, Schema] = {
    "Anthropic": _object(type={"const": "error"}, error=_object(type=_TEXT, message=_TEXT)),
    "Ollama": _object(error=_TEXT),
}
"""The schema of a failure by the provider of the API."""
_EVENTS: Schema = {"text/event-stream": {"schema": _object(event=_TEXT, data=_TEXT)}}
_LINES: Schema = {"application/x-ndjson": {"schema": _TEXT}}
_BLOCKS = "a tool_result comes after its tool_use, and is the only one; the last message is not the assistant's"
_RESULTS = "a message of role tool comes after a call of that tool without a result"
DESCRIPTIONS: Mapping[Operation | ForeignOperation, OperationDescription] = {
    "chat": OperationDescription("Answer a conversation", ChatRequest, ChatAnswer, (ChatChunk,)),
    "completions": OperationDescription("Continue a text", CompletionRequest, CompletionAnswer, (CompletionChunk,)),
    "responses": OperationDescription(
        "Answer a conversation, and store it",
        ResponseRequest,
        Response,
        get_args(ResponseEvent),
        (*INPUT_ITEMS, *RESPONSE_TOOLS),
    ),
    "embeddings": OperationDescription("Return texts as vectors of their meaning", EmbeddingRequest, EmbeddingAnswer),
    "pictures": OperationDescription(
        "Make pictures from a text", PictureRequest, PictureAnswer, (PartialPicture, CompletedPicture)
    ),
    "picture_edits": OperationDescription(
        "Make pictures from images and a text", PictureEditRequest, PictureAnswer, (PartialEdit, CompletedEdit)
    ),
    "videos": OperationDescription("Make a video from a text", VideoRequest, Video),
    "tokenize": OperationDescription("Return the tokens of a prompt or of messages", TokenizeRequest, Tokenized),
    "detokenize": OperationDescription("Return the text of tokens", DetokenizeRequest, Detokenized),
    "messages": OperationDescription(
        "Answer a conversation, as Anthropic does",
        MessagesRequest,
        items=(ClientTool, KnownTool),
        provider="Anthropic",
        streamed=_EVENTS,
        rule=_BLOCKS,
    ),
    "count_tokens": OperationDescription(
        "Count the tokens of a conversation, as Anthropic does",
        CountTokensRequest,
        provider="Anthropic",
        rule=_BLOCKS,
    ),
    "ollama_chat": OperationDescription(
        "Answer a conversation, as Ollama does",
        ollama.OllamaChatRequest,
        provider="Ollama",
        streamed=_LINES,
        rule=_RESULTS,
    ),
    "ollama_generate": OperationDescription(
        "Answer or continue a text, as Ollama does",
        ollama.OllamaGenerateRequest,
        provider="Ollama",
        streamed=_LINES,
    ),
    "ollama_embed": OperationDescription(
        "Return texts as vectors, as Ollama does", ollama.OllamaEmbedRequest, provider="Ollama"
    ),
    "ollama_show": OperationDescription(
        "Describe one model, as Ollama does", ollama.OllamaShowRequest, provider="Ollama"
    ),
}
