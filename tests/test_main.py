"""tests/__main__.py: nothing is left out, and what failed is told."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.__main__ import HERE, counted, main, parts


def test_every_test_file_is_in_exactly_one_part() -> None:
    run = [file for part in parts() for path in part for file in (path.rglob("test_*.py") if path.is_dir() else [path])]
    assert sorted(run) == sorted(HERE.rglob("test_*.py"))


def test_the_longest_parts_begin_first(tmp_path: Path) -> None:
    for name in ("a", "integration", "simulation"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "test_x.py").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "test_y.py").touch()
    found = [path.name for part in parts(tmp_path) for path in part]
    assert found == ["integration", "simulation", "a", "test_y.py"]


def test_what_pytests_say_is_added_up() -> None:
    assert counted(
        ["== 2 failed, 3 passed in 1.00s ==", "1 passed, 1 skipped in 0.1s", "1 error in 2s", "2 errors"]
    ) == ("2 failed, 3 error, 4 passed, 1 skipped")
    assert counted(["no tests ran in 0.01s"]) == "no tests"


def test_what_failed_is_shown_and_is_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "test_a.py").write_text("def test_right(): pass\ndef test_wrong(): assert 'mill' == 'river'\n")
    (tmp_path / "test_b.py").write_text("def test_right(): pass\n")
    assert main(["-c", "/dev/null", "-k", "wrong"], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "'mill' == 'river'" in shown
    assert shown.splitlines()[-1].startswith("1 failed, 2 deselected in ")
    assert main(["-c", "/dev/null", "-k", "right"], tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 passed, 1 deselected in ")
