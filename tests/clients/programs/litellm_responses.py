"""LiteLLM's client of /v1/responses, at the URL given; a traceback where something is not right."""

from __future__ import annotations

import sys

import litellm
from asked import COUNTED

URL = sys.argv[1]
TOOLS = [{"type": "function", "name": "multiply", "parameters": {"type": "object"}}]


def ask(**fields: object) -> object:
    return litellm.responses(model="openai/echo", api_base=URL, api_key="any", num_retries=0, **fields)


def called(response: object) -> list[tuple[str, str]]:
    return [(item.name, item.arguments) for item in response.output if item.type == "function_call"]


def a_call_is_made_and_answered_by_id() -> None:
    answer = ask(input=COUNTED, tools=TOOLS)
    assert called(answer) == [("multiply", '{"a": 6, "b": 7}')], answer
    [call] = [item for item in answer.output if item.type == "function_call"]
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    end = ask(input=[output], tools=TOOLS, previous_response_id=answer.id)
    assert end.output_text == "42", end


def a_stream_is_events() -> None:
    events = list(ask(input=COUNTED, tools=TOOLS, stream=True))
    assert events[0].type == "response.created", events[0]
    assert events[-1].type == "response.completed", events[-1]
    assert called(events[-1].response) == [("multiply", '{"a": 6, "b": 7}')], events[-1]


a_call_is_made_and_answered_by_id()
a_stream_is_events()
