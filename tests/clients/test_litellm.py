"""LiteLLM's client of OpenAI: chats with tools, streamed and not, a schema, completions, errors."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_litellms_chats_tools_completions_and_errors_work(run_program: Run, stack: Served) -> None:
    await run_program("litellm_client.py", stack.url)
