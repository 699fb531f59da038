"""shared/processors.py: the processors of a process, under limits of control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shared.processors import usable_processors

ALLOWED = 8


@pytest.fixture
def memberships(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(ALLOWED)))
    return tmp_path / "memberships"


@pytest.mark.parametrize(
    ("quota", "processors"),
    [("max 100000", ALLOWED), ("400000 100000", 4), ("250000 100000", 2), ("50000 100000", 1), ("9900000 100000", 8)],
)
def test_a_groups_time_in_whole_processors_is_the_most_and_one_the_least(
    tmp_path: Path, memberships: Path, quota: str, processors: int
) -> None:
    (tmp_path / "cgroup" / "pod" / "box").mkdir(parents=True)
    (tmp_path / "cgroup" / "pod" / "cpu.max").write_text(quota + "\n")
    (tmp_path / "cgroup" / "pod" / "box" / "cpu.max").write_text("max 100000\n")
    memberships.write_text("0::/pod/box\n")
    assert usable_processors(tmp_path / "cgroup", memberships) == processors


@pytest.mark.parametrize(("quota", "processors"), [("-1", ALLOWED), ("150000", 1), ("300000", 3)])
def test_the_older_kind_of_control_group_limits_too_also_where_a_container_sees_its_own_as_the_root(
    tmp_path: Path, memberships: Path, quota: str, processors: int
) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    memberships.write_text("5:memory:/docker/1\n3:cpu,cpuacct:/docker/1\n0::/docker/1\n")
    assert usable_processors(tmp_path, memberships) == processors


def test_without_control_groups_it_is_the_number_that_the_process_may_run_on(tmp_path: Path, memberships: Path) -> None:
    assert usable_processors(tmp_path, memberships) == ALLOWED
    memberships.write_text("0::/\n")
    assert usable_processors(tmp_path, memberships) == ALLOWED
