"""LlamaIndex's OpenAILike: chats, streams, completions, tools, schemas, vectors, and the tokens of its answers."""

from __future__ import annotations

import json

import pytest

from tests.clients.conftest import Run
from tests.clients.recorder import recorder, tokens
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_llama_indexs_models_answer_and_its_index_finds(run_program: Run, stack: Served) -> None:
    async with recorder(stack.url.removesuffix("/v1")) as proxy:
        counted = json.loads(await run_program("llama_index_client.py", f"{proxy.url}/v1"))
    # An answer that LlamaIndex made an object of says no tokens.
    assert counted == tokens(one for one in proxy.asked if "response_format" not in one.body)
    assert {one.path for one in proxy.asked} == {"/v1/chat/completions", "/v1/completions", "/v1/embeddings"}
