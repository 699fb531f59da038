"""The router's own span of a traced choice, below the frontend's span `select`. Pure."""

from __future__ import annotations

from shared.messages.select import Select, Selected, SelectReply
from shared.tracing.spans import AttributeValue, SpanIds, SpanRecord, finished
from shared.tracing.traceparent import TraceParent


def choice_span(
    ids: SpanIds, parent: TraceParent, select: Select, reply: SelectReply, block_size: int, start_ns: int, end_ns: int
) -> SpanRecord:
    """Return the span of a choice. `block_size` is that of the chosen worker in tokens."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": select.model,
        "headrace.request": select.request,
        "headrace.attempt": select.attempt,
        "headrace.prompt_tokens": select.prompt_tokens,
    }
    error = ""
    if isinstance(reply, Selected):
        attributes |= {
            "headrace.instance": reply.instance,
            "headrace.rank": reply.rank,
            "headrace.overlap_tokens": reply.overlap.blocks * block_size,
        }
    else:
        error = f"{reply.code}: {reply.reason}"
    place, times = ids.child(parent), (start_ns, end_ns)
    return finished("choose", place, parent.span, *times, kind="server", attributes=attributes, error=error)
