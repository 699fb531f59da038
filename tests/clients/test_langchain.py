"""LangChain's client of OpenAI: tools, streamed and not, the loop of an agent, and structured output."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_langchains_agents_and_structured_output_work(run_program: Run, stack: Served) -> None:
    await run_program("langchain_client.py", stack.url)
