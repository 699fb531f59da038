"""OpenAI's Agents SDK over chats and responses: tools, hand-overs, types of output, what it advises, errors."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_agents_work_over_chats_and_responses(run_program: Run, stack: Served) -> None:
    await run_program("agents_client.py", stack.url)
