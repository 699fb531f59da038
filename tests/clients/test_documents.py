"""What README and documents show with `curl` is answered as it stands there, by the default model; so are the Python
programs of docs/clients.md."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.clients import environment
from tests.clients.served import LIMIT_S, smollm2_with_tools
from tests.integration.fleet import fleet
from tests.integration.stack import ROOT, eventually

pytestmark = pytest.mark.timeout(1200)

SHOWN = "http://127.0.0.1:8000"
DOCUMENTS = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
CLIENTS = ROOT / "docs" / "clients.md"
NAME = "SmolLM2-135M-Instruct"


class Shown(NamedTuple):
    """One command."""

    document: str
    path: str
    body: str


def commands(document: Path) -> Iterator[Shown]:
    """Those with a body; one goes on over lines until its quotes are closed."""
    for block in re.findall(r"^```\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE):
        for text in re.findall(rf"^curl {SHOWN}/\S* (?:-H '[^']*' )?-d '[^']*'", block, re.MULTILINE):
            words = shlex.split(text)
            yield Shown(document.name, words[1].removeprefix(SHOWN), words[words.index("-d") + 1])


SHOWN_COMMANDS = [command for document in DOCUMENTS for command in commands(document)]
RECIPES = dict(
    re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```python\n(.*?)^```", CLIENTS.read_text(), re.DOTALL | re.MULTILINE)
)
"""The programs of docs/clients.md by their headings."""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, nats_url: str) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("documents")
    model = smollm2_with_tools(folder / NAME)
    where = ("--namespace", "documents", "--discovery-backend", "file", "--discovery-path", str(folder / "where"))
    with fleet(folder, nats_url, *where) as one:
        one.start("router", "router")
        one.start("worker", "worker", "--model", str(model), "--threads", "1")
        # The documents let the model choose when to end, and this one now and then does not.
        frontend = one.start("frontend", "frontend", "--default-max-tokens", "64")
        one.wait_ready()
        router = one.services["router"]
        eventually(lambda: router.metric("headrace_kv_sources") == 1, limit_s=LIMIT_S, what="the worker is known")
        yield frontend.url


def test_commands_are_found_in_the_documents_that_have_some() -> None:
    assert {command.document for command in SHOWN_COMMANDS} >= {
        "README.md",
        "clients.md",
        "structured.md",
        "tokens.md",
        "tools.md",
    }


@pytest.mark.parametrize("command", SHOWN_COMMANDS, ids=lambda command: f"{command.document}{command.path}")
def test_a_command_is_answered(command: Shown, url: str) -> None:
    body = json.loads(command.body)
    if "previous_response_id" in body:
        body["previous_response_id"] = json.loads(ask(url, command.path, {"input": "Name a river."}))["id"]
    text = ask(url, command.path, body)
    events = (line.removeprefix("data: ") for line in text.splitlines() if line and not line.startswith(":"))
    chunks = list(events) if body.get("stream") else [text]
    assert not json.loads(chunks[0]).get("error")
    assert not body.get("stream") or chunks[-1] == "[DONE]"


def ask(url: str, path: str, body: dict[str, Any]) -> str:
    # A hundred tokens are as good as all that a small model may write.
    bound = {"/v1/chat/completions": "max_tokens", "/v1/responses": "max_output_tokens"}.get(path)
    asked = urllib.request.Request(f"{url}{path}", json.dumps(({bound: 100} if bound else {}) | body).encode())
    with urllib.request.urlopen(asked, timeout=LIMIT_S) as answer:
        return str(answer.read().decode())


def test_every_program_of_the_page_of_clients_is_found() -> None:
    assert len(RECIPES) == CLIENTS.read_text().count("```python") >= 5


@pytest.mark.parametrize("heading", RECIPES)
def test_a_program_of_the_page_of_clients_prints_an_answer(heading: str, url: str, clients_python: Path) -> None:
    ended = subprocess.run(
        [str(clients_python), "-c", RECIPES[heading].replace(SHOWN, url)],
        check=False,
        capture_output=True,
        text=True,
        env=environment.variables(),
        stdin=subprocess.DEVNULL,
        timeout=LIMIT_S,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.strip()
