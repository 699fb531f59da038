"""LiteLLM's proxy in front of the frontend: chats, responses, Anthropic's messages, vectors, errors."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served
from tests.servers import free_port

pytestmark = pytest.mark.timeout(1200)


async def test_what_goes_through_litellms_proxy_works(run_program: Run, stack: Served) -> None:
    await run_program("litellm_proxy.py", stack.url, str(free_port()))
