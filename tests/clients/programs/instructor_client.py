"""`instructor` in all its modes for OpenAI's API, at the URL given; a traceback where something is not right.

The echo says what each mode expects of a model; the speaker is asked in the modes that hold a model to its form.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterable
from typing import Any, Literal

import instructor
import openai
from asked import ADA, Person, says
from instructor import Mode
from instructor.core.exceptions import InstructorRetryException
from pydantic import BaseModel

URL = sys.argv[1]
OURS: dict[str, Any] = {"base_url": URL, "api_key": "any", "max_retries": 0, "timeout": 180}


class River(BaseModel):
    """A river."""

    name: str
    flows: Literal["north", "south"]


RHINE = {"name": "Rhine", "flows": "north"}
TEXT = json.dumps(ADA)
SAYS: dict[Mode, str] = {
    Mode.TOOLS: f'<tool_call>\n{{"name": "Person", "arguments": {TEXT}}}\n</tool_call>',
    Mode.TOOLS_STRICT: f'<tool_call>\n{{"name": "Person", "arguments": {TEXT}}}\n</tool_call>',
    Mode.RESPONSES_TOOLS: f'<tool_call>\n{{"name": "Person", "arguments": {TEXT}}}\n</tool_call>',
    Mode.JSON: TEXT,
    Mode.JSON_O1: TEXT,
    Mode.JSON_SCHEMA: TEXT,
    Mode.MD_JSON: f"```json\n{TEXT}\n```",
}
HELD = (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.RESPONSES_TOOLS, Mode.JSON_SCHEMA)


def ask(mode: Mode, model: str, text: str, **more: Any) -> Any:
    client = instructor.from_openai(openai.OpenAI(**OURS), mode=mode)
    return client.create(**{"model": model, "messages": says(text), "response_model": Person, "max_retries": 0, **more})


def what_the_model_says_is_parsed(mode: Mode) -> None:
    parsed = ask(mode, "echo", SAYS[mode])
    assert isinstance(parsed, Person), parsed
    assert parsed.model_dump() == ADA, parsed


def a_model_is_held_to_the_form(mode: Mode) -> None:
    bound = "max_output_tokens" if mode is Mode.RESPONSES_TOOLS else "max_tokens"
    assert isinstance(ask(mode, "speaker", "Who was Ada Lovelace?", temperature=0, **{bound: 200}), Person)


def several_calls_come_at_once() -> None:
    calls = [{"name": "Person", "arguments": ADA}, {"name": "River", "arguments": RHINE}]
    text = "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    found = list(ask(Mode.PARALLEL_TOOLS, "echo", text, response_model=Iterable[Person | River]))
    assert [one.model_dump() for one in found] == [ADA, RHINE], found


def a_list_streams() -> None:
    client = instructor.from_openai(openai.OpenAI(**OURS), mode=Mode.TOOLS)
    call = json.dumps({"name": "IterablePerson", "arguments": {"tasks": [ADA, ADA]}})
    said = says(f"<tool_call>\n{call}\n</tool_call>")
    found = list(client.create_iterable(model="echo", messages=said, response_model=Person, max_retries=0))
    assert [one.model_dump() for one in found] == [ADA] * 2, found


def a_part_grows(mode: Mode) -> None:
    """Instructor calls the tool by another name then."""
    said = says(SAYS[mode].replace('"Person"', '"PartialPerson"'))
    client = instructor.from_openai(openai.OpenAI(**OURS), mode=mode)
    parts = list(client.create_partial(model="echo", messages=said, response_model=Person, max_retries=0))
    assert parts[-1].model_dump() == ADA, parts


def what_does_not_fit_is_asked_again() -> None:
    """The second question is what instructor makes of the error; here the model says it back, which fits no better."""
    wrong = SAYS[Mode.MD_JSON].replace("1815", '"soon"')
    try:
        ask(Mode.MD_JSON, "echo", wrong, max_retries=2)
    except InstructorRetryException as failed:
        attempts = failed.n_attempts
    else:
        raise AssertionError("no InstructorRetryException")
    assert attempts > 1, attempts


async def it_asks_on_a_loop() -> None:
    client = instructor.from_openai(openai.AsyncOpenAI(**OURS), mode=Mode.TOOLS)
    asked: Any = {"model": "echo", "messages": says(SAYS[Mode.TOOLS]), "response_model": Person, "max_retries": 0}
    answers = await asyncio.gather(*(client.create(**asked) for _ in range(4)))
    assert [answer.model_dump() for answer in answers] == [ADA] * 4, answers


for each in SAYS:
    what_the_model_says_is_parsed(each)
for each in HELD:
    a_model_is_held_to_the_form(each)
several_calls_come_at_once()
a_list_streams()
for each in (Mode.TOOLS, Mode.JSON_SCHEMA, Mode.MD_JSON, Mode.RESPONSES_TOOLS):
    a_part_grows(each)
what_does_not_fit_is_asked_again()
asyncio.run(it_asks_on_a_loop())
