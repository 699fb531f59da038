"""LangChain's client of OpenAI: tools, streamed and not, the loop of an agent, structured output, and images."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import Run
from tests.clients.served import Served
from tests.frontend.images.samples import picture
from tests.integration.fleet import fleet
from tests.tiny_model import write_tiny_model
from tests.worker.native.golden.cases import CASES, LLAVAS

pytestmark = pytest.mark.timeout(1200)


async def test_langchains_agents_and_structured_output_work(run_program: Run, stack: Served) -> None:
    await run_program("langchain_client.py", stack.url)


async def test_langchain_shows_images_to_a_model_that_sees(run_program: Run, tmp_path: Path, nats_url: str) -> None:
    model, file = write_tiny_model(tmp_path / "eyes", **CASES[LLAVAS[0]]), tmp_path / "a.png"
    file.write_bytes(picture("PNG", (30, 20)))
    where = ("--namespace", "eyes", "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    with fleet(tmp_path, nats_url, *where) as one:
        one.start("router", "router")
        one.start("worker", "eyes", "--model", str(model), "--threads", "1")
        frontend = one.start("frontend", "frontend")
        one.wait_ready()
        await run_program("langchain_images.py", f"{frontend.url}/v1", str(file))
