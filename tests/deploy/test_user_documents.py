"""What documents say of Headrace's commands, flags, settings, messages and metrics is there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from deploy.local.stack.options import SERVICES
from deploy.local.usage import COMMANDS, parse
from services.frontend.config import FrontendConfig
from services.frontend.metrics import Metrics
from services.kvbm.config import KvbmConfig
from services.router.config import RouterConfig
from services.worker.config import WorkerConfig
from services.worker.metrics import WorkerMetrics
from services.worker.turns.config import TurnsConfig

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "deploy" / "compose" / "README.md", *(ROOT / "docs").glob("*.md")])
MOVES = ("from_vllm.md", "from_ollama.md")
HELM = "docs/kubernetes.md"
"""Its `--set` names values of the chart, which has a schema of its own."""
PAGES = (*MOVES, "clients.md", "fields.md", "memory.md", "upgrade.md", "what_went_wrong.md")
"""Those that name settings as `--set` does; others leave the service out, or mean a table of its settings."""
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in DOCUMENTS}
SCHEMAS: dict[str, type[msgspec.Struct]] = {
    "frontend": FrontendConfig,
    "router": RouterConfig,
    "worker": WorkerConfig,
    "kvbm": KvbmConfig,
    "turns": TurnsConfig,
}
FLAGS = {
    f"--{field.name.replace('_', '-')}" for schema in COMMANDS.values() for field in msgspec.structs.fields(schema)
}
COMMAND = re.compile(r"\./headrace (.*?)(?= {2,}| ?[`|#)&;]|$)", re.M)


def settings(schema: type[msgspec.Struct], above: str) -> Iterator[str]:
    """Yield the name of every setting as `--set` takes it, tables included."""
    for field in msgspec.structs.fields(schema):
        name = f"{above}.{field.name}"
        yield name
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            yield from settings(field.type, name)


SETTINGS = {name for service, schema in SCHEMAS.items() for name in settings(schema, service)}


def tables(text: str) -> Iterator[list[str]]:
    """Yield the cells of each row of each table, without the heads."""
    lines = text.splitlines()
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line.startswith("| ") and not line.startswith("| ---") and not following.startswith("| ---"):
            yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip("|"))]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each `./headrace …` whose words are all there."""
    for line in COMMAND.findall(text):
        try:
            words = shlex.split(line)
        except ValueError:  # a quote that goes on in the next line
            continue
        if words and words[-1] != "key" and words[0].islower() and not re.search(r"[…$]|--(help|version)", line):
            yield words


@pytest.mark.parametrize("name", TEXTS)
def test_every_command_that_a_document_shows_is_accepted(name: str) -> None:
    for words in commands(TEXTS[name]):
        assert parse(words) is not None, words


def test_commands_are_found_in_the_documents() -> None:
    assert sum(len(list(commands(text))) for text in TEXTS.values()) > 60


@pytest.mark.parametrize("name", TEXTS.keys() - {HELM})
def test_every_setting_that_a_document_sets_exists(name: str) -> None:
    named = set(re.findall(r"--set '?([a-z_.]+)=", TEXTS[name]))
    if name.removeprefix("docs/") in PAGES:
        named |= set(re.findall(rf"`((?:{'|'.join(SERVICES)})\.[a-z_.]+)[=`]", TEXTS[name]))
    entries = {name for name in named if name.startswith("worker.vllm.")}  # vLLM knows which of them exist
    assert named - entries <= SETTINGS


@pytest.mark.parametrize("name", MOVES)
def test_every_flag_that_a_page_offers_in_place_of_theirs_exists(name: str) -> None:
    ours = " ".join(row[1] for row in tables(TEXTS[f"docs/{name}"]))
    flags = set(re.findall(r"--[a-z-]+", ours))
    assert len(flags) >= 4
    assert flags <= FLAGS
    for key in re.findall(r"--cuda ([a-z_]+)=", TEXTS[f"docs/{name}"]):
        assert f"worker.cuda.{key}" in SETTINGS


def test_every_metric_that_stands_for_one_of_vllm_exists() -> None:
    known = set()
    for of_service in (Metrics, WorkerMetrics):
        registry = CollectorRegistry()
        of_service(registry)
        known |= {family.name for family in registry.collect()}
    named = set(re.findall(r"`(headrace_[a-z_]+)`", TEXTS["docs/from_vllm.md"]))
    assert len(named) >= 3
    assert named <= known


def sources() -> str:
    """Return all strings of the product, one a line; `…` stands for what is put into them."""
    found = []
    for folder in ("services", "deploy", "shared"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.JoinedStr):
                    found.append(
                        "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
                    )
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


SAID = sources()


def quotes() -> Iterator[str]:
    """Yield the messages that what_went_wrong.md and memory.md quote."""
    wrong = TEXTS["docs/what_went_wrong.md"]
    for heading, column in (("It does not start", 0), ("A request is refused", 1), ("`/health` says no", 0)):
        [section] = re.findall(rf"^## {re.escape(heading)}\n(.*?)(?=^## )", wrong, re.M | re.S)
        yield from (row[column] for row in tables(section) if not row[column].startswith("("))
    yield from re.findall(r'"(it is frozen[^"]*)"', wrong)
    yield from (row[0] for row in tables(TEXTS["docs/memory.md"].partition("## When it is too much")[2]))


@pytest.mark.parametrize("message", list(quotes()))
def test_a_message_that_a_page_quotes_is_one_that_there_is(message: str) -> None:
    """Each piece of it, as `…`, a colon and what a message is filled with divide it, is in the source."""
    pieces = [piece.strip() for piece in re.split(r"…|: |worker-0 |SIGKILL\)", message)]
    pieces = [piece for piece in pieces if len(piece) > 2]
    assert any(len(piece) > 7 for piece in pieces)
    for piece in pieces:
        assert piece in SAID, piece
