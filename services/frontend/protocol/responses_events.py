"""The response of /v1/responses, and the events of a streamed one. Pure.

created, in_progress
output_item.added ─▶ content_part.added ─▶ ….delta … ─▶ ….done ─▶ content_part.done ─▶ output_item.done    each item
                     reasoning_summary_part.added, .done: in their place, where reasoning is sent as its summary
completed, incomplete or failed
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from services.frontend.protocol.chat_chunks import SERVICE_TIER, PromptTokensDetails, TokenLogprobs, Usage
from services.frontend.protocol.responses_items import OutputItem, OutputText, SummaryText, ThoughtText
from services.frontend.protocol.responses_request import DecodedRequest, Summary
from services.frontend.protocol.responses_tools import ChosenTool, ResponseTool
from shared.messages.generate import Sampling


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
    summary: Summary | None = None


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
    tool_choice: str | ChosenTool
    tools: list[ResponseTool]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    user: str | None


def new_response(asked: DecodedRequest, response_id: str, created_at: int, model: str, sampling: Sampling) -> Response:
    """Make the response to a request, without output. `created_at` is Unix time in seconds."""
    request = asked.request
    form = None if request.text is None else request.text.format
    return Response(
        id=response_id,
        created_at=created_at,
        model=model,
        metadata=request.metadata or {},
        parallel_tool_calls=request.parallel_tool_calls is not False,
        reasoning=ReasoningSetting(None if request.reasoning is None else request.reasoning.effort, asked.summary[0]),
        store=asked.is_stored,
        temperature=sampling.temperature,
        text={"format": {"type": "text"} if form is None else form},
        tool_choice=request.tool_choice or "auto",
        tools=asked.tools.echoed,
        top_logprobs=request.top_logprobs or 0,
        top_p=sampling.top_p,
        **{field: getattr(request, field) for field in _COPIED},
    )


_COPIED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "prompt_cache_key"),
    *("safety_identifier", "user"),
)


class ResponseDeleted(Struct, frozen=True, kw_only=True):
    """The answer of DELETE."""

    id: str
    object: Literal["response"] = "response"
    deleted: Literal[True] = True


# --- events; an event's name is its `type`, which comes first


class _ResponseState(Struct, frozen=True, tag_field="type"):
    response: Response
    sequence_number: int


class _WholeItem(Struct, frozen=True, tag_field="type"):
    item: OutputItem
    output_index: int
    sequence_number: int


class _InItem(Struct, frozen=True, tag_field="type"):
    item_id: str
    output_index: int


class _WholePart(_InItem, frozen=True):
    part: OutputText | ThoughtText
    sequence_number: int
    content_index: int = 0


class _SummaryPart(_InItem, frozen=True):
    part: SummaryText
    sequence_number: int
    summary_index: int = 0


class ResponseCreated(_ResponseState, frozen=True, tag="response.created"):
    """The first event."""


class ResponseInProgress(_ResponseState, frozen=True, tag="response.in_progress"):
    """The second event."""


class ItemAdded(_WholeItem, frozen=True, tag="response.output_item.added"):
    """An item begins; it is empty."""


class PartAdded(_WholePart, frozen=True, tag="response.content_part.added"):
    """The only part of a message or of reasoning begins; it is empty."""


class SummaryPartAdded(_SummaryPart, frozen=True, tag="response.reasoning_summary_part.added"):
    """The only part of reasoning's summary begins; it is empty."""


class TextDelta(_InItem, frozen=True, tag="response.output_text.delta"):
    """The next text of a message."""

    content_index: int
    logprobs: list[TokenLogprobs]
    delta: str
    sequence_number: int


class ThoughtDelta(_InItem, frozen=True, tag="response.reasoning_text.delta"):
    """The next text of reasoning."""

    content_index: int
    delta: str
    sequence_number: int


class SummaryDelta(_InItem, frozen=True, tag="response.reasoning_summary_text.delta"):
    """The next text of reasoning's summary."""

    summary_index: int
    delta: str
    sequence_number: int


class ArgumentsDelta(_InItem, frozen=True, tag="response.function_call_arguments.delta"):
    """The next text of a call's arguments."""

    delta: str
    sequence_number: int


class InputDelta(_InItem, frozen=True, tag="response.custom_tool_call_input.delta"):
    """The next text of a custom tool's input."""

    delta: str
    sequence_number: int


class InputDone(_InItem, frozen=True, tag="response.custom_tool_call_input.done"):
    """The complete input of a custom tool."""

    input: str
    sequence_number: int


class TextDone(_InItem, frozen=True, tag="response.output_text.done"):
    """The whole text of a message."""

    text: str
    logprobs: list[TokenLogprobs]
    sequence_number: int
    content_index: int = 0


class ThoughtDone(_InItem, frozen=True, tag="response.reasoning_text.done"):
    """The whole text of reasoning."""

    text: str
    sequence_number: int
    content_index: int = 0


class SummaryDone(_InItem, frozen=True, tag="response.reasoning_summary_text.done"):
    """The whole text of reasoning's summary."""

    text: str
    sequence_number: int
    summary_index: int = 0


class ArgumentsDone(_InItem, frozen=True, tag="response.function_call_arguments.done"):
    """The complete arguments of a call."""

    name: str
    arguments: str
    sequence_number: int


class PartDone(_WholePart, frozen=True, tag="response.content_part.done"):
    """A part is complete."""


class SummaryPartDone(_SummaryPart, frozen=True, tag="response.reasoning_summary_part.done"):
    """The part of reasoning's summary is complete."""


class ItemDone(_WholeItem, frozen=True, tag="response.output_item.done"):
    """An item is complete."""


class ResponseCompleted(_ResponseState, frozen=True, tag="response.completed"):
    """The last event of a response that is complete."""


class ResponseIncomplete(_ResponseState, frozen=True, tag="response.incomplete"):
    """The last event of a response that was cut off."""


class ResponseFailed(_ResponseState, frozen=True, tag="response.failed"):
    """The last event of a response that failed after it had begun."""


ResponseEvent = (
    ResponseCreated
    | ResponseInProgress
    | ItemAdded
    | PartAdded
    | SummaryPartAdded
    | TextDelta
    | ThoughtDelta
    | SummaryDelta
    | ArgumentsDelta
    | InputDelta
    | TextDone
    | ThoughtDone
    | SummaryDone
    | ArgumentsDone
    | InputDone
    | PartDone
    | SummaryPartDone
    | ItemDone
    | ResponseCompleted
    | ResponseIncomplete
    | ResponseFailed
)
