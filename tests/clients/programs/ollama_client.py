"""Ollama's own client against the frontend at the URL given; a traceback where something is not right.

ollama_client.py URL GUARDED KEY        GUARDED: a frontend that asks for KEY
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import ollama
from asked import COUNTED, PERSON, says

URL, GUARDED, KEY = sys.argv[1:]
client = ollama.Client(host=URL)


def multiply(a: int, b: int) -> int:
    """
    Multiply two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a * b


def the_model_calls_and_gets_the_result() -> None:
    """Whole and streamed; the message goes back as the client has it."""
    whole = client.chat("echo", says(COUNTED), tools=[multiply])
    lines = list(client.chat("echo", says(COUNTED), tools=[multiply], stream=True))
    assert "".join(line.message.content or "" for line in lines) == whole.message.content == "I count. "
    streamed = [call for line in lines for call in line.message.tool_calls or ()]
    for calls in (whole.message.tool_calls, streamed):
        assert [(call.function.name, call.function.arguments) for call in calls] == [("multiply", {"a": 6, "b": 7})]
    result = {"role": "tool", "tool_name": "multiply", "content": "42"}
    end = client.chat("echo", [*says(COUNTED), whole.message, result], tools=[multiply])
    assert end.message.content == "42", end


def a_text_is_generated_whole_and_streamed() -> None:
    whole = client.generate("echo", "one, two; three", options={"stop": [";"], "num_ctx": 4096, "temperature": 0.5})
    assert (whole.response, whole.done, whole.done_reason) == ("one, two", True, "stop"), whole
    assert whole.total_duration >= whole.prompt_eval_duration > 0, whole
    assert whole.prompt_eval_count > 0, whole
    lines = list(client.generate("echo", "one, two", stream=True, keep_alive="5m", options={"num_predict": 3}))
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True], lines
    assert (lines[-1].done_reason, lines[-1].eval_count) == ("length", 3), lines
    assert client.generate("echo", "one, two", raw=True).response == "one, two"
    assert client.generate("echo").done_reason == "load"


def a_real_model_is_held_to_a_schema() -> None:
    asked: Any = {
        "model": "speaker",
        "messages": says("Who was Ada?"),
        "options": {"temperature": 0, "num_predict": 200},
    }
    assert json.loads(client.chat(**asked, format=PERSON).message.content).keys() == {"name", "born"}


def texts_are_embedded() -> None:
    answer = client.embed("speaker", ["a mill", "a river"], dimensions=64)
    assert [len(vector) for vector in answer.embeddings] == [64, 64], answer
    [alone] = client.embed("speaker", "a mill", dimensions=64).embeddings
    assert max(abs(one - other) for one, other in zip(alone, answer.embeddings[0], strict=True)) < 1e-5


def models_are_listed_and_shown() -> None:
    assert {model.model for model in client.list().models} == {"echo", "speaker"}
    assert {model.model for model in client.ps().models} == {"echo", "speaker"}
    shown = client.show("speaker")
    assert {"completion", "tools", "embedding"} <= set(shown.capabilities), shown
    assert shown.modelinfo["headrace.context_length"] > 0, shown


async def it_streams_to_a_loop() -> None:
    on_loop = ollama.AsyncClient(host=URL)

    async def ask(number: int) -> str:
        lines = await on_loop.chat("echo", says(f"number {number}"), stream=True)
        return "".join([line.message.content or "" async for line in lines])

    assert await asyncio.gather(*map(ask, range(8))) == [f"number {number}" for number in range(8)]


def raised(asking: ollama.Client, **more: Any) -> ollama.ResponseError:
    try:
        list(asking.chat(**{"model": "echo", "messages": says("x"), **more}))
    except ollama.ResponseError as wrong:
        return wrong
    raise AssertionError("no ResponseError")


def error_of(status: int, asking: ollama.Client = client, **more: Any) -> str:
    """What the client raises, streamed or not."""
    whole, streamed = raised(asking, **more), raised(asking, stream=True, **more)
    assert (whole.status_code, streamed.status_code) == (status, status), whole
    assert whole.error == streamed.error, streamed
    return str(whole.error)


def what_is_wrong_is_the_clients_error() -> None:
    assert "does not exist" in error_of(404, model="nobody")
    assert "images are not served" in error_of(400, messages=[{"role": "user", "content": "x", "images": ["AAAA"]}])
    assert "options.typical_p" in error_of(400, options={"typical_p": 0.5})
    assert "think" in error_of(400, model="speaker", think=True)
    assert "API key" in error_of(401, ollama.Client(host=GUARDED))
    known = ollama.Client(host=GUARDED, headers={"Authorization": f"Bearer {KEY}"})
    assert known.chat("echo", says("x")).message.content == "x"


the_model_calls_and_gets_the_result()
a_text_is_generated_whole_and_streamed()
a_real_model_is_held_to_a_schema()
texts_are_embedded()
models_are_listed_and_shown()
asyncio.run(it_streams_to_a_loop())
what_is_wrong_is_the_clients_error()
