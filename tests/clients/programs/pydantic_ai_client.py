"""pydantic-ai over chats and over responses, at the URL given; a traceback where something is not right."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from asked import ADA, CALL, Person
from pydantic_ai import Agent, ModelHTTPError, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.messages import ThinkingPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

URL = sys.argv[1]
PROVIDER = OpenAIProvider(base_url=URL, api_key="any")
SETTINGS: Any = {"temperature": 0, "max_tokens": 200}
MODELS: list[type[OpenAIChatModel] | type[OpenAIResponsesModel]] = [OpenAIChatModel, OpenAIResponsesModel]
FINAL = f"<tool_call>\n{json.dumps({'name': 'final_result', 'arguments': ADA})}\n</tool_call>"
ASKED = "Who was Ada Lovelace?"


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


async def an_agent_calls_its_tool_and_says_the_result(kind: Any) -> None:
    """Whole and streamed."""
    agent = Agent(kind("echo", provider=PROVIDER), tools=[multiply], instructions="Be kind.")
    whole = await agent.run(CALL)
    assert whole.output == "42", whole
    assert whole.usage.requests == 2, whole.usage
    assert whole.usage.output_tokens > 0, whole.usage
    async with agent.run_stream(CALL) as streamed:
        text = "".join([piece async for piece in streamed.stream_text(delta=True)])
    assert text == "42", text
    more = await agent.run("And now?", message_history=whole.all_messages())
    assert more.output == "And now?", more


async def thinking_comes_apart_and_goes_back(kind: Any) -> None:
    """It is no part of the output, before a call and before a text."""
    agent = Agent(kind("echo", provider=PROVIDER), tools=[multiply])
    thought = await agent.run(f"<think>I count.</think>{CALL}")
    assert thought.output == "42", thought
    text = await agent.run("<think>I wonder.</think>Yes.", message_history=thought.all_messages())
    assert text.output == "Yes.", text
    found = [part for message in text.all_messages() for part in message.parts if isinstance(part, ThinkingPart)]
    said = [part.content or (part.provider_details or {}).get("raw_content") for part in found]
    assert said in (["I count.", "I wonder."], [["I count."], ["I wonder."]]), found
    async with agent.run_stream("<think>I wonder.</think>Yes.") as streamed:
        assert await streamed.get_output() == "Yes.", streamed


async def the_output_is_a_call_of_a_tool(kind: Any) -> None:
    said = Agent(kind("echo", provider=PROVIDER), output_type=Person)
    assert (await said.run(FINAL)).output == Person(**ADA)
    held = Agent(kind("speaker", provider=PROVIDER, settings=SETTINGS), output_type=ToolOutput(Person, strict=True))
    assert isinstance((await held.run(ASKED)).output, Person)
    async with said.run_stream(FINAL) as streamed:
        parts = [part async for part in streamed.stream_output(debounce_by=None)]
    assert parts[-1] == Person(**ADA), parts


async def the_output_is_held_to_a_schema(kind: Any) -> None:
    said = Agent(kind("echo", provider=PROVIDER), output_type=NativeOutput(Person))
    assert (await said.run(json.dumps(ADA))).output == Person(**ADA)
    held = Agent(kind("speaker", provider=PROVIDER, settings=SETTINGS), output_type=NativeOutput(Person))
    assert isinstance((await held.run(ASKED)).output, Person)


async def the_output_is_asked_for_in_words(kind: Any) -> None:
    said = Agent(kind("echo", provider=PROVIDER), output_type=PromptedOutput(Person))
    assert (await said.run(json.dumps(ADA))).output == Person(**ADA)


async def what_is_wrong_is_its_error(kind: Any) -> None:
    try:
        await Agent(kind("nobody", provider=PROVIDER)).run("x")
    except ModelHTTPError as wrong:
        status = wrong.status_code
    else:
        raise AssertionError("no ModelHTTPError")
    assert status == 404, status


async def ask_everything() -> None:
    for kind in MODELS:
        await an_agent_calls_its_tool_and_says_the_result(kind)
        await thinking_comes_apart_and_goes_back(kind)
        await the_output_is_a_call_of_a_tool(kind)
        await the_output_is_held_to_a_schema(kind)
        await the_output_is_asked_for_in_words(kind)
        await what_is_wrong_is_its_error(kind)


asyncio.run(ask_everything())
