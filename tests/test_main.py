"""tests/__main__.py: every test runs once, the longest files first, and failures are shown."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.__main__ import LONG_S, bunches, changed_files, counted, load, main, next_bunch, runnable
from tests.durations import Duration


def busy(seconds: float) -> Duration:
    return Duration(seconds, seconds)


def test_every_file_is_in_exactly_one_bunch() -> None:
    files = [f"tests/{folder}/test_{number}.py" for folder in "abc" for number in range(40)]
    durations = {file: busy(7.0 * number % 43) for number, file in enumerate(files)}
    found = [file for bunch in bunches(files, durations) for file in bunch]
    assert sorted(found) == sorted(files)


def test_a_long_file_is_alone_and_the_longest_is_first() -> None:
    durations = {
        "tests/a/test_x.py": busy(LONG_S + 1),
        "tests/b/test_y.py": busy(3 * LONG_S),
        "tests/a/test_z.py": busy(1.0),
        "tests/test_w.py": busy(0.9),
        "tests/test_v.py": busy(0.8),
    }
    assert bunches(durations, durations) == [
        ["tests/b/test_y.py"],
        ["tests/a/test_x.py"],
        ["tests/test_v.py", "tests/test_w.py"],
        ["tests/a/test_z.py"],
    ]


def test_short_files_of_a_folder_are_bunched_up_to_the_length_of_a_long_one() -> None:
    durations = {f"tests/a/test_{number}.py": busy(LONG_S / 4) for number in range(8)}
    assert [len(bunch) for bunch in bunches(durations, durations)] == [4, 4]


def test_files_that_share_a_fixture_are_one_bunch_however_long() -> None:
    durations = {f"tests/integration/shared/test_{number}.py": busy(LONG_S * 2) for number in range(3)}
    assert bunches(durations, durations) == [sorted(durations)]


def test_no_further_bunch_begins_while_the_machine_is_crowded() -> None:
    durations = {"a": busy(1.0), "b": Duration(100.0, 10.0)}
    assert next_bunch([["a"]], [["b"]], durations, 2, 6) == ["a"]
    assert next_bunch([["a"]], [["b"]], durations, 2, 7) is None
    assert next_bunch([["a"]], [], durations, 2, 100) == ["a"]
    assert runnable() >= 1, "this one runs"


def test_bunches_run_at_once_while_their_processor_time_fits_on_the_cores() -> None:
    durations = {"busy": Duration(100, 130), "half": Duration(80, 40), "waits": Duration(50, 5)}
    assert [load([file], durations) for file in durations] == [1.0, 0.5, 0.1]
    assert load(durations, durations) == pytest.approx(175 / 230)

    def beside(*running: str, cores: int = 1) -> str:
        found = next_bunch([["busy"], ["half"], ["waits"]], [[file] for file in running], durations, cores)
        return "" if found is None else found[0]

    assert beside() == "busy"
    assert beside("busy") == "waits"
    assert beside("busy", cores=2) == "busy"
    assert beside("busy", "waits", "waits") == ""
    assert beside("half") == "half"
    assert beside("half", "half") == "waits"


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


def test_a_changed_file_is_one_that_differs_from_where_the_branch_left_main_or_that_git_does_not_know(
    tmp_path: Path,
) -> None:
    def git(*words: str) -> None:
        who = ("-c", "user.name=any", "-c", "user.email=any@example.org")
        subprocess.run(["git", *who, *words], cwd=tmp_path, check=True, capture_output=True)

    def commit(file: str, text: str) -> None:
        (tmp_path / file).write_text(text)
        git("add", file)
        git("commit", "-m", file)

    git("init", "-b", "main")
    commit("kept.py", "1")
    commit("mine.py", "1")
    commit("edited.py", "1")
    git("checkout", "-b", "branch")
    commit("mine.py", "2")
    git("checkout", "main")
    commit("theirs.py", "1")
    git("checkout", "branch")
    (tmp_path / "edited.py").write_text("2")
    (tmp_path / "new.py").write_text("1")
    assert changed_files(tmp_path, "main") == ["edited.py", "mine.py", "new.py"]
    with pytest.raises(SystemExit, match="nowhere"):
        changed_files(tmp_path, "nowhere")
