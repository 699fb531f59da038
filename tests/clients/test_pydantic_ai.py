"""pydantic-ai over chats and responses: tools, output by a tool, by a schema and in words, streams, errors."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_pydantic_ais_agents_work_over_chats_and_responses(run_program: Run, stack: Served) -> None:
    await run_program("pydantic_ai_client.py", stack.url)
