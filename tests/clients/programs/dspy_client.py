"""DSPy against the frontend at the URL given; a traceback where something is not right.

It prints the tokens that it counted.

Both of its engines ask: its own, and LiteLLM's. The echo says what DSPy's form of an answer is, which is in the
question; the speaker is held to the form by a schema.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import dspy
from asked import PERSON
from dspy.streaming import StreamListener, StreamResponse

URL = sys.argv[1]
ENGINES = ("lm15", "litellm")
ANSWER = "the Rhine, and all the other rivers of the land"
WHO = "Who was Ada Lovelace?"
QUESTION = f"Which river?\n[[ ## answer ## ]]\n{ANSWER}\n[[ ## completed ## ]]"
FORM = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
"""DSPy leaves schemas out unless it knows the model."""
counted = {"prompt_tokens": 0, "completion_tokens": 0}


class Person(dspy.Signature):
    """Say who it was."""

    question: str = dspy.InputField()
    name: str = dspy.OutputField()
    born: int = dspy.OutputField()


def model(name: str, engine: str, **settings: Any) -> dspy.LM:
    """Return a model of the frontend."""
    ours = {"api_base": URL, "api_key": "any", "cache": False, "num_retries": 0}
    return dspy.LM(f"openai/{name}", engine=engine, temperature=0, **ours, **settings)


def count(usage: dict[str, dict[str, Any]]) -> None:
    for one in usage.values():
        for name in counted:
            counted[name] += one[name]


def a_signature_is_answered(engine: str) -> None:
    with dspy.context(lm=model("echo", engine, max_tokens=400), track_usage=True):
        found = dspy.Predict("question -> answer")(question=QUESTION)
    assert found.answer == ANSWER, found
    count(found.get_lm_usage())


async def an_answer_streams(engine: str) -> None:
    """DSPy gives the pieces of a field, and of what is next to it."""
    lm = model("speaker", engine, max_tokens=200, response_format=FORM)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter(), track_usage=True):
        listener = StreamListener(signature_field_name="name")
        parts = [part async for part in dspy.streamify(dspy.Predict(Person), stream_listeners=[listener])(question=WHO)]
    pieces = [part.chunk for part in parts if isinstance(part, StreamResponse)]
    assert len(pieces) > 1, parts
    assert parts[-1].name in "".join(pieces), parts
    count(parts[-1].get_lm_usage())


def a_schema_holds_the_model(engine: str) -> None:
    lm = model("speaker", engine, max_tokens=200, response_format=FORM)
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter(), track_usage=True):
        found = dspy.Predict(Person)(question=WHO)
    assert (type(found.name), type(found.born)) == (str, int), found
    count(found.get_lm_usage())


for each in ENGINES:
    a_signature_is_answered(each)
    asyncio.run(an_answer_streams(each))
    a_schema_holds_the_model(each)
print(json.dumps(counted))
