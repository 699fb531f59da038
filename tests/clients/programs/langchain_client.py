"""LangChain's ChatOpenAI against the frontend at the URL given; a traceback where something is not right."""

from __future__ import annotations

import asyncio
import sys

from asked import COUNTED, Person
from langchain_asked import add_up, multiply
from langchain_core.messages import AIMessageChunk, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

URL = sys.argv[1]
CALLED = [("multiply", {"a": 6, "b": 7})]


def model(name: str, **settings: object) -> ChatOpenAI:
    return ChatOpenAI(model=name, base_url=URL, api_key="any", temperature=0, max_retries=0, **settings)


def calls(message: AIMessageChunk) -> list[tuple[str, dict[str, int]]]:
    assert not message.invalid_tool_calls, message
    return [(call["name"], call["args"]) for call in message.tool_calls]


def the_model_calls_and_is_told() -> None:
    """The loop of an agent, whole and streamed, over a model that says what its prompt asks for."""
    echo = model("echo", stream_usage=True).bind_tools([multiply])
    asked = HumanMessage(COUNTED)
    for answer in (echo.invoke([asked]), add_up(list(echo.stream([asked])))):
        assert calls(answer) == CALLED, answer
        assert answer.content == "I count. ", answer
        assert answer.response_metadata["finish_reason"] == "tool_calls", answer
        assert answer.usage_metadata["output_tokens"] > 0, answer
        told = [multiply.invoke(call) for call in answer.tool_calls]
        assert [type(one) for one in told] == [ToolMessage]
        end = echo.invoke([asked, answer, *told])
        assert (end.content, end.tool_calls) == ("42", []), end


async def it_streams_to_a_loop() -> None:
    echo = model("echo").bind_tools([multiply])
    answer = add_up([chunk async for chunk in echo.astream(COUNTED)])
    assert calls(answer) == CALLED, answer


def a_forced_call_is_one_with_arguments_of_their_types() -> None:
    """Ask a real model, which was not made for it."""
    for choice in ("any", "multiply"):
        speaker = model("speaker", max_tokens=64).bind_tools([multiply], tool_choice=choice, parallel_tool_calls=False)
        whole, streamed = speaker.invoke("6 times 7?"), add_up(list(speaker.stream("6 times 7?")))
        for answer in (whole, streamed):
            [call] = answer.tool_calls
            assert call["name"] == "multiply", answer
            assert set(map(type, call["args"].values())) <= {int}, answer
        assert calls(whole) == calls(streamed)


def structured_output_is_what_was_asked_for() -> None:
    speaker = model("speaker", max_tokens=200)
    for method in ("json_schema", "function_calling"):
        # Not strict, it may make properties of its own up, which a model this small does without end.
        person = speaker.with_structured_output(Person, method=method, strict=True).invoke("Who was Ada Lovelace?")
        assert isinstance(person, Person), person
    loose = speaker.with_structured_output(Person, method="json_mode", include_raw=True)
    said = loose.invoke("As JSON, with name and born: who was Grace Hopper?")["raw"].content
    assert said.lstrip().startswith("{"), said


def texts_are_embedded() -> None:
    # Its tokens are OpenAI's own, where it is left to make them.
    embeddings = OpenAIEmbeddings(
        model="speaker", base_url=URL, api_key="any", check_embedding_ctx_length=False, dimensions=32
    )
    first, second = embeddings.embed_documents(["The mill at the river", "A tax"])
    assert (len(first), len(second)) == (32, 32)
    assert max(abs(a - b) for a, b in zip(first, embeddings.embed_query("The mill at the river"), strict=True)) < 1e-5


the_model_calls_and_is_told()
asyncio.run(it_streams_to_a_loop())
a_forced_call_is_one_with_arguments_of_their_types()
structured_output_is_what_was_asked_for()
texts_are_embedded()
