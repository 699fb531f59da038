"""Ends an engine's process group, and leaves nothing of it in shared memory.

vLLM's processes exchange steps through named shared memory of up to 240 MB, which no kernel removes. Python starts a
resource tracker next to them, which waits until the last of them has ended, removes what is left, and ends. So it is
not killed with the others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PASSES = 10
"""How often the group is looked through for processes that were started meanwhile. Then trackers are killed, too."""
_TRACKER = b"multiprocessing.resource_tracker"
"""What the command line of a resource tracker has."""


def kill_group(group: int) -> None:
    """Kill all processes of a group but its resource trackers. These end by themselves, also if they were stopped.

    The group's first process is killed last: when it ends while others are stopped, the kernel sends all of them a
    SIGHUP, which would end a tracker."""
    signalled: set[int] = set()
    for _ in range(PASSES):
        found = {pid: _is_tracker(pid) for pid in members(group) if pid not in signalled}
        if not found:
            return
        for pid in sorted(found, key=lambda pid: (not found[pid], pid == group)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT if found[pid] else signal.SIGKILL)
        signalled.update(found)
    with suppress(ProcessLookupError):  # all have ended
        os.killpg(group, signal.SIGKILL)


def members(group: int) -> Iterator[int]:
    """Yield the processes of a group that have not ended."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, _, number = (entry / "stat").read_bytes().rsplit(b")", 1)[1].split()[:3]
            except OSError:
                continue
            if int(number) == group and state not in (b"Z", b"X"):
                yield int(entry.name)


def _is_tracker(pid: int) -> bool:
    try:
        return _TRACKER in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return False
