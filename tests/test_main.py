"""tests/__main__.py: every test runs once, the longest files first, and failures are shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.__main__ import LONG_S, bunches, counted, main


def test_every_file_is_in_exactly_one_bunch() -> None:
    files = [f"tests/{folder}/test_{number}.py" for folder in "abc" for number in range(40)]
    durations = {file: float(7 * number % 43) for number, file in enumerate(files)}
    found = [file for bunch in bunches(files, durations) for file in bunch]
    assert sorted(found) == sorted(files)


def test_a_long_file_is_alone_and_the_longest_is_first() -> None:
    durations = {"tests/a/test_x.py": LONG_S + 1, "tests/b/test_y.py": 3 * LONG_S, "tests/a/test_z.py": 1.0}
    assert bunches(durations, durations) == [["tests/b/test_y.py"], ["tests/a/test_x.py"], ["tests/a/test_z.py"]]


def test_short_files_of_a_folder_are_bunched_up_to_the_length_of_a_long_one() -> None:
    durations = {f"tests/a/test_{number}.py": LONG_S / 4 for number in range(8)}
    assert [len(bunch) for bunch in bunches(durations, durations)] == [4, 4]


def test_files_that_share_a_fixture_are_one_bunch_however_long() -> None:
    durations = {f"tests/integration/shared/test_{number}.py": LONG_S * 2 for number in range(3)}
    assert bunches(durations, durations) == [sorted(durations)]


def test_the_last_lines_of_pytests_are_added_up() -> None:
    assert counted(
        ["== 2 failed, 3 passed in 1.00s ==", "1 passed, 1 skipped in 0.1s", "1 error in 2s", "2 errors"]
    ) == ("2 failed, 3 error, 4 passed, 1 skipped")
    assert counted(["no tests ran in 0.01s"]) == "no tests"


def test_what_failed_is_shown_and_is_the_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tests" / "a").mkdir(parents=True)
    (tmp_path / "tests" / "a" / "test_a.py").write_text(
        "def test_right(): pass\ndef test_wrong(): assert 'mill' == 'river'\n"
    )
    (tmp_path / "tests" / "test_b.py").write_text("def test_right(): pass\n")
    assert main(["-c", "/dev/null", "--rootdir", str(tmp_path), "-k", "wrong"], tmp_path) == 1
    shown = capsys.readouterr().out
    assert "'mill' == 'river'" in shown
    assert "s  tests/a/test_a.py::test_wrong" in shown
    assert shown.splitlines()[-1].startswith("1 failed, 2 deselected in ")
    assert main(["-c", "/dev/null", "--rootdir", str(tmp_path), "-k", "right"], tmp_path) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("2 passed, 1 deselected in ")
