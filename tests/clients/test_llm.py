"""The command `llm` over chats and responses: prompts, conversations, schemas, tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_llms_prompts_schemas_and_tools_work(run_program: Run, stack: Served, tmp_path: Path) -> None:
    await run_program("llm_command.py", stack.url, str(tmp_path))
