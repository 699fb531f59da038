"""Whether there is room: the file system's, the machine's, the container's."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kvbm.pool.memory_check import check_memory, memory_limits
from shared.errors import ConfigError
from tests.kvbm.small_tmpfs import small_tmpfs


def test_a_small_pool_has_room(tmp_path: Path) -> None:
    check_memory(tmp_path, 1 << 20, 0)


def test_a_pool_larger_than_the_memory_is_refused_even_where_it_is_there(tmp_path: Path) -> None:
    for there_bytes in (0, 1 << 46):
        with pytest.raises(ConfigError, match=r"needs 65536.0 GiB, and this machine's memory is \d+\.\d GiB"):
            check_memory(tmp_path, 1 << 46, there_bytes)


def test_only_what_is_not_there_yet_needs_free_space(tmp_path: Path) -> None:
    with small_tmpfs(tmp_path / "small") as directory:
        check_memory(directory, 6 << 20, 5 << 20)
        with pytest.raises(ConfigError, match=f"of 6.0 MiB needs 3.0 MiB, and the free space of {directory} is 2.0"):
            check_memory(directory, 6 << 20, 3 << 20)


def test_the_limits_of_a_control_group_and_of_those_above_it_are_found(tmp_path: Path) -> None:
    inner = tmp_path / "cgroup" / "slice" / "unit"
    inner.mkdir(parents=True)
    (inner / "memory.max").write_text("max\n")
    (inner.parent / "memory.max").write_text("4096\n")
    memberships = tmp_path / "memberships"
    memberships.write_text("0::/slice/unit\n")
    assert list(memory_limits(tmp_path / "cgroup", memberships)) == [4096]
    (inner / "memory.max").write_text("1024\n")
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
