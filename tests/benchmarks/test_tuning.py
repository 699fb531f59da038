"""benchmarks/tuning.py: a case always has the same figures, and docs/tuning.md shows those that are stored."""

from __future__ import annotations

from pathlib import Path

import msgspec
from msgspec import Struct

from benchmarks.tuning import Case, TuningRow, cases, run_case, tables

ROOT = Path(__file__).resolve().parents[2]


class Stored(Struct):
    """The part of the stored results that is read."""

    rows: list[TuningRow]


def test_a_case_has_the_same_figures_each_time() -> None:
    case = Case("policies", "chats", "kv")
    assert run_case((case, 30)) == run_case((case, 30))


def test_the_document_shows_the_stored_tables_and_they_are_of_the_present_cases() -> None:
    text = (ROOT / "docs/tuning.md").read_text(encoding="utf-8")
    stored = msgspec.json.decode((ROOT / "benchmarks/results/tuning.json").read_bytes(), type=Stored).rows
    for table in tables(stored).values():
        assert table in text
    assert [(row.table, row.load, row.setting) for row in stored] == [
        (case.table, case.load, case.setting) for case in cases()
    ]
