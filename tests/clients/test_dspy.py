"""DSPy, over its own engine and LiteLLM's: signatures, schemas, streams, and the tokens that it counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.clients.conftest import Run
from tests.clients.recorder import recorder, tokens
from tests.clients.served import Served

pytestmark = pytest.mark.timeout(1200)


async def test_dspys_predictions_are_answered_and_its_tokens_are_ours(
    run_program: Run, stack: Served, tmp_path: Path
) -> None:
    async with recorder(stack.url.removesuffix("/v1")) as proxy:
        counted = json.loads(await run_program("dspy_client.py", f"{proxy.url}/v1", DSPY_CACHEDIR=str(tmp_path)))
    assert counted == tokens(proxy.asked)
    assert len(proxy.asked) == 6
