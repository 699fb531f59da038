"""Runs a program that tries a part of a model, with limits of time and memory.

run_trial ──input──▶ python -m MODULE: limit_process, begin_step, … ──output──▶ run_trial
                      └── ended by a limit: the part takes too much
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys

from shared.errors import ModelError

CPU_LIMIT_S = 2.0
"""The processor time of one step of a trial in seconds."""
WALL_LIMIT_S = 60.0
"""The time in seconds for a whole trial, on a machine that other processes keep busy."""
WHY_LIMIT_CHARACTERS = 200
"""The length to which the last line of a failed process is cut."""
_OVER = (-signal.SIGPROF, -signal.SIGSEGV, -signal.SIGABRT)
"""How a process ends that takes too long, goes too deep for Python's compiler, or gets no memory in Rust."""


def run_trial(module: str, given: bytes, subject: str) -> bytes | None:
    """Return the output of a trial's process; None if it took too much. Blocks. `subject` is what is tried. Raise
    ModelError if the trial failed."""
    program = (sys.executable, "-m", module)
    more = {"TOKENIZERS_PARALLELISM": "false", "RUST_BACKTRACE": "0"}
    try:
        ended = subprocess.run(
            program, input=given, capture_output=True, timeout=WALL_LIMIT_S, check=False, env={**os.environ, **more}
        )
    except OSError as wrong:  # no memory, or no files left
        raise ModelError(f"no process to try {subject} in: {wrong.strerror}") from None
    except subprocess.TimeoutExpired:
        raise ModelError(f"the trial of {subject} did not end within {WALL_LIMIT_S:g} s") from None
    if ended.returncode in _OVER:
        return None
    if ended.returncode:
        why = ": ".join(["", *ended.stderr.decode(errors="replace").splitlines()[-1:]])[:WHY_LIMIT_CHARACTERS]
        raise ModelError(f"the process that tried {subject} ended with status {ended.returncode}{why}")
    return ended.stdout


def limit_process(memory_bytes: int) -> None:
    """Limit the address space of this process, which is a trial's."""
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def begin_step(limit_s: float = CPU_LIMIT_S) -> None:
    """Count processor time from here on; more than the limit ends the process."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
