"""LiteLLM's `anthropic` provider against the frontend at the URL given; a traceback where something is not right."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import litellm
from asked import COUNTED, MULTIPLY

URL = sys.argv[1]
litellm.suppress_debug_info = True
OURS: dict[str, Any] = {"api_base": URL, "api_key": "any", "max_retries": 0, "max_tokens": 300}
ASKED = {"role": "user", "content": COUNTED}


def chat(messages: list[Any], **more: Any) -> Any:
    return litellm.completion("anthropic/echo", messages=messages, **OURS, **more)


def the_model_calls_and_gets_the_result() -> None:
    """In OpenAI's form on the client's side, in Anthropic's on the wire; whole and streamed."""
    whole = chat([ASKED], tools=[MULTIPLY])
    streamed = litellm.stream_chunk_builder(list(chat([ASKED], tools=[MULTIPLY], stream=True)))
    for answer in (whole, streamed):
        [choice] = answer.choices
        [call] = choice.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("multiply", {"a": 6, "b": 7}), answer
        assert choice.message.content.strip() == "I count.", answer
        assert choice.finish_reason == "tool_calls", answer
        assert answer.usage.completion_tokens > 0, answer
        result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
        end = chat([{"role": "system", "content": "Be kind."}, ASKED, choice.message, result], tools=[MULTIPLY])
        assert end.choices[0].message.content == "42", end


async def messages_pass_through() -> None:
    """Anthropic's form on both sides. A stream of these needs LiteLLM's proxy, which is not installed here."""
    asked: dict[str, Any] = {
        "model": "anthropic/echo",
        "messages": [{"role": "user", "content": "one, two"}],
        "max_tokens": 50,
        "api_base": URL,
        "api_key": "any",
    }
    whole = await litellm.anthropic.messages.acreate(**asked)
    assert whole["content"][0]["text"] == "one, two", whole


def what_is_wrong_is_litellms_error() -> None:
    try:
        litellm.completion("anthropic/nobody", messages=[ASKED], **OURS)
    except litellm.NotFoundError:
        return
    raise AssertionError("no NotFoundError")


the_model_calls_and_gets_the_result()
asyncio.run(messages_pass_through())
what_is_wrong_is_litellms_error()
