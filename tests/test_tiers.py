"""tests/tiers.py: every test is of one tier, so that `./check long` runs all there are; `./check` has a budget."""

from __future__ import annotations

import re
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.durations import UNKNOWN, of_files, read
from tests.tiers import (
    CLIENTS,
    FILES,
    MARKS,
    THIRDS,
    TIERS,
    clients_left_out,
    picked,
    third_of,
    tier_of,
    tier_with_marks,
    tiers_of,
    tiers_within,
)

ROOT = Path(__file__).resolve().parents[1]
TEXTS = {str(path.relative_to(ROOT)): path.read_text("utf-8") for path in (ROOT / "tests").rglob("test_*.py")}
BUDGET_S = 286.0
"""Seconds of processor time, by tests/durations.json, that the tests of `./check` may take: on two cores, and with the
type checkers, that is five minutes."""


def test_a_release_runs_every_file_and_each_day_only_clients_and_whole_files_of_long_wait() -> None:
    assert picked(TEXTS, TIERS, 0) == sorted(TEXTS)
    long = {file for file in TEXTS if tier_of(file) == "long"}
    for third in range(len(THIRDS)):
        today = picked(TEXTS, ("check", "all"), third)
        assert set(TEXTS).difference(today) == {*clients_left_out(TEXTS, third), *long}


def test_ci_runs_what_check_has_and_then_the_rest() -> None:
    both = {*picked(TEXTS, ["check"], 1), *picked(TEXTS, ["all"], 1)}
    assert both == set(picked(TEXTS, ["check", "all"], 1))
    assert not {file for file in picked(TEXTS, ["check"], 1) if tier_of(file) != "check"}


def test_what_the_tables_name_is_there() -> None:
    assert [name for name in FILES if not any(file.startswith(name) for file in TEXTS)] == []
    named = [f"{CLIENTS}test_{name}.py" for names in THIRDS for name in names]
    assert len(named) == len(set(named))
    assert set(named) <= set(TEXTS)


def test_the_tests_of_check_stay_within_their_budget_of_processor_time() -> None:
    known = of_files(read(), ["check"])
    took = {file: known.get(file, UNKNOWN).processor_s for file in TEXTS if tier_of(file) == "check"}
    dearest = sorted(took, key=lambda file: -took[file])[:5]
    assert sum(took.values()) <= BUDGET_S, f"the dearest are {dearest}: move one to the tier `all` in tests/tiers.py"


def test_a_file_without_a_name_in_the_table_is_of_all_and_the_longest_name_counts() -> None:
    assert tier_of("tests/new/test_x.py") == "all"
    assert tier_of("tests/router/test_x.py") == "check"
    assert tier_of("tests/integration/test_smoke.py") == "check"
    assert tier_of("tests/integration/test_up.py") == "all"


def test_a_mark_makes_the_tier_of_a_test_later_and_never_earlier() -> None:
    assert tier_with_marks("tests/router/test_x.py", []) == "check"
    assert tier_with_marks("tests/router/test_x.py", ["all", "long"]) == "long"
    assert tier_with_marks("tests/integration/test_up.py", ["check"]) == "all"


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("", {"check"}),
        ('@pytest.mark.tier("long")', {"check", "long"}),
        ("marks=pytest.mark.tier(tier)", {"check", "all", "long"}),
        ("pytestmark = needs_vllm", {"check", "long"}),
        ("marks=pytest.mark.gpu", {"check", "long"}),
    ],
)
def test_the_tiers_within_a_file_are_seen_in_its_text(text: str, tiers: set[str]) -> None:
    assert tiers_within("tests/router/test_x.py", text) == tiers


def test_every_mark_names_a_tier_or_a_variable() -> None:
    for file, text in TEXTS.items():
        assert set(re.findall(r'mark\.tier\("(.*?)"\)', text)) <= set(TIERS), file
    assert set(MARKS.values()) <= set(TIERS)


def test_three_days_in_a_row_run_all_clients() -> None:
    days = [date(2026, 2, 27) + timedelta(days) for days in range(3)]
    assert {third_of(day) for day in days} == {0, 1, 2}


def test_an_unknown_tier_is_refused() -> None:
    assert tiers_of("all,check") == ["check", "all"]
    with pytest.raises(ValueError, match="unknown tiers: nightly; there are check, all, long"):
        tiers_of("check,nightly")
