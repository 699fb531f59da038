"""Ollama's paths as its own client asks them: chats, texts, tools, vectors, models, refusals, keys."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import KEY, Served

pytestmark = pytest.mark.timeout(1200)


async def test_ollamas_own_client_works(run_program: Run, stack: Served) -> None:
    await run_program("ollama_client.py", *(url.removesuffix("/v1") for url in (stack.url, stack.guarded)), KEY)
