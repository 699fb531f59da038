"""LiteLLM's `openai` provider against the frontend at the URL given; a traceback where something is not right."""

from __future__ import annotations

import asyncio
import json
import sys

import litellm
from asked import COUNTED, MULTIPLY, PERSON

URL = sys.argv[1]
litellm.suppress_debug_info = True
OURS = {"api_base": URL, "api_key": "any", "temperature": 0, "max_retries": 0}
ASKED = {"role": "user", "content": COUNTED}


def calls(message: litellm.Message) -> list[tuple[str, dict[str, int]]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]


def add_up(chunks: list[litellm.ModelResponseStream]) -> litellm.ModelResponse:
    assert len(chunks) > 2, "it streams"
    return litellm.stream_chunk_builder(chunks)


def chat(model: str, messages: list[object], **more: object) -> litellm.ModelResponse:
    return litellm.completion(f"openai/{model}", messages=messages, **OURS, **more)


def the_model_calls_and_is_told() -> None:
    """Whole and streamed, over a model that says what its prompt asks for; its message goes back as LiteLLM has it."""
    whole = chat("echo", [ASKED], tools=[MULTIPLY])
    streamed = add_up(list(chat("echo", [ASKED], tools=[MULTIPLY], stream=True)))
    for answer in (whole, streamed):
        [choice] = answer.choices
        assert choice.finish_reason == "tool_calls", answer
        assert calls(choice.message) == [("multiply", {"a": 6, "b": 7})], answer
        assert choice.message.content == "I count. ", answer
        told = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in choice.message.tool_calls]
        for sent in (choice.message, choice.message.model_dump()):
            end = chat("echo", [ASKED, sent, *told], tools=[MULTIPLY])
            assert end.choices[0].message.content == "42", end


async def it_streams_to_a_loop() -> None:
    stream = await litellm.acompletion("openai/echo", messages=[ASKED], tools=[MULTIPLY], stream=True, **OURS)
    answer = add_up([chunk async for chunk in stream])
    assert calls(answer.choices[0].message) == [("multiply", {"a": 6, "b": 7})], answer


def a_real_model_is_held_to_a_call_and_to_a_schema() -> None:
    asked = [{"role": "user", "content": "6 times 7?"}]
    forced = chat("speaker", asked, tools=[MULTIPLY], tool_choice="required", parallel_tool_calls=False, max_tokens=64)
    [(name, numbers)] = calls(forced.choices[0].message)
    assert (name, set(map(type, numbers.values()))) == ("multiply", {int}), forced
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    person = chat("speaker", [{"role": "user", "content": "Who was Ada?"}], response_format=form, max_tokens=200)
    assert json.loads(person.choices[0].message.content).keys() == {"name", "born"}, person


def completions_come_too() -> None:
    said = litellm.text_completion(model="text-completion-openai/echo", prompt="a mill", max_tokens=64, **OURS)
    assert said.choices[0].text == "a mill", said
    stream = litellm.text_completion(
        model="text-completion-openai/echo", prompt="a mill", max_tokens=64, stream=True, **OURS
    )
    assert "".join(chunk.choices[0].text or "" for chunk in stream) == "a mill"


def what_is_wrong_is_litellms_error() -> None:
    for expected, model, more in (
        (litellm.NotFoundError, "nobody", {}),
        (litellm.BadRequestError, "echo", {"extra_body": {"best_of": 2}}),
    ):
        try:
            chat(model, [ASKED], **more)
        except expected:
            continue
        raise AssertionError(f"no {expected.__name__}")


def texts_are_embedded() -> None:
    answer = litellm.embedding("openai/speaker", input=["a mill", "a river"], api_base=URL, api_key="any")
    assert [entry["index"] for entry in answer.data] == [0, 1], answer
    assert {len(entry["embedding"]) for entry in answer.data} == {576}, answer


the_model_calls_and_is_told()
asyncio.run(it_streams_to_a_loop())
a_real_model_is_held_to_a_call_and_to_a_schema()
completions_come_too()
what_is_wrong_is_litellms_error()
texts_are_embedded()
