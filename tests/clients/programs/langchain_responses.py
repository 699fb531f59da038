"""LangChain's ChatOpenAI over /v1/responses, at the URL given; a traceback where something is not right."""

from __future__ import annotations

import sys

from asked import COUNTED, Person
from langchain_asked import add_up, multiply
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

URL = sys.argv[1]


def model(name: str, **settings: object) -> ChatOpenAI:
    return ChatOpenAI(
        model=name, base_url=URL, api_key="any", temperature=0, max_retries=0, use_responses_api=True, **settings
    )


def the_model_calls_and_is_told(**settings: object) -> None:
    """The loop of an agent, whole and streamed, over a model that says what its prompt asks for."""
    echo = model("echo", **settings).bind_tools([multiply], strict=settings.get("store"))
    asked = HumanMessage(COUNTED)
    for answer in (echo.invoke([asked]), add_up(list(echo.stream([asked])))):
        [call] = answer.tool_calls
        assert (call["name"], call["args"]) == ("multiply", {"a": 6, "b": 7}), answer
        assert answer.text.startswith("I count."), answer
        assert answer.usage_metadata["output_tokens"] > 0, answer
        end = echo.invoke([asked, answer, multiply.invoke(call)])
        assert (end.text, end.tool_calls) == ("42", []), end


def structured_output_is_what_was_asked_for() -> None:
    speaker = model("speaker", max_tokens=200)
    person = speaker.with_structured_output(Person, strict=True).invoke("Who was Ada Lovelace?")
    assert isinstance(person, Person), person


the_model_calls_and_is_told()
the_model_calls_and_is_told(store=False)
the_model_calls_and_is_told(use_previous_response_id=True)
structured_output_is_what_was_asked_for()
