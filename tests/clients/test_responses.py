"""/v1/responses as LangChain and LiteLLM ask it: tools, streamed and not, conversations by id and by items."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


@pytest.mark.parametrize("program", ["langchain_responses.py", "litellm_responses.py"])
async def test_agents_of_other_libraries_work_over_responses(run_program: Run, stack: Served, program: str) -> None:
    await run_program(program, stack.url)
