"""Outlines over its backends `openai` and `vllm`, at the URL given; a traceback where something is not right.

The backend `openai` knows JSON alone: Outlines itself refuses regular expressions and choices there.
"""

from __future__ import annotations

import asyncio
import json
import re
import sys
from typing import Any, Literal

import openai
import outlines
from asked import Person
from outlines.types import CFG, JsonSchema, Regex

URL = sys.argv[1]
OURS: dict[str, Any] = {"base_url": URL, "api_key": "any", "max_retries": 0, "timeout": 180}
client = openai.OpenAI(**OURS)
BOUND: dict[str, Any] = {"max_tokens": 200, "temperature": 0}
ASKED = "Who was Ada Lovelace?"


def a_text_is_generated_whole_and_streamed(model: Any) -> None:
    assert model("one, two", max_tokens=50) == "one, two"
    assert "".join(model.stream("one, two", max_tokens=50)) == "one, two"


def an_answer_fits_a_pydantic_model(model: Any) -> None:
    whole = model(ASKED, Person, **BOUND)
    Person.model_validate_json(whole)
    pieces = list(model.stream(ASKED, Person, **BOUND))
    assert len(pieces) > 2, "it streams"
    assert "".join(pieces) == whole, pieces
    schema = JsonSchema({"type": "object", "properties": {"born": {"type": "integer"}}, "required": ["born"]})
    assert json.loads(model(ASKED, schema, **BOUND)).keys() == {"born"}


def an_answer_fits_what_vllm_knows(model: Any) -> None:
    assert model("Is a mill a building?", Literal["yes", "no"], **BOUND) in {"yes", "no"}
    assert re.fullmatch("[0-9]{4}", model("When was Ada born?", Regex("[0-9]{4}"), **BOUND))
    int(model("6 times 7?", int, **BOUND))
    grammar = 'start: "the " ("mill" | "river")'
    assert model("Name one.", CFG(grammar), **BOUND) in {"the mill", "the river"}


async def it_asks_on_a_loop() -> None:
    on_loop = openai.AsyncOpenAI(**OURS)
    for model in (outlines.from_vllm(on_loop, "speaker"), outlines.from_openai(on_loop, "speaker")):
        Person.model_validate_json(await model(ASKED, Person, **BOUND))


def what_is_wrong_is_raised(model: Any) -> None:
    try:
        model("x", max_tokens=-2)
    except outlines.exceptions.OutlinesError as wrong:
        said = str(wrong)
    else:
        raise AssertionError("no OutlinesError")
    assert "max_tokens" in said, said


for backend in (outlines.from_openai, outlines.from_vllm):
    a_text_is_generated_whole_and_streamed(backend(client, "echo"))
    an_answer_fits_a_pydantic_model(backend(client, "speaker"))
    what_is_wrong_is_raised(backend(client, "echo"))
an_answer_fits_what_vllm_knows(outlines.from_vllm(client, "speaker"))
asyncio.run(it_asks_on_a_loop())
