"""Runs a program that dies with its parent, even if the parent is killed with SIGKILL.

    python -I -S die_with_parent.py PARENT_PID PROGRAM ARGUMENTS…               by SIGKILL
    python -I -S die_with_parent.py --terminate PARENT_PID PROGRAM ARGUMENTS…   by SIGTERM: it ends what it has started

The kernel's parent-death signal is set for this process and stays over execv, so it holds for any program (nats-server
and etcd included) and leaves no process in between. Linux has it; elsewhere a killed `up` leaves its children behind.
It is a script, not a preexec function, because that would run Python between fork and exec.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
"""The constant of <linux/prctl.h>."""


def main() -> int:
    """Replace this process by the program. Return only if the parent has died already or the program cannot start."""
    terminate = sys.argv[1] == "--terminate"
    parent, *program = sys.argv[2:] if terminate else sys.argv[1:]
    number = signal.SIGTERM if terminate else signal.SIGKILL
    if sys.platform == "linux" and ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0) != 0:
        print("prctl(PR_SET_PDEATHSIG) failed", file=sys.stderr)
        return 1
    if os.getppid() != int(parent):  # it died before the signal was set
        return 1
    try:
        os.execv(program[0], program)
    except OSError as wrong:
        print(f"{program[0]}: {wrong.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
