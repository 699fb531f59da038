"""The attributes of a request's span, by OpenTelemetry's conventions for generative AI.

No text of a prompt or an answer is in a trace.
"""

from __future__ import annotations

from services.frontend.protocol.text_plan import TextPlan, TextRequest
from services.frontend.serving.choices import Choices
from services.frontend.serving.request_context import RequestId
from shared.tracing.spans import AttributeValue


def asked_attributes(request: TextRequest, plan: TextPlan) -> dict[str, AttributeValue]:
    """Return what the client asked for."""
    asked = {
        "gen_ai.request.model": request.model,
        "gen_ai.request.max_tokens": plan.max_tokens,
        "gen_ai.request.temperature": request.temperature,
        "gen_ai.request.top_p": request.top_p,
        "gen_ai.request.choice.count": request.n,
        "gen_ai.request.stream": request.stream,
    }
    return {name: value for name, value in asked.items() if value is not None}


def answer_attributes(choices: Choices, request_id: RequestId) -> dict[str, AttributeValue]:
    """Return what came of it."""
    usage, streams = choices.usage, choices.streams.values()
    return {
        "gen_ai.response.id": request_id.unique,
        "gen_ai.response.finish_reasons": tuple(stream.finish or "error" for stream in streams),
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
    }
