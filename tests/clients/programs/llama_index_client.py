"""LlamaIndex's OpenAILike against the frontend at the URL given; a traceback where something is not right.

It prints the tokens of its answers.

The echo says the last message back; the speaker is held to a schema, and makes vectors.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from asked import CALL, Person
from llama_index.core import Document, VectorStoreIndex
from llama_index.core.base.llms.types import ChatMessage, ChatResponse
from llama_index.core.node_parser import SentenceSplitter
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai_like import OpenAILike

URL = sys.argv[1]
TEXT = "The mill at the river turns all day."
OURS: dict[str, Any] = {"api_base": URL, "api_key": "any", "max_retries": 0}
counted = {"prompt_tokens": 0, "completion_tokens": 0}


def model(name: str, **settings: Any) -> OpenAILike:
    """Return a model of the frontend."""
    known = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 8192}
    return OpenAILike(model=name, temperature=0, **OURS, **{**known, "max_tokens": 100, **settings})


def said(text: str) -> list[ChatMessage]:
    return [ChatMessage(role="user", content=text)]


def count(usage: Any) -> None:
    for name in counted:
        counted[name] += getattr(usage, name)


def a_chat_is_answered() -> None:
    answer = model("echo").chat(said(TEXT))
    assert answer.message.content == TEXT, answer
    count(answer.raw.usage)


def it_streams(parts: Sequence[ChatResponse]) -> None:
    assert len(parts) > 2, parts
    assert "".join(part.delta for part in parts) == TEXT, parts
    count(parts[-1].raw.usage)


async def it_streams_on_a_loop() -> None:
    asked = model("echo", additional_kwargs={"stream_options": {"include_usage": True}})
    it_streams([part async for part in await asked.astream_chat(said(TEXT))])


def a_text_goes_on() -> None:
    answer = model("speaker", is_chat_model=False, max_tokens=8).complete("The capital of France is")
    assert answer.text, answer
    count(answer.raw.usage)


def multiply(a: int, b: int) -> int:
    """Multiply two numbers."""
    return a * b


def a_tool_is_called() -> None:
    tool, echo = FunctionTool.from_defaults(multiply), model("echo")
    answer = echo.chat_with_tools([tool], user_msg=CALL)
    [call] = echo.get_tool_calls_from_response(answer)
    assert tool(**call.tool_kwargs).raw_output == 42, call
    count(answer.raw.usage)


def a_schema_holds_the_model() -> None:
    answer = model("speaker", should_use_structured_outputs=True).as_structured_llm(Person).chat(said("Who was Ada?"))
    assert isinstance(answer.raw, Person), answer


def the_nearest_text_is_found() -> None:
    vectors = OpenAILikeEmbedding(model_name="speaker", **OURS)
    texts = [TEXT, "Taxes are due in May."]
    documents = [Document(text=text) for text in texts]
    index = VectorStoreIndex.from_documents(
        documents, embed_model=vectors, transformations=[SentenceSplitter(tokenizer=str.split)]
    )
    [found] = index.as_retriever(similarity_top_k=1).retrieve(TEXT)
    assert found.text == TEXT, found
    assert found.score > 0.999, found


a_chat_is_answered()
it_streams(list(model("echo", additional_kwargs={"stream_options": {"include_usage": True}}).stream_chat(said(TEXT))))
asyncio.run(it_streams_on_a_loop())
a_text_goes_on()
a_tool_is_called()
a_schema_holds_the_model()
the_nearest_text_is_found()
print(json.dumps(counted))
