"""docs/protocol.md has every subject that processes use, messages that exist, and the fields of an explanation."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
from msgspec import Struct

from shared.messages.people import Explanation
from shared.messages.select import Candidate, Overlap

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
SUBJECTS = DOCUMENT[DOCUMENT.index("## Subjects") : DOCUMENT.index("Streamed replies go to")]
SOURCES = [
    path.read_text(encoding="utf-8") for top in ("services", "shared", "deploy") for path in (ROOT / top).rglob("*.py")
]


def test_the_table_has_each_operation_of_workers_and_block_stores_that_code_asks_for() -> None:
    asked = {
        found
        for text in SOURCES
        for found in re.findall(r"subjects\.(worker|kvbm)\([^()]*(?:\([^()]*\))?[^()]*\"(\w+)\"\)", text)
    }
    assert {("worker", "operate"), ("worker", "generate"), ("kvbm", "stat")} <= asked
    rows = [row for row in SUBJECTS.splitlines() if row.startswith("| `headrace.")]
    listed = {
        (service, operation)
        for row in rows
        for service in re.findall(r"\.(worker|kvbm)\.\{id\}", row)
        for operation in re.findall(r"\.(\w+)`", row.split(" | ")[0] + " ")
    }
    assert asked <= listed


def test_messages_in_the_table_exist() -> None:
    named = set(re.findall(r"`([A-Z][A-Za-z]+)`", SUBJECTS))
    classes = {name for text in SOURCES for name in re.findall(r"^class (\w+)", text, re.M)}
    assert {"OperateWorker", "StepFrame"} <= named
    assert named <= classes


def test_an_explanation_has_the_fields_of_the_messages() -> None:
    block = DOCUMENT[DOCUMENT.index('{"router": id, "decisions"') :].partition("```")[0]
    named = set(re.findall(r'"(\w+)"', block))
    assert fields(Explanation) | fields(Candidate) <= named
    overlap = re.search(r'"overlap": \[(.*?)\]', block)
    assert overlap
    assert tuple(overlap[1].split(", ")) == tuple(field.name for field in msgspec.structs.fields(Overlap))


def fields(schema: type[Struct]) -> set[str]:
    return {field.name for field in msgspec.structs.fields(schema)}
