"""How many processors this process may keep busy."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from shared.control_groups import CGROUPS, MEMBERSHIPS, control_groups, read


def usable_processors(root: Path = CGROUPS, memberships: Path = MEMBERSHIPS) -> int:
    """Return the number of processors that this process may run on, or fewer if its control groups have less time: with
    more threads than that all of them stand still together. 2.5 processors' time (`docker run --cpus 2.5`) is 2."""
    allowed = len(os.sched_getaffinity(0))
    return max(1, min((allowed, *(int(quota) for quota in _quotas(root, memberships)))))


def _quotas(root: Path, memberships: Path) -> Iterator[float]:
    """Yield the limits of this process's control groups, in processors."""
    for group, first_version in control_groups("cpu", root, memberships):
        if first_version:
            words = [read(group / "cpu.cfs_quota_us"), read(group / "cpu.cfs_period_us")]
        else:
            words = read(group / "cpu.max").split()
        if len(words) == 2 and words[0] not in ("", "max", "-1"):
            yield int(words[0]) / int(words[1])
