"""Outlines over its backends `openai` and `vllm`: pydantic models, schemas, expressions, choices, grammars."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_outlines_gets_what_it_asks_for_over_either_backend(run_program: Run, stack: Served) -> None:
    await run_program("outlines_client.py", stack.url)
