"""The OpenAPI document against a real frontend: schemathesis asks what it allows and what it does not.

Found so: `cache_salt` and `prompt_cache_key` were let through that workers and routers refuse.
`FUZZ_SEED=7 FUZZ_EXAMPLES=100` tries others, and more.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clients.conftest import Run
from tests.clients.served import HERMES
from tests.frontend.unsaid import UNSAID
from tests.integration.fleet import fleet
from tests.integration.stack import eventually
from tests.tiny_model import write_tiny_model

pytestmark = pytest.mark.timeout(3900)

SEED = os.environ.get("FUZZ_SEED", "1")
EXAMPLES = os.environ.get("FUZZ_EXAMPLES", "12")
CONTEXT = 512


@pytest.fixture
def url(tmp_path: Path, nats_url: str) -> Iterator[str]:
    """A frontend, and a worker that answers in arithmetic, fast."""
    model = write_tiny_model(tmp_path / "tiny", context_length=CONTEXT)
    (model / "chat_template.jinja").write_text(HERMES)
    settings = tmp_path / "frontend.toml"
    settings.write_text('[tool_parser]\ntiny = "hermes"\n')
    where = ("--namespace", "fuzz", "--discovery-backend", "file", "--discovery-path", str(tmp_path / "where"))
    with fleet(tmp_path, nats_url, *where) as one:
        router = one.start("router", "router")
        one.start("worker", "worker", "--model", str(model), "--model-name", "tiny", "--threads", "1")
        frontend = one.start("frontend", "frontend", "--config", str(settings))
        one.wait_ready()
        eventually(lambda: router.metric("headrace_kv_sources") == 1, limit_s=180, what="the router knows the worker")
        yield frontend.url
        assert "Traceback" not in frontend.log.read_text()


async def test_nothing_that_the_document_allows_or_forbids_gets_an_answer_that_it_does_not_have(
    url: str, run_program: Run
) -> None:
    await run_program("fuzz.py", url, SEED, EXAMPLES, json.dumps(UNSAID))
