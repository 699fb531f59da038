"""What the OpenAPI document says of each operation; asking.PATHS has no operation that is not here. Pure.

The rules are what a schema does not say: they tie fields to one another, to the model or to the server's settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from msgspec import Struct

from services.frontend.openapi.chunk_structs import ChatChunk, CompletionChunk
from services.frontend.protocol.chat import ChatRequest
from services.frontend.protocol.chat_chunks import ChatAnswer, CompletionAnswer
from services.frontend.protocol.completions import CompletionRequest
from services.frontend.protocol.embeddings import EmbeddingAnswer, EmbeddingRequest
from services.frontend.protocol.operations import Operation
from services.frontend.protocol.responses_events import Response, ResponseEvent
from services.frontend.protocol.responses_items import INPUT_ITEMS
from services.frontend.protocol.responses_request import ResponseRequest
from services.frontend.protocol.tokenize import Detokenized, DetokenizeRequest, Tokenized, TokenizeRequest


class OperationDescription(Struct, frozen=True):
    """One operation."""

    summary: str
    request: type[Struct]
    answer: type[Struct]
    events: tuple[type[Struct], ...] = ()
    """What a streamed answer's events hold; none: it is never streamed. Those that have a type are named by it."""
    items: tuple[type[Struct], ...] = ()
    """What the request holds that its type does not name."""
    rules: tuple[str, ...] = ()


_MODEL = "`model` may be left out where one model is served; one that is not served is 404"
_DEADLINE = "`deadline_s` is at most the server's `limits.deadline_most_s`"
_CONTEXT = "the prompt, and `max_tokens` behind it, fit into the model's context"
_VOCABULARY = "token ids are below the model's vocabulary"
_WORKERS = "what not every worker of the model can do is refused: grammars, `logit_bias`"
_MESSAGES = (
    "a message has content, calls (an assistant's) or thinking; a tool's names its call; calls' arguments are JSON"
)
_TOOLS = (
    "tools have different names, schemas of objects and at most 64 KiB and 64 levels, 512 KiB together; the model's"
    " template takes tools"
)
_HELD = (
    "an answer is held to one thing: `response_format`, exactly one of `structured_outputs`, or calls; beside"
    " tools, to `response_format` only where calls are written as Hermes does; its schema, expression or grammar"
    " compiles within bounds"
)
_AROUND = "`echo` is not beside `logprobs`; `suffix` is beside texts, and of a model that has marks for it"
_ITEMS = "calls have different ids, and JSON as arguments; a call's one output comes behind it"
_PREVIOUS = "`previous_response_id` is a response of the same key that is still kept; 4 MiB with this input"
_INCLUDE = (
    "`include` has no other word than `message.output_text.logprobs`, which needs text alone: no tools, no thinking;"
    " `top_logprobs` needs it"
)
_INPUTS = (
    "an input is not empty and fits into the context; a list is of token ids, which are one input, or of at most"
    " 2,048 inputs; 1 Mi tokens together"
)
_DIMENSIONS = "`dimensions` are at most the model's; some workers compute no embeddings"
_PROMPT = "a prompt is not empty; a list is of token ids, which are one prompt, or of prompts"
_WORDS = "`chat_template_kwargs` are names that the model's template reads"
_STREAM = "`stream_options` needs `stream`; padding (`include_obfuscation`) is not built"

DESCRIPTIONS: Mapping[Operation, OperationDescription] = {
    "chat": OperationDescription(
        "Answer a conversation",
        ChatRequest,
        ChatAnswer,
        (ChatChunk,),
        rules=(
            *(_MODEL, _MESSAGES, _TOOLS, _HELD, _WORDS, _STREAM, _CONTEXT, _VOCABULARY, _WORKERS, _DEADLINE),
            "`top_logprobs` needs `logprobs`; `max_tokens` and `max_completion_tokens` agree",
        ),
    ),
    "completions": OperationDescription(
        "Go on with a text",
        CompletionRequest,
        CompletionAnswer,
        (CompletionChunk,),
        rules=(_MODEL, _PROMPT, _AROUND, _HELD, _STREAM, _CONTEXT, _VOCABULARY, _WORKERS, _DEADLINE),
    ),
    "responses": OperationDescription(
        "Answer a conversation that is kept",
        ResponseRequest,
        Response,
        get_args(ResponseEvent),
        INPUT_ITEMS,
        rules=(
            *(_MODEL, _ITEMS, _PREVIOUS, _INCLUDE, _TOOLS, _HELD, _WORDS, _STREAM, _CONTEXT, _VOCABULARY, _WORKERS),
            _DEADLINE,
        ),
    ),
    "embeddings": OperationDescription(
        "What texts mean, as vectors",
        EmbeddingRequest,
        EmbeddingAnswer,
        rules=(_MODEL, _INPUTS, _DIMENSIONS, _VOCABULARY, _DEADLINE),
    ),
    "tokenize": OperationDescription(
        "The tokens of a prompt or of messages",
        TokenizeRequest,
        Tokenized,
        rules=(
            *(_MODEL, _MESSAGES, _TOOLS, _WORDS),
            "either `prompt` or `messages`",
            "`add_generation_prompt`, `tools` and `chat_template_kwargs` only beside messages",
            "at most 1 Mi tokens",
        ),
    ),
    "detokenize": OperationDescription(
        "The text of tokens", DetokenizeRequest, Detokenized, rules=(_MODEL, _VOCABULARY, "at most 8 Mi characters")
    ),
}
