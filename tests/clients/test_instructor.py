"""`instructor` in all its modes for OpenAI's API: objects whole, in parts and in lists, calls at once, errors."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_instructors_modes_work(run_program: Run, stack: Served) -> None:
    await run_program("instructor_client.py", stack.url)
