"""The plots of goals."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from benchmarks.plot import draw_goals
from benchmarks.report import Goal, report


def test_goals_are_drawn_to_the_directory_of_their_report(tmp_path: Path) -> None:
    goals = [Goal("hits", 96.0, "%", 95.0, met=True), Goal("lost", 0.0, "batches", 0.0, met=True)]
    path = tmp_path / "some.json"
    path.write_bytes(msgspec.json.encode(report("some", ["--json"], goals, [])))
    drawn = draw_goals(path)
    assert drawn == tmp_path / "some.png"
    assert drawn.read_bytes().startswith(b"\x89PNG")


def test_a_file_that_is_no_report_is_not_drawn(tmp_path: Path) -> None:
    path = tmp_path / "some.json"
    path.write_text("{}")
    with pytest.raises(msgspec.ValidationError):
        draw_goals(path)
