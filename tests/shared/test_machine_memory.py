"""shared/machine_memory.py: limits of control groups, of both versions."""

from __future__ import annotations

from pathlib import Path

from shared.machine_memory import memory_limits, memory_sizes


def test_the_sizes_of_this_machines_memory_are_bytes() -> None:
    sizes = memory_sizes()
    assert 1 << 20 < sizes["MemAvailable"] <= sizes["MemTotal"]


def test_the_limits_of_a_control_group_and_of_those_above_it_are_found(tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "slice" / "unit"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("4096\n")
    memberships = tmp_path / "memberships"
    memberships.write_text("0::/slice/unit\n")
    assert list(memory_limits(tmp_path / "cgroup", memberships)) == [4096]
    (inner / "memory.max").write_text("1024\n")
    (tmp_path / "memory.max").write_text("1\n")  # above the root
    assert list(memory_limits(tmp_path / "cgroup", memberships)) == [1024, 4096]


def test_the_older_kind_of_control_group_is_found(tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "memory" / "box"
    inner.mkdir(parents=True)
    (inner / "memory.limit_in_bytes").write_text("2048\n")
    (inner.parent / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    memberships = tmp_path / "memberships"
    memberships.write_text("4:cpu,cpuacct:/box\n3:memory:/box\n0::/box\n")
    assert list(memory_limits(tmp_path / "cgroup", memberships)) == [2048, 9223372036854771712]


def test_a_group_that_cannot_be_seen_from_inside_a_container_has_no_limit(tmp_path: Path) -> None:
    memberships = tmp_path / "memberships"
    memberships.write_text("0::/not/here\n")
    assert list(memory_limits(tmp_path / "cgroup", memberships)) == []
    assert list(memory_limits(tmp_path / "cgroup", tmp_path / "missing")) == []
    memberships.write_text("0::/../elsewhere\n")
    assert list(memory_limits(tmp_path / "cgroup", memberships)) == []
