"""OpenAI's client for JavaScript and Vercel's `ai`: chats, streams, tools, objects, responses, vectors, errors."""

from __future__ import annotations

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_openais_and_vercels_packages_of_npm_work(run_node_program: Run, stack: Served) -> None:
    await run_node_program("npm_clients.mjs", stack.url)
