"""/v1/messages as Anthropic's own client and LiteLLM ask it: tools, streamed and not, refusals, keys."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import KEY, Served

pytestmark = pytest.mark.timeout(1200)


async def test_anthropics_own_client_works(run_program: Run, stack: Served) -> None:
    base, guarded = (url.removesuffix("/v1") for url in (stack.url, stack.guarded))
    await run_program("anthropic_client.py", base, guarded, KEY)


async def test_litellms_anthropic_provider_works(run_program: Run, stack: Served) -> None:
    await run_program("litellm_anthropic.py", stack.url.removesuffix("/v1"))
