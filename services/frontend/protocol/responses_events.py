"""The response of /v1/responses, and the events of a streamed one. Pure.

created, in_progress
output_item.added ─▶ content_part.added ─▶ ….delta … ─▶ ….done ─▶ content_part.done ─▶ output_item.done    each item
completed, incomplete or failed
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from services.frontend.protocol.chat_chunks import SERVICE_TIER, PromptTokensDetails, TokenLogprobs, Usage
from services.frontend.protocol.responses_items import OutputItem, OutputText, ThoughtText
from services.frontend.protocol.responses_request import ChosenFunction, DecodedRequest, ResponseTool


class InputTokensDetails(PromptTokensDetails, frozen=True):
    """Details of the input's tokens: those of a chat, inherited by msgspec, and one more of OpenAI's."""

    cache_write_tokens: Literal[0] = 0
    """Tokens written to a cache. OpenAI charges for them; they are not counted here."""


class OutputTokensDetails(Struct, frozen=True):
    """Details of the output's tokens."""

    reasoning_tokens: int
    """Tokens up to the last one that reasoning came from."""


class ResponseUsage(Struct, frozen=True):
    """Token counts of one response."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens_details: OutputTokensDetails

    @staticmethod
    def of(usage: Usage, reasoning_tokens: int) -> ResponseUsage:
        """Make the counts from those of a chat."""
        cached = usage.prompt_tokens_details
        return ResponseUsage(
            usage.prompt_tokens,
            usage.completion_tokens,
            usage.total_tokens,
            InputTokensDetails(cached.cached_tokens, cached.cached_tokens_by_tier),
            OutputTokensDetails(reasoning_tokens),
        )


class ResponseError(Struct, frozen=True):
    """The reason why a response failed after it had begun."""

    code: Literal["server_error", "rate_limit_exceeded"]
    message: str


class IncompleteDetails(Struct, frozen=True):
    """The reason why a response ended early."""

    reason: Literal["max_output_tokens"]


class ReasoningSetting(Struct, frozen=True):
    """The reasoning options of the request."""

    effort: str | None
    summary: None = None


class Response(Struct, frozen=True, kw_only=True):
    """A response, complete or in progress."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete", "failed"] = "in_progress"
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    model: str
    output: list[OutputItem] = []
    usage: ResponseUsage | None = None
    # copied from the request
    background: Literal[False] = False
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: ReasoningSetting
    safety_identifier: str | None
    service_tier: Literal["default"] = SERVICE_TIER
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | ChosenFunction
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None


def new_response(asked: DecodedRequest, response_id: str, created_at: int, model: str) -> Response:
    """Make the response to a request, without output. `created_at` is Unix time in seconds."""
    request = asked.request
    form = None if request.text is None else request.text.format
    return Response(
        id=response_id,
        created_at=created_at,
        model=model,
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ReasoningSetting(None if request.reasoning is None else request.reasoning.effort),
        safety_identifier=request.safety_identifier,
        store=asked.is_stored,
        temperature=1.0 if request.temperature is None else request.temperature,
        text={"format": {"type": "text"} if form is None else form},
        tool_choice=request.tool_choice or "auto",
        tools=request.tools or [],
        top_logprobs=request.top_logprobs or 0,
        top_p=1.0 if request.top_p is None else request.top_p,
        user=request.user,
    )


class ResponseDeleted(Struct, frozen=True, kw_only=True):
    """The answer of DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# --- events; an event's name is its `type`, which comes first


class ResponseCreated(Struct, frozen=True, tag_field="type", tag="response.created"):
    """The first event."""

    response: Response
    sequence_number: int


class ResponseInProgress(Struct, frozen=True, tag_field="type", tag="response.in_progress"):
    """The second event."""

    response: Response
    sequence_number: int


class ItemAdded(Struct, frozen=True, tag_field="type", tag="response.output_item.added"):
    """An item begins; it is empty."""

    item: OutputItem
    output_index: int
    sequence_number: int


class PartAdded(Struct, frozen=True, tag_field="type", tag="response.content_part.added"):
    """The only part of a message or of reasoning begins; it is empty."""

    item_id: str
    output_index: int
    part: OutputText | ThoughtText
    sequence_number: int
    content_index: int = 0


class TextDelta(Struct, frozen=True, tag_field="type", tag="response.output_text.delta"):
    """The next text of a message."""

    item_id: str
    output_index: int
    content_index: int
    logprobs: list[TokenLogprobs]
    delta: str
    sequence_number: int


class ThoughtDelta(Struct, frozen=True, tag_field="type", tag="response.reasoning_text.delta"):
    """The next text of reasoning."""

    item_id: str
    output_index: int
    content_index: int
    delta: str
    sequence_number: int


class ArgumentsDelta(Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.delta"):
    """The next text of a call's arguments."""

    item_id: str
    output_index: int
    delta: str
    sequence_number: int


class TextDone(Struct, frozen=True, tag_field="type", tag="response.output_text.done"):
    """The whole text of a message."""

    item_id: str
    output_index: int
    text: str
    logprobs: list[TokenLogprobs]
    sequence_number: int
    content_index: int = 0


class ThoughtDone(Struct, frozen=True, tag_field="type", tag="response.reasoning_text.done"):
    """The whole text of reasoning."""

    item_id: str
    output_index: int
    text: str
    sequence_number: int
    content_index: int = 0


class ArgumentsDone(Struct, frozen=True, tag_field="type", tag="response.function_call_arguments.done"):
    """The complete arguments of a call."""

    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int


class PartDone(Struct, frozen=True, tag_field="type", tag="response.content_part.done"):
    """A part is complete."""

    item_id: str
    output_index: int
    part: OutputText | ThoughtText
    sequence_number: int
    content_index: int = 0


class ItemDone(Struct, frozen=True, tag_field="type", tag="response.output_item.done"):
    """An item is complete."""

    item: OutputItem
    output_index: int
    sequence_number: int


class ResponseCompleted(Struct, frozen=True, tag_field="type", tag="response.completed"):
    """The last event of a response that is complete."""

    response: Response
    sequence_number: int


class ResponseIncomplete(Struct, frozen=True, tag_field="type", tag="response.incomplete"):
    """The last event of a response that was cut off."""

    response: Response
    sequence_number: int


class ResponseFailed(Struct, frozen=True, tag_field="type", tag="response.failed"):
    """The last event of a response that failed after it had begun."""

    response: Response
    sequence_number: int


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | TextDelta
    | ThoughtDelta
    | ArgumentsDelta
    | TextDone
    | ThoughtDone
    | ArgumentsDone
    | PartDone
    | ItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
