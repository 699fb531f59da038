"""OpenAI's Agents SDK over chats and over responses, at the URL given; a traceback where something is not right."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asked import ADA, CALL, Person
from openai.types.shared import Reasoning

URL = sys.argv[1]
MODELS: list[Any] = [OpenAIChatCompletionsModel, OpenAIResponsesModel]
set_tracing_disabled(True)


@function_tool
def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def agent(kind: Any, model: str, **more: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(base_url=URL, api_key="any", max_retries=0, timeout=180)
    return Agent(name="Counter", instructions="Be kind.", model=kind(model=model, openai_client=client), **more)


async def an_agent_calls_its_tool_and_says_the_result(kind: Any, settings: ModelSettings) -> None:
    """Whole and streamed, and the conversation goes on."""
    counter = agent(kind, "echo", tools=[multiply], model_settings=settings)
    whole = await Runner.run(counter, CALL)
    assert whole.final_output == "42", whole
    assert whole.context_wrapper.usage.requests == 2, whole.context_wrapper.usage
    assert whole.context_wrapper.usage.output_tokens > 0, whole.context_wrapper.usage
    streamed = Runner.run_streamed(counter, CALL)
    events = [event.type async for event in streamed.stream_events()]
    assert streamed.final_output == "42", streamed
    assert {"raw_response_event", "run_item_stream_event"} <= set(events), events
    more = await Runner.run(counter, [*whole.to_input_list(), {"role": "user", "content": "And now?"}])
    assert more.final_output == "And now?", more


async def thinking_comes_apart_and_goes_back(kind: Any, settings: ModelSettings) -> None:
    counter = agent(kind, "echo", tools=[multiply], model_settings=settings)
    whole = await Runner.run(counter, f"<think>I count.</think>{CALL}")
    streamed = Runner.run_streamed(counter, f"<think>I count.</think>{CALL}")
    kinds = [event.data.type async for event in streamed.stream_events() if event.type == "raw_response_event"]
    assert any("reasoning" in kind for kind in kinds), kinds
    for ended in (whole, streamed):
        assert ended.final_output == "42", ended
        [thought] = [item.raw_item for item in ended.new_items if item.type == "reasoning_item"]
        assert [part.text for part in thought.content or thought.summary] == ["I count."], thought
        more = await Runner.run(counter, [*ended.to_input_list(), {"role": "user", "content": "And now?"}])
        assert more.final_output == "And now?", more


async def the_output_is_held_to_a_type(kind: Any) -> None:
    said = await Runner.run(agent(kind, "echo", output_type=Person), json.dumps(ADA))
    assert said.final_output == Person(**ADA), said
    held = agent(kind, "speaker", output_type=Person, model_settings=ModelSettings(temperature=0, max_tokens=200))
    assert isinstance((await Runner.run(held, "Who was Ada Lovelace?")).final_output, Person)


async def a_real_model_is_held_to_a_call(kind: Any) -> None:
    settings = ModelSettings(temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False)
    held = agent(kind, "speaker", tools=[multiply], model_settings=settings, tool_use_behavior="stop_on_first_tool")
    int((await Runner.run(held, "6 times 7?")).final_output)


async def an_agent_hands_over_to_another(kind: Any) -> None:
    """A hand-over is a call of a tool named after the other agent; that agent then hears of it."""
    second = agent(kind, "echo").clone(name="Second")
    first = agent(kind, "echo", handoffs=[second])
    ended = await Runner.run(first, '<tool_call>\n{"name": "transfer_to_second", "arguments": {}}\n</tool_call>')
    assert ended.last_agent.name == "Second", ended
    assert json.loads(ended.final_output) == {"assistant": "Second"}, ended


async def what_is_wrong_is_its_error(kind: Any) -> None:
    try:
        await Runner.run(agent(kind, "nobody"), "x")
    except openai.NotFoundError as wrong:
        code = wrong.code
    else:
        raise AssertionError("no NotFoundError")
    assert code == "model_not_found", code


async def ask_everything() -> None:
    plain = ModelSettings()
    advised = ModelSettings(
        reasoning=Reasoning(effort="low", summary="auto"),
        verbosity="low",
        truncation="auto",
        include_usage=True,
        metadata={"a": "b"},
    )
    for kind in MODELS:
        await an_agent_calls_its_tool_and_says_the_result(kind, plain)
        await an_agent_calls_its_tool_and_says_the_result(kind, advised)
        await thinking_comes_apart_and_goes_back(kind, advised)
        await the_output_is_held_to_a_type(kind)
        await a_real_model_is_held_to_a_call(kind)
        await an_agent_hands_over_to_another(kind)
        await what_is_wrong_is_its_error(kind)
    kept_by_the_client = ModelSettings(store=False, response_include=["reasoning.encrypted_content"])
    await an_agent_calls_its_tool_and_says_the_result(OpenAIResponsesModel, kept_by_the_client)
    await thinking_comes_apart_and_goes_back(OpenAIResponsesModel, kept_by_the_client)


asyncio.run(ask_everything())
